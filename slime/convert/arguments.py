"""The flags of a conversion that builds a Megatron model: the user's MODEL_ARGS, against the model's config.json."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime.files.model_directory import NO_WEIGHTS, has_weights, model_directory
from slime.options.checks.model_shape import take_shape
from slime.options.errors import OptionError
from slime.options.flags import megatron
from slime.options.flags.help import HelpAction
from slime.options.flags.installed import PendingFlags
from slime.options.flags.parser import StrictParser
from slime.options.flags.schema import add_options, option
from slime.utils.errors import BadInputError

_ONE_RANK: dict[str, Any] = {
    **dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"), 1),
    **dict.fromkeys(("expert_model_parallel_size", "expert_tensor_parallel_size"), 1),
    **dict.fromkeys(("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"), None),
    **dict.fromkeys(("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"), None),
    **dict.fromkeys(("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"), False),
    **{"pipeline_model_parallel_layout": None, "sequence_parallel": False, "transformer_impl": "local"},
    **{"true_on_policy_mode": False, "attention_backend": "unfused"},
    **dict.fromkeys(("recompute_granularity", "recompute_method", "recompute_num_layers"), None),
}
"""A checkpoint fits every layout, either kind of layers and all attention: it is written as one rank of the plain ones
would."""


@dataclass
class ConversionOptions:
    """Conversion."""

    hf_checkpoint: str | None = option(None, "Model to convert: a directory in Hugging Face's format, or a hub id.")
    save: str | None = option(None, "Directory for the checkpoint, to name by --ref-load or --load of train.py.")
    force: bool = option(
        False, "Replace a checkpoint that an earlier conversion wrote there, if nothing else is in it."
    )
    custom_model_provider_path: str | None = option(
        None,
        "As of train.py: function (pre_process, post_process, vp_stage=None) -> GPTModel.",
        hook=("model_provider",),
    )
    enable_mtp_training: bool = option(
        False, "Convert the multi-token prediction (MTP) heads too, for a run of train.py with this flag."
    )
    allow_config_mismatch: bool = option(False, "Warn, instead of stopping, where flags contradict config.json.")


def parse_model_args(description: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """`ConversionOptions` and Megatron's flags, with the model's shape from its config.json.

    Flags of the parallel layout, ``--transformer-impl`` and ``--attention-backend`` are accepted, and set to those of
    one rank. A bad input prints one line that names the flag and exits with status 2.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = StrictParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "-h", "--help", action=HelpAction, sections={"megatron": "Megatron"}, metavar="SECTION",
        help="Show the conversion's own flags, Megatron's, all, or one (--help --FLAG).",
    )  # fmt: skip
    add_options(parser, ConversionOptions)
    own = {action.dest for action in parser._actions}
    try:
        with PendingFlags(megatron.PACKAGE, megatron.READER) as fields:
            megatron.add_megatron_flags(parser, fields, own)
        defaults = parser.split_defaults()
        given = parser.parse_set(words)
        args = argparse.Namespace(**{**defaults, **given})
        for warning in _resolve(args, set(given)):
            print(f"{parser.prog}: warning: {warning}", file=sys.stderr)
    except BadInputError as error:
        parser.error(str(error))
    return args


def _resolve(args: argparse.Namespace, given: set[str]) -> list[str]:
    for flag, value in (("--hf-checkpoint", args.hf_checkpoint), ("--save", args.save)):
        if value is None:
            raise OptionError(f"{flag} is missing")
    args.save = os.path.abspath(os.path.expanduser(args.save))
    args.hf_checkpoint = model_directory(args.hf_checkpoint, with_weights=True)
    if not has_weights(args.hf_checkpoint):
        raise OptionError(f"--hf-checkpoint {args.hf_checkpoint}: {NO_WEIGHTS}")
    args.random_weights, args.params_dtype = False, "float32"  # no weight is computed: the checkpoint keeps their types
    warnings: list[str] = []
    take_shape(args, given, warnings)
    vars(args).update(_ONE_RANK)
    return warnings
