"""GLM-4.5, 4.6 and 4.7: DeepSeek-V3's experts and router, with grouped-query attention that has biases."""

from __future__ import annotations

from typing import Any

from slime.models.family import Family
from slime.models.rows import (
    ATTENTION,
    EMBEDDING,
    MLP,
    NORMS,
    OUTPUT,
    QK_NORM,
    QKV_BIAS,
    SIGMOID_EXPERTS,
    next_token_heads,
)
from slime.models.shape import decoder_args, next_token_layers, sigmoid_moe_args


def _args(config: Any) -> dict[str, Any]:
    return {
        **decoder_args(config, qkv_bias=config.attention_bias),
        **sigmoid_moe_args(config),
        "qk_layernorm": config.use_qk_norm,
    }


_LAYER = NORMS + ATTENTION + QKV_BIAS + QK_NORM + MLP + SIGMOID_EXPERTS
FAMILY = Family(("glm4_moe",), EMBEDDING + _LAYER + OUTPUT, _args, next_token_layers, next_token_heads(_LAYER))
