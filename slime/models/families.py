"""The model families, one after the other: of each a function of config.json, and the rows of its weights."""

from __future__ import annotations

from typing import Any

from slime.models.family import Family, Heads
from slime.models.rows import (
    ATTENTION,
    EMBEDDING,
    EXPERTS,
    FUSED_MLP,
    LATENT_ATTENTION,
    MLP,
    NORMS,
    OUTPUT,
    QK_NORM,
    QKV_BIAS,
    SANDWICH_NORMS,
    SIGMOID_EXPERTS,
    head_rows,
    next_token_heads,
)
from slime.models.shape import decoder_args, latent_args, next_token_layers, sigmoid_moe_args

# Llama 3.
LLAMA = Family(("llama",), EMBEDDING + NORMS + ATTENTION + MLP + OUTPUT, decoder_args)


# Qwen2 and Qwen2.5: Llama with a bias on query, key and value; and MiMo-7B, which has MTP heads.
def _qwen2(config: Any) -> dict[str, Any]:
    return decoder_args(config, qkv_bias=True)


def _mimo_heads(config: Any) -> tuple[str, ...]:
    return ("model.mtp_layers.",) if getattr(config, "num_nextn_predict_layers", None) else ()


_QWEN2_LAYER = NORMS + ATTENTION + QKV_BIAS + MLP
_MIMO_HEAD = {
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "eh_proj": "input_proj",
    "final_layernorm": "final_layernorm",
}
_MIMO_ROWS = head_rows("model.mtp_layers.{}.", _MIMO_HEAD, _QWEN2_LAYER, mlp="dense", layers="head", hidden_first=True)
QWEN2 = Family(
    ("qwen2", "mimo"),
    EMBEDDING + _QWEN2_LAYER + OUTPUT,
    _qwen2,
    _mimo_heads,
    Heads(_MIMO_ROWS, mask_first_embedding=True),
)


# Qwen3: Llama with a norm on every query and key head.
def _qwen3(config: Any) -> dict[str, Any]:
    return {**decoder_args(config), "qk_layernorm": True}


_QWEN3_LAYER = NORMS + ATTENTION + QK_NORM + MLP
QWEN3 = Family(("qwen3",), EMBEDDING + _QWEN3_LAYER + OUTPUT, _qwen3)


# Qwen3 mixture of experts: softmax router over the top k, layers with and without experts.
def _qwen3_moe(config: Any) -> dict[str, Any]:
    step, dense = config.decoder_sparse_step, set(config.mlp_only_layers or ())
    return {
        **_qwen3(config),
        "num_experts": config.num_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_layer_freq": [int(i not in dense and (i + 1) % step == 0) for i in range(config.num_hidden_layers)],
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not config.norm_topk_prob,
    }


QWEN3_MOE = Family(("qwen3_moe",), EMBEDDING + _QWEN3_LAYER + EXPERTS + OUTPUT, _qwen3_moe)


# GLM-4 and GLM-Z1 (0414): Llama with norms after attention and MLP too, and half of the channels rotated.
def _glm4(config: Any) -> dict[str, Any]:
    return {
        **decoder_args(config, qkv_bias=config.attention_bias),
        "rotary_interleaved": True,
        "post_self_attn_layernorm": True,
        "post_mlp_layernorm": True,
    }


GLM4 = Family(("glm4",), EMBEDDING + NORMS + SANDWICH_NORMS + ATTENTION + QKV_BIAS + FUSED_MLP + OUTPUT, _glm4)


# GLM-4.5, 4.6 and 4.7: DeepSeek-V3's experts and router, with grouped-query attention that has biases.
def _glm4_moe(config: Any) -> dict[str, Any]:
    return {
        **decoder_args(config, qkv_bias=config.attention_bias),
        **sigmoid_moe_args(config),
        "qk_layernorm": config.use_qk_norm,
    }


_GLM4_MOE_LAYER = NORMS + ATTENTION + QKV_BIAS + QK_NORM + MLP + SIGMOID_EXPERTS
GLM4_MOE = Family(
    ("glm4_moe",),
    EMBEDDING + _GLM4_MOE_LAYER + OUTPUT,
    _glm4_moe,
    next_token_layers,
    next_token_heads(_GLM4_MOE_LAYER),
)


# DeepSeek V3, V3.1 and R1, Moonlight and Kimi K2: multi-latent attention, shared experts and a sigmoid router.
def _deepseek_v3(config: Any) -> dict[str, Any]:
    return {**latent_args(config), **sigmoid_moe_args(config)}


_DEEPSEEK_V3_LAYER = NORMS + LATENT_ATTENTION + MLP + SIGMOID_EXPERTS
DEEPSEEK_V3 = Family(
    ("deepseek_v3", "kimi_k2"),
    EMBEDDING + _DEEPSEEK_V3_LAYER + OUTPUT,
    _deepseek_v3,
    next_token_layers,
    next_token_heads(_DEEPSEEK_V3_LAYER),
)


# GLM-4.7-Flash: DeepSeek-V3's layers, with a list that says which of them have experts.
def _glm4_moe_lite(config: Any) -> dict[str, Any]:
    layers = [int(kind == "sparse") for kind in config.mlp_layer_types]
    if len(layers) != config.num_hidden_layers:
        raise ValueError(
            f"glm4_moe_lite: mlp_layer_types has {len(layers)} entries for {config.num_hidden_layers} layers"
        )
    dense = getattr(config, "first_k_dense_replace", None)  # what engines go by; transformers does by the list alone
    if dense is not None and layers != [int(layer >= dense) for layer in range(len(layers))]:
        raise ValueError(
            f"glm4_moe_lite: first_k_dense_replace {dense} and mlp_layer_types, by default one dense layer, say that "
            "different layers have experts"
        )
    args = latent_args(config)
    if args["rotary_percent"] != 1.0:
        raise ValueError(f"glm4_moe_lite with partial_rotary_factor {args['rotary_percent']} is not supported")
    return {**args, **sigmoid_moe_args(config, layers)}


GLM4_MOE_LITE = Family(("glm4_moe_lite",), DEEPSEEK_V3.rows, _glm4_moe_lite, next_token_layers, DEEPSEEK_V3.heads)

FAMILIES = (LLAMA, QWEN2, QWEN3, QWEN3_MOE, GLM4, GLM4_MOE, GLM4_MOE_LITE, DEEPSEEK_V3)
