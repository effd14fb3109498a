"""Qwen3 mixture of experts: softmax router over the top k, layers with and without experts."""

from __future__ import annotations

from typing import Any

from slime.models.family import Family
from slime.models.rows import ATTENTION, EMBEDDING, EXPERTS, MLP, NORMS, OUTPUT, QK_NORM
from slime.models.shape import decoder_args


def _args(config: Any) -> dict[str, Any]:
    step, dense = config.decoder_sparse_step, set(config.mlp_only_layers or ())
    return {
        **decoder_args(config),
        "qk_layernorm": True,
        "num_experts": config.num_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_layer_freq": [int(i not in dense and (i + 1) % step == 0) for i in range(config.num_hidden_layers)],
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not config.norm_topk_prob,
    }


FAMILY = Family(("qwen3_moe",), EMBEDDING + NORMS + ATTENTION + QK_NORM + MLP + EXPERTS + OUTPUT, _args)
