"""The shape of a decoder from its Hugging Face config, under Megatron-LM's argument names."""

from __future__ import annotations

from typing import Any

from slime.models.family import Shape

_ABSENT: dict[str, Any] = {
    **dict.fromkeys(
        (
            *("rotary_interleaved", "multi_latent_attention", "attention_output_gate", "qk_l2_norm"),
            *("apply_query_key_layer_scaling", "apply_residual_connection_post_layernorm", "heterogeneous_block_specs"),
            *("post_self_attn_layernorm", "post_mlp_layernorm"),
            *("is_hybrid_model", "moe_shared_expert_gate", "moe_router_enable_expert_bias", "moe_apply_probs_on_input"),
        ),
        False,
    ),
    **dict.fromkeys(
        (
            *("num_experts", "mtp_num_layers", "linear_attention_freq", "experimental_attention_variant"),
            *("no_rope_freq", "softmax_scale", "activation_func_clamp_value", "moe_latent_size"),
            *("moe_shared_expert_intermediate_size", "moe_router_num_groups", "moe_router_group_topk"),
            *("moe_router_topk_limited_devices", "moe_router_topk_scaling_factor"),
            *("rotary_seq_len_interpolation_factor", "mrope_section"),
        ),
        None,
    ),
    "glu_linear_offset": 0.0,
}
"""What Megatron can build or compute and a Llama-like decoder does not have."""
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The constants that megatron-core's ``use_rope_scaling`` has built in."""


def decoder_args(config: Any, *, qkv_bias: bool = False) -> dict[str, Any]:
    """Megatron-LM arguments of a Llama-like decoder.

    Args:
        qkv_bias: whether query, key and value have a bias and attention's output has none, which in some families is
            what the config's ``attention_bias`` means.

    Raises:
        ValueError: the config asks for something that the Megatron model does not have.
    """
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    _refuse_unsupported(config, "mlp_bias", *(() if qkv_bias else ("attention_bias",)))
    return _ABSENT | {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "group_query_attention": groups != heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "normalization": "RMSNorm",
        "norm_epsilon": config.rms_norm_eps,
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": qkv_bias,
        "qk_layernorm": False,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        **rope_args(config),
    }


def rope_args(config: Any) -> dict[str, Any]:
    """Megatron-LM arguments of rotary position embeddings; transformers 5 keeps them in ``rope_parameters``.

    Raises:
        ValueError: a scaling that megatron-core does not compute.
    """
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta: float = rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))
    percent: float = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0))
    args: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": int(theta) if theta == int(theta) else theta,
        "rotary_percent": float(percent),
        "use_rope_scaling": kind == "llama3",
    }
    if kind == "llama3":
        other = {k: rope.get(k) for k, v in _LLAMA3_ROPE.items() if rope.get(k) != v}
        if other:
            raise ValueError(f"rope_type llama3 with {other}: megatron-core has {_LLAMA3_ROPE} built in")
        args["rope_scaling_factor"] = float(rope["factor"])
    elif kind == "linear":
        args["rotary_seq_len_interpolation_factor"] = float(rope["factor"])
    elif kind != "default":
        raise ValueError(f"rope_type {kind!r} is not supported; supported are default, linear and llama3")
    return args


def sigmoid_moe_args(config: Any) -> dict[str, Any]:
    """Megatron-LM arguments of a mixture of experts as DeepSeek-V3 has it, from that family's config names.

    The first layers are dense. Experts are chosen by sigmoid score plus bias, in the best groups only, and weighted by
    their scores alone; every token goes through the shared experts, which are one MLP, as well.

    Raises:
        ValueError: routing that megatron-core computes otherwise.
    """
    topk, groups, kept = config.num_experts_per_tok, config.n_group, config.topk_group
    if groups > kept and topk // kept != 2:
        raise ValueError(
            f"num_experts_per_tok {topk} with topk_group {kept} of n_group {groups}: megatron-core ranks groups by "
            f"their {topk // kept} best experts (num_experts_per_tok / topk_group), the model by their 2 best"
        )
    if config.norm_topk_prob != (topk > 1):
        raise ValueError(
            f"norm_topk_prob={config.norm_topk_prob} with num_experts_per_tok {topk}: megatron-core divides the scores "
            "of a token's experts by their sum if and only if there are several"
        )
    dense = config.first_k_dense_replace
    return {
        "num_experts": config.n_routed_experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": (config.n_shared_experts or 0) * config.moe_intermediate_size or None,
        "moe_layer_freq": [int(layer >= dense) for layer in range(config.num_hidden_layers)],
        "moe_router_topk": topk,
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": groups,
        "moe_router_group_topk": kept,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        "moe_router_dtype": "fp32",
    }


def next_token_layers(config: Any) -> tuple[str, ...]:
    """For `Family.carried`: the layers after the decoder's that predict further tokens (MTP)."""
    first, count = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", None) or 0
    return tuple(f"model.layers.{layer}." for layer in range(first, first + count))


def _refuse_unsupported(config: Any, *biases: str) -> None:
    """Raise on what would load without an error and compute something else."""
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act {config.hidden_act!r} is not supported; supported is silu")
    sliding = [kind for kind in getattr(config, "layer_types", None) or () if kind != "full_attention"]
    if sliding or getattr(config, "use_sliding_window", False):
        raise ValueError(f"{config.model_type}: layers of type {sliding[:1] or ['sliding']} are not supported")
    for flag in biases:
        if getattr(config, flag, False):
            raise ValueError(f"{config.model_type} with {flag}=true is not supported")


def rule_shape(args: dict[str, Any]) -> Shape:
    """The part of a family's arguments that the weight rules use."""
    pattern = args.get("moe_layer_freq") or ()
    return Shape(
        num_layers=args["num_layers"],
        num_attention_heads=args["num_attention_heads"],
        num_query_groups=args["num_query_groups"],
        kv_channels=args["kv_channels"],
        ffn_hidden_size=args["ffn_hidden_size"],
        vocab_size=args["vocab_size"],
        tied=not args["untie_embeddings_and_output_weights"],
        num_experts=args.get("num_experts") or 0,
        moe_layers=tuple(bool(moe) for moe in pattern),
        given=frozenset(name for name, value in args.items() if value),
    )
