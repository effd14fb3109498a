"""GLM-4 and GLM-Z1 (0414): Llama with norms after attention and MLP too, and half of the channels rotated."""

from __future__ import annotations

from typing import Any

from slime.models.family import Family
from slime.models.rows import ATTENTION, EMBEDDING, FUSED_MLP, NORMS, OUTPUT, QKV_BIAS, SANDWICH_NORMS
from slime.models.shape import decoder_args


def _args(config: Any) -> dict[str, Any]:
    return {
        **decoder_args(config, qkv_bias=config.attention_bias),
        "rotary_interleaved": True,
        "post_self_attn_layernorm": True,
        "post_mlp_layernorm": True,
    }


FAMILY = Family(("glm4",), EMBEDDING + NORMS + SANDWICH_NORMS + ATTENTION + QKV_BIAS + FUSED_MLP + OUTPUT, _args)
