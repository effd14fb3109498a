"""Configs of models, as their config.json has them, that transformers lacks.

They are of a module, by which processes that a server spawns unpickle them.
"""

from __future__ import annotations

from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    """MiMo-7B: a Qwen2 with MTP layers, which SGLang's class passes over."""

    model_type = "mimo"
