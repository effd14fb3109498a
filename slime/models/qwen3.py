"""Qwen3: Llama with a norm on every query and key head."""

from __future__ import annotations

from typing import Any

from slime.models.family import Family
from slime.models.rows import ATTENTION, EMBEDDING, MLP, NORMS, OUTPUT, QK_NORM
from slime.models.shape import decoder_args


def _args(config: Any) -> dict[str, Any]:
    return {**decoder_args(config), "qk_layernorm": True}


FAMILY = Family(("qwen3",), EMBEDDING + NORMS + ATTENTION + QK_NORM + MLP + OUTPUT, _args)
