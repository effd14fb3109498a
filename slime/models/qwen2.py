"""Qwen2 and Qwen2.5: Llama with a bias on query, key and value; and MiMo-7B, which has layers for further tokens."""

from __future__ import annotations

from typing import Any

from slime.models.family import Family
from slime.models.rows import ATTENTION, EMBEDDING, MLP, NORMS, OUTPUT, QKV_BIAS
from slime.models.shape import decoder_args


def _args(config: Any) -> dict[str, Any]:
    return decoder_args(config, qkv_bias=True)


def _carried(config: Any) -> tuple[str, ...]:
    return ("model.mtp_layers.",) if getattr(config, "num_nextn_predict_layers", None) else ()


FAMILY = Family(("qwen2", "mimo"), EMBEDDING + NORMS + ATTENTION + QKV_BIAS + MLP + OUTPUT, _args, _carried)
