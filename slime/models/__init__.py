"""Model families: Hugging Face config -> Megatron-LM arguments, Hugging Face weights <-> Megatron weights.

A new family is one file with its table and one entry in `FAMILIES`.
"""

from __future__ import annotations

from typing import Any

from slime.models import glm4, glm4_moe, llama, qwen2, qwen3, qwen3_moe
from slime.models.family import Family, Shape
from slime.models.shape import rule_shape

FAMILIES = (llama.FAMILY, qwen2.FAMILY, qwen3.FAMILY, qwen3_moe.FAMILY, glm4.FAMILY, glm4_moe.FAMILY)

__all__ = ["FAMILIES", "Family", "Shape", "family_of", "shape_from_hf", "weight_shape"]


def family_of(hf_config: Any) -> Family:
    """The family of a Hugging Face config.

    Raises:
        ValueError: its ``model_type`` is in no table; the message lists those that are.
    """
    for family in FAMILIES:
        if hf_config.model_type in family.model_types:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise ValueError(f"model_type {hf_config.model_type!r} is not supported; supported are {known}")


def shape_from_hf(hf_config: Any) -> dict[str, Any]:
    """The model's shape under Megatron-LM's argument names (``num_layers``, ``norm_epsilon``, ``swiglu``, ...).

    Raises:
        ValueError: an unsupported ``model_type``, or a setting that the Megatron model would not compute.
    """
    return family_of(hf_config).megatron_args(hf_config)


def weight_shape(hf_config: Any) -> Shape:
    """What the weight rules of the config's family need; errors as `shape_from_hf`."""
    return rule_shape(shape_from_hf(hf_config))
