"""GLM-4.7-Flash: DeepSeek-V3's layers, with a list that says which of them have experts."""

from __future__ import annotations

from typing import Any

from slime.models import deepseek_v3
from slime.models.family import Family
from slime.models.shape import latent_args, next_token_layers, sigmoid_moe_args


def _args(config: Any) -> dict[str, Any]:
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


FAMILY = Family(("glm4_moe_lite",), deepseek_v3.FAMILY.rows, _args, next_token_layers, deepseek_v3.FAMILY.heads)
