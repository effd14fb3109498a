"""The model's shape, of its config.json, against the flags."""

from __future__ import annotations

import copy
import math
import re
from argparse import Namespace
from typing import Any

from slime.options.errors import OptionError, naming
from slime.options.flags.megatron_names import flag_saying
from slime.options.flags.patterns import written_pattern
from slime.options.flags.values import json_value
from slime.options.learning.algorithm import PARAMETER_LISTS
from slime.options.mtp import check_heads

_EXPERT = re.compile(r"(\.experts)\.\d+\.")
_OVERRIDES = "--sglang-json-model-override-args"


def take_shape(args: Namespace, given: set[str], warnings: list[str]) -> None:
    """Take the model's shape, and how long a context is, from its config.json; OptionError where flags contradict it.

    Args:
        given: the attributes that flags or YAML set.
        warnings: gets the mismatches with ``--allow-config-mismatch``.
    """
    from slime.models import hf_config, shape_from_hf, trainable_heads
    from slime.models.shape import context_length

    take_rotary_factor(args, given)
    with naming(f"--hf-checkpoint {args.hf_checkpoint}:", TypeError, OSError):
        config = hf_config(args.hf_checkpoint)
        shape, args.model_context = shape_from_hf(config), context_length(config)
    _apply(args, shape, given, warnings)
    if overrides := getattr(args, "sglang_json_model_override_args", None):
        of_engines = _config_of_engines(config, overrides)
        compares = args.placement != "rollout_only" and not args.allow_config_mismatch
        with naming(f"{_OVERRIDES}:", TypeError, AttributeError):  # of values that no config has
            args.model_context = context_length(of_engines)
            overridden = shape_from_hf(of_engines) if compares else shape
        _check_engines(shape, overridden)
    check_heads(args, shape["mtp_num_layers"] or 0, config.model_type, trainable_heads())


def _apply(args: Namespace, shape: dict[str, Any], given: set[str], warnings: list[str]) -> None:
    own = {name: getattr(args, name, None) for name in given}
    if own.get("mtp_num_layers") == 0 and not args.enable_mtp_training:
        del own["mtp_num_layers"]  # says that no heads are trained
    mismatches = contradictions(own, shape)
    for name, value in shape.items():
        if name not in mismatches:
            setattr(args, name, value)
    if mismatches:
        message = f"flags contradict {args.hf_checkpoint}/config.json: {'; '.join(mismatches.values())}"
        if getattr(args, "random_weights", False):  # nothing would be loaded that does not fit
            raise OptionError(f"{message}; drop the flags: --random-weights makes the model that config.json describes")
        if not args.allow_config_mismatch:
            raise OptionError(f"{message}; drop the flags, or keep them with --allow-config-mismatch")
        warnings.append(message)
    pattern = getattr(args, "moe_layer_freq", None)
    if isinstance(pattern, list) and len(pattern) != args.num_layers:
        raise OptionError(
            f"--num-layers is {args.num_layers}, and --moe-layer-freq, which {args.hf_checkpoint}/config.json gives "
            f"where no flag does, is of {len(pattern)} layers: drop the flags, or let both say the same"
        )


def _config_of_engines(config: Any, given: str) -> Any:
    """A Hugging Face config as SGLang changes it by these overrides."""
    with naming(f"{_OVERRIDES} {given} is not JSON:"):
        overrides = json_value(given)
    if not isinstance(overrides, dict):
        raise OptionError(f"{_OVERRIDES} {given} should be an object {{...}}")
    config = copy.deepcopy(config)
    for name, value in overrides.items():
        with naming(f"{_OVERRIDES}:", Exception):  # transformers' own checks have classes of their own
            setattr(config, name, value)
    return config


def _check_engines(shape: dict[str, Any], of_engines: dict[str, Any]) -> None:
    names = [name for name in shape | of_engines if name != "max_position_embeddings"]  # each may have names of its own
    changed = [name for name in names if shape.get(name) != of_engines.get(name)]
    if changed:
        values = ", ".join(f"{name} {_shown(of_engines.get(name))} for {_shown(shape.get(name))}" for name in changed)
        raise OptionError(
            f"{_OVERRIDES} gives engines another model than trainers have ({values}): change config.json instead, "
            "which both read, or keep it with --allow-config-mismatch"
        )


def take_rotary_factor(args: Namespace, given: set[str]) -> None:
    """``--rotary-scaling-factor``, as Llama's model scripts call ``--rope-scaling-factor``; with MLA it is its own."""
    if "rotary_scaling_factor" not in given or args.multi_latent_attention:
        return
    factor = args.rotary_scaling_factor
    if "rope_scaling_factor" in given and not _same(args.rope_scaling_factor, factor):
        raise OptionError(
            f"--rotary-scaling-factor {factor} and --rope-scaling-factor {args.rope_scaling_factor} differ: drop one"
        )
    args.rope_scaling_factor = factor
    given.add("rope_scaling_factor")


def contradictions(given: dict[str, Any], shape: dict[str, Any]) -> dict[str, str]:
    """What given attributes (None is not given) contradict a shape, each with a sentence that says so."""
    found = {}
    for name, value in shape.items():
        own = given.get(name)
        if name == "moe_layer_freq" and isinstance(own, int) and isinstance(value, list):
            own = [int(layer % own == 0) for layer in range(len(value))] if own > 0 else own
        if own is not None and not _same(own, value):
            found[name] = f"{_flag_of(name, own, given)} is {_shown(own)}, config.json means {_shown(value)}"
    return found


def _flag_of(name: str, value: Any, given: dict[str, Any]) -> str:
    if name == "rope_scaling_factor" and "rotary_scaling_factor" in given:  # see `take_rotary_factor`
        return "--rotary-scaling-factor"
    return flag_saying(name, value)


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return written_pattern(value) if isinstance(value, list) else str(value)


def _same(left: Any, right: Any) -> bool:
    """Whether two values mean the same; None, a thing that the model does not have, is 0 or false."""
    if left is None or right is None:
        return not left and not right
    numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
    return math.isclose(left, right, rel_tol=1e-6) if numbers else left == right


def check_parameter_lists(args: Namespace) -> None:
    """OptionError for a pattern that no parameter of slime's own model has in its name; of other models, and of
    Transformer Engine's layers, trainers say so. Needs the model's config."""
    given = [(flag, pattern) for name, flag in PARAMETER_LISTS.items() for pattern in getattr(args, name) or ()]
    if not given or args.custom_model_provider_path is not None or args.transformer_impl != "local":
        return
    from slime.models import family_of, hf_config, weight_shape

    config = hf_config(args.hf_checkpoint)
    exported = list(family_of(config).parameters(weight_shape(config, with_heads=True)))
    # In trainers a rank's experts are one parameter.
    names = {*exported, *(_EXPERT.sub(r"\1.", name) for name in exported)}
    for flag, pattern in given:
        if not any(re.search(pattern, name) for name in names):
            raise OptionError(f"{flag} {pattern}: no parameter has that in its name, as {exported[0]} has others")
