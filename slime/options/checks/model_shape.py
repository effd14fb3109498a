"""The model's shape, of its config.json, against the flags."""

from __future__ import annotations

import argparse

from slime.options.errors import OptionError
from slime.options.model import apply_shape, check_engines, config_of_engines, take_rotary_factor
from slime.options.mtp import check_heads


def take_shape(args: argparse.Namespace, given: set[str], warnings: list[str]) -> None:
    """Take the model's shape from its config.json, which says too how long a context is and what heads can be trained.

    Raises:
        OptionError: it cannot be read, or flags contradict it.
    """
    from slime.models import hf_config, shape_from_hf, trainable_heads
    from slime.models.shape import context_length

    take_rotary_factor(args, given)
    try:
        config = hf_config(args.hf_checkpoint)
        shape, args.model_context = shape_from_hf(config), context_length(config)
    except (ValueError, TypeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise OptionError(f"--hf-checkpoint {args.hf_checkpoint}: {reason}") from error
    apply_shape(args, shape, given, warnings)
    of_engines = config_of_engines(args, config)
    if of_engines is not None:
        compares = args.placement != "rollout_only" and not args.allow_config_mismatch
        try:
            args.model_context = context_length(of_engines)
            overridden = shape_from_hf(of_engines) if compares else shape
        except (ValueError, TypeError, AttributeError) as error:  # of values that no config has
            raise OptionError(f"--sglang-json-model-override-args: {error}") from error
        check_engines(shape, overridden)
    check_heads(args, shape["mtp_num_layers"] or 0, config.model_type, trainable_heads())
