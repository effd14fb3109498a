"""DeepSeek V3, V3.1 and R1, Moonlight and Kimi K2: multi-latent attention, shared experts and a sigmoid router."""

from __future__ import annotations

from typing import Any

from slime.models.family import Family
from slime.models.rows import EMBEDDING, LATENT_ATTENTION, MLP, NORMS, OUTPUT, SIGMOID_EXPERTS, next_token_heads
from slime.models.shape import latent_args, next_token_layers, sigmoid_moe_args


def _args(config: Any) -> dict[str, Any]:
    return {**latent_args(config), **sigmoid_moe_args(config)}


_LAYER = NORMS + LATENT_ATTENTION + MLP + SIGMOID_EXPERTS
FAMILY = Family(
    ("deepseek_v3", "kimi_k2"),
    EMBEDDING + _LAYER + OUTPUT,
    _args,
    next_token_layers,
    next_token_heads(_LAYER),
)
