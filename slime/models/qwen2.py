"""Qwen2 and Qwen2.5: Llama with a bias on query, key and value; and MiMo-7B, which has MTP heads."""

from __future__ import annotations

from typing import Any

from slime.models.family import Family, Heads
from slime.models.rows import ATTENTION, EMBEDDING, MLP, NORMS, OUTPUT, QKV_BIAS, head_rows
from slime.models.shape import decoder_args


def _args(config: Any) -> dict[str, Any]:
    return decoder_args(config, qkv_bias=True)


def _carried(config: Any) -> tuple[str, ...]:
    return ("model.mtp_layers.",) if getattr(config, "num_nextn_predict_layers", None) else ()


_LAYER = NORMS + ATTENTION + QKV_BIAS + MLP
_HEADS = head_rows(
    "model.mtp_layers.{}.",
    {
        "enorm": "token_layernorm",
        "hnorm": "hidden_layernorm",
        "eh_proj": "input_proj",
        "final_layernorm": "final_layernorm",
    },
    _LAYER,
    mlp="dense",
    layers="head",
    hidden_first=True,
)
FAMILY = Family(
    ("qwen2", "mimo"),
    EMBEDDING + _LAYER + OUTPUT,
    _args,
    _carried,
    Heads(_HEADS, mask_first_embedding=True),
)
