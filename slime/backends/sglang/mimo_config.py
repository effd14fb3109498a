"""A config that servers read, in a module, by which processes that they spawn unpickle it."""

from __future__ import annotations

from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    """MiMo-7B: a Qwen2 with MTP layers, which SGLang's class passes over."""

    model_type = "mimo"
