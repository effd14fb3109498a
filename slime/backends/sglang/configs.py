"""Configs of models of which SGLang 0.5.17 has a class and neither it nor transformers a config."""

from __future__ import annotations

from transformers import CONFIG_MAPPING, AutoConfig, Qwen2Config


class MiMoConfig(Qwen2Config):
    """MiMo-7B: a Qwen2 with MTP layers, which SGLang's class passes over."""

    model_type = "mimo"


def register() -> None:
    """Have ``AutoConfig`` read them. Goes when SGLang or transformers does."""
    if MiMoConfig.model_type not in CONFIG_MAPPING:
        AutoConfig.register(MiMoConfig.model_type, MiMoConfig)
