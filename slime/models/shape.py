"""The shape of a decoder from its Hugging Face config, under Megatron-LM's argument names."""

from __future__ import annotations

from collections.abc import Callable
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
            *("num_experts", "linear_attention_freq", "experimental_attention_variant"),
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
_LENGTHS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
"""Where a config may say how long a sequence can be; the first that it has counts."""


def decoder_args(
    config: Any, rope: Callable[[Any], dict[str, Any]] | None = None, *, qkv_bias: bool = False
) -> dict[str, Any]:
    """Megatron-LM arguments of a Llama-like decoder; ValueError where the config asks for something that the Megatron
    model does not have.

    Args:
        rope: gives those of its position embeddings; default `rope_args`.
        qkv_bias: whether query, key and value have a bias and attention's output has none, which in some families is
            what the config's ``attention_bias`` means.
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
        "mtp_num_layers": getattr(config, "num_nextn_predict_layers", None) or None,
        **(rope or rope_args)(config),
    }


def rope_args(config: Any) -> dict[str, Any]:
    """Megatron-LM arguments of rotary position embeddings, which transformers 5 keeps in ``rope_parameters``;
    ValueError for a scaling that megatron-core does not compute."""
    rope, kind, args = _rope(config)
    args["use_rope_scaling"] = kind == "llama3"
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


def _rope(config: Any) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """The config's parameters of rotary embeddings, their kind, and the arguments that all kinds have."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta: float = rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))
    percent: float = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0))
    args = {
        "position_embedding_type": "rope",
        "rotary_base": int(theta) if theta == int(theta) else theta,
        "rotary_percent": float(percent),
    }
    return rope, kind, args


def context_length(config: Any) -> int:
    """Tokens of the longest context that SGLang serves a model with, by its Hugging Face config.

    A scaling of the positions lengthens it, where the config does not say what length it starts from: then
    ``max_position_embeddings`` is the scaled one. ValueError where there is no number. This is `get_context_length` of
    SGLang 0.5.17, in sglang/srt/utils/hf_transformers/common.py.
    """
    rope = getattr(config, "rope_scaling", None) or {}
    lengthened = "original_max_position_embeddings" not in rope and rope.get("rope_type") != "llama3"
    factor = rope.get("factor", 1) if lengthened else 1
    lengths: dict[str, Any] = {name: getattr(config, name, None) for name in _LENGTHS}
    name = next((name for name, length in lengths.items() if length is not None), None)
    if name is None:
        return 2048
    try:
        return int(factor * lengths[name])
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} {lengths[name]!r}, with rope_scaling's factor {factor!r}, is not a length") from error


def latent_args(config: Any) -> dict[str, Any]:
    """Megatron-LM arguments of a decoder with DeepSeek's multi-latent attention.

    It has no ``kv_channels`` and no biases of query, key and value: what flags say of them is of no effect. ValueError
    where the config asks for something that the Megatron model does not have.
    """
    if not getattr(config, "rope_interleave", True):
        raise ValueError(f"{config.model_type} with rope_interleave=false is not supported")
    args = decoder_args(config, latent_rope_args)
    del args["kv_channels"], args["add_qkv_bias"]
    return args | {
        "num_query_groups": config.num_attention_heads,
        "group_query_attention": False,
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
    }


def latent_rope_args(config: Any) -> dict[str, Any]:
    """Megatron-LM arguments of the rotary embeddings of multi-latent attention, plain or YaRN with DeepSeek's scales;
    ValueError for a scaling that megatron-core does not compute."""
    rope, kind, args = _rope(config)
    args["use_rope_scaling"] = False
    if kind == "default":
        # A factor of 1 is none, whatever the scales.
        return args | {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    if kind != "yarn":
        raise ValueError(
            f"rope_type {kind!r} is not supported with multi-latent attention; supported are default, yarn"
        )
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if not mscale or not all_dim:
        if all_dim:
            raise ValueError(f"rope_type yarn with mscale_all_dim {all_dim} and no mscale is not supported")
        mscale, all_dim = 1.0, 0.0  # which is what transformers makes of either alone
    for name, only in (("attention_factor", None), ("truncate", True)):
        if rope.get(name, only) is not only:
            raise ValueError(f"rope_type yarn with {name}={rope[name]} is not supported")
    return args | {
        "rope_type": "yarn",
        "rotary_scaling_factor": float(rope["factor"]),
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": float(rope.get("beta_fast") or 32),
        "beta_slow": float(rope.get("beta_slow") or 1),
        "mscale": float(mscale),
        "mscale_all_dim": float(all_dim),
    }


def sigmoid_moe_args(config: Any, layers: list[int] | None = None) -> dict[str, Any]:
    """Megatron-LM arguments of a mixture of experts as DeepSeek-V3 has it, from that family's config names; ValueError
    for routing that megatron-core computes otherwise.

    Experts are chosen by sigmoid score plus bias, in the best groups only, and weighted by their scores alone; every
    token goes through the shared experts, which are one MLP, as well. ``layers`` has 1 for each layer with experts; by
    default these are all but the first ``first_k_dense_replace``.
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
    if layers is None:
        layers = [int(layer >= config.first_k_dense_replace) for layer in range(config.num_hidden_layers)]
    return {
        "num_experts": config.n_routed_experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": (config.n_shared_experts or 0) * config.moe_intermediate_size or None,
        "moe_layer_freq": layers,
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
    """For `Family.carried`: the multi-token prediction (MTP) layers after the decoder's."""
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


def rule_shape(args: dict[str, Any], *, with_heads: bool = False) -> Shape:
    """The part of a family's arguments that the weight rules use; with the MTP heads, where these are trained."""
    pattern = args.get("moe_layer_freq") or ()
    return Shape(
        num_layers=args["num_layers"],
        num_attention_heads=args["num_attention_heads"],
        num_query_groups=args["num_query_groups"],
        kv_channels=args.get("kv_channels", 0),
        ffn_hidden_size=args["ffn_hidden_size"],
        vocab_size=args["vocab_size"],
        tied=not args["untie_embeddings_and_output_weights"],
        num_experts=args.get("num_experts") or 0,
        moe_layers=tuple(bool(moe) for moe in pattern),
        given=frozenset(name for name, value in args.items() if value),
        next_token_heads=(args["mtp_num_layers"] or 0) if with_heads else 0,
    )
