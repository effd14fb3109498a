"""Model families: Hugging Face config -> Megatron-LM arguments, Hugging Face weights <-> Megatron weights.

A new family is a table in `families.py`.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from slime.models.families import FAMILIES
from slime.models.family import Family, Shape
from slime.models.shape import rule_shape


def hf_config(directory: str | Path) -> Any:
    """The config of a Hugging Face directory, by a class of transformers: code that lies beside it is never run.

    ValueError where its ``model_type`` is in no table, or it lacks what transformers asks of it; OSError where there is
    no readable config.json.
    """
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    if Path(directory).is_dir() and not Path(directory, "config.json").is_file():
        raise FileNotFoundError(f"{directory}: there is no config.json in it")
    values: Any = None
    with contextlib.suppress(TypeError):  # transformers 5.12 takes what the file holds for an object; 5.19 returns it
        values, _ = PreTrainedConfig.get_config_dict(directory)
    if not isinstance(values, dict):
        raise ValueError(f"the config.json of {directory} should hold an object {{...}}")
    given = values.get("model_type")
    kind = given if given in CONFIG_MAPPING else _family(given).model_types[0]
    try:
        return CONFIG_MAPPING[kind].from_dict({**values, "model_type": kind})
    except KeyError as error:  # of a scaling of positions that lacks something
        raise ValueError(f"the config.json of {directory}: {error.args[0]}") from error
    except Exception as error:  # of transformers' own checks: values of other types, or that contradict each other
        reason = str(error).splitlines()[-1].strip().split(": ", 1)[-1]
        raise ValueError(f"the config.json of {directory}: {reason}") from error


def family_of(config: Any) -> Family:
    """The family of a Hugging Face config; ValueError lists the ``model_type``s that are in a table."""
    return _family(config.model_type)


def _family(model_type: str | None) -> Family:
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise ValueError(f"model_type {model_type!r} is not supported; supported are {known}")


def trainable_heads() -> list[str]:
    """The model types whose MTP heads can be trained."""
    return [name for family in FAMILIES if family.heads is not None for name in family.model_types]


def shape_from_hf(config: Any) -> dict[str, Any]:
    """The model's shape under Megatron-LM's argument names (``num_layers``, ``norm_epsilon``, ``swiglu``, ...);
    ValueError for an unsupported ``model_type``, or a setting that the Megatron model would not compute."""
    return family_of(config).megatron_args(config)


def weight_shape(config: Any, *, with_heads: bool = False) -> Shape:
    """What the weight rules of the config's family need; errors as `shape_from_hf`. ``with_heads``: the MTP heads are
    parameters of the model, and not carried along."""
    return rule_shape(shape_from_hf(config), with_heads=with_heads)
