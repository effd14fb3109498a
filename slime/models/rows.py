"""Rows that families share: a pre-norm decoder with RMSNorm, grouped-query or latent attention, and a gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slime.models.family import HEADS_PREFIX, Heads, Row, fused_gate_up, gate_up, qkv, swapped_halves, vocabulary

_LAYER = "decoder.layers.{}."
_HF_LAYER = "model.layers.{}."
_HEAD = HEADS_PREFIX + "layers.{}."
_EMBEDDING = "model.embed_tokens.weight"


def _row(megatron: str, *hf: str, **fields: Any) -> Row:
    """A row of every layer, with other fields of `Row`; names within the layer."""
    return Row(_LAYER + megatron, tuple(_HF_LAYER + name for name in hf), **fields)


EMBEDDING = (Row("embedding.word_embeddings.weight", (_EMBEDDING,), vocabulary, dim=0),)

NORMS = (
    _row("input_layernorm.weight", "input_layernorm.weight"),
    _row("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
)

ATTENTION = (
    _row(
        "self_attention.linear_qkv.weight",
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
        rule=qkv,
        dim=0,
    ),
    _row("self_attention.linear_proj.weight", "self_attn.o_proj.weight", dim=1),
)

QKV_BIAS = (
    _row(
        "self_attention.linear_qkv.bias",
        "self_attn.q_proj.bias",
        "self_attn.k_proj.bias",
        "self_attn.v_proj.bias",
        rule=qkv,
        dim=0,
        when="add_qkv_bias",
    ),
)

QK_NORM = (
    _row("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", when="qk_layernorm"),
    _row("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", when="qk_layernorm"),
)

LATENT_ATTENTION = (
    _row("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", dim=0, unless="q_lora_rank"),
    _row(
        "self_attention.linear_q_down_proj.weight",
        "self_attn.q_a_proj.weight",
        when="q_lora_rank",
        same_bucket="down",
    ),
    _row("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight", when="q_lora_rank"),
    _row("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight", dim=0, when="q_lora_rank"),
    _row("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", same_bucket="down"),
    _row("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
    _row("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", dim=0),
    _row("self_attention.linear_proj.weight", "self_attn.o_proj.weight", dim=1),
)

MLP = (
    _row("mlp.linear_fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", rule=gate_up, dim=0, layers="dense"),
    _row("mlp.linear_fc2.weight", "mlp.down_proj.weight", dim=1, layers="dense"),
)

EXPERTS = (
    _row("mlp.router.weight", "mlp.gate.weight", layers="moe"),
    _row(
        "mlp.experts.{}.linear_fc1.weight",
        "mlp.experts.{}.gate_proj.weight",
        "mlp.experts.{}.up_proj.weight",
        rule=gate_up,
        dim=0,
        layers="moe",
    ),
    _row("mlp.experts.{}.linear_fc2.weight", "mlp.experts.{}.down_proj.weight", dim=1, layers="moe"),
)

FUSED_MLP = (
    _row("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight", rule=fused_gate_up, dim=0, layers="dense"),
    _row("mlp.linear_fc2.weight", "mlp.down_proj.weight", dim=1, layers="dense"),
)

SANDWICH_NORMS = (
    _row("post_self_attn_layernorm.weight", "post_self_attn_layernorm.weight", when="post_self_attn_layernorm"),
    _row("post_mlp_layernorm.weight", "post_mlp_layernorm.weight", when="post_mlp_layernorm"),
)
"""On what attention and MLP add to their input, beside the norms before them."""

_SHARED = {"layers": "moe", "when": "moe_shared_expert_intermediate_size"}
SIGMOID_EXPERTS = (
    *EXPERTS,
    _row(
        "mlp.router.expert_bias",
        "mlp.gate.e_score_correction_bias",
        layers="moe",
        when="moe_router_enable_expert_bias",
    ),
    _row(
        "mlp.shared_experts.linear_fc1.weight",
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
        rule=gate_up,
        dim=0,
        **_SHARED,
    ),
    _row("mlp.shared_experts.linear_fc2.weight", "mlp.shared_experts.down_proj.weight", dim=1, **_SHARED),
)
"""Experts that a router scores by sigmoid and chooses by score plus bias, and those that every token goes through."""

OUTPUT = (
    Row("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Row("output_layer.weight", ("lm_head.weight",), vocabulary, dim=0, if_tied=_EMBEDDING),
)


def next_token_heads(layer: tuple[Row, ...]) -> Heads:
    """Heads that are named as layers after the decoder's last, and have experts: DeepSeek-V3's kind."""
    names = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "shared_head.norm"}
    rows = head_rows(_HF_LAYER, names, layer, mlp="moe", layers="after")
    return Heads(rows, mask_first_embedding=False, copies=("embed_tokens.", "shared_head.head."))


def head_rows(
    prefix: str,
    names: Mapping[str, str],
    layer: tuple[Row, ...],
    *,
    mlp: str,
    layers: str,
    hidden_first: bool = False,
) -> tuple[Row, ...]:
    """Rows of multi-token prediction (MTP) heads, each of which has a layer like the decoder's.

    Args:
        prefix: of a head's Hugging Face names.
        names: what a head has beside its layer: Megatron's name -> Hugging Face's.
        layer: the rows of the decoder's layers.
        mlp: "dense" or "moe", the MLP that heads have.
        layers: `Row.layers`.
        hidden_first: whether their projection reads the hidden state before the embedding in Hugging Face's order.
    """
    own = {name: Row(f"{_HEAD}{name}.weight", (f"{prefix}{hf}.weight",), layers=layers) for name, hf in names.items()}
    if hidden_first:
        own["eh_proj"] = replace(own["eh_proj"], rule=swapped_halves, along=1)
    return tuple(own.values()) + tuple(
        replace(
            row,
            megatron=row.megatron.replace(_LAYER, f"{_HEAD}transformer_layer."),
            hf=tuple(hf.replace(_HF_LAYER, prefix) for hf in row.hf),
            layers=layers,
            same_bucket=row.same_bucket and f"head's {row.same_bucket}",
        )
        for row in layer
        if row.layers in ("all", mlp)
    )
