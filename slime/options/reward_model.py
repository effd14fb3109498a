"""The reward model: engines of its own, with slots and SGLang flags of their own."""

from __future__ import annotations

import difflib
import os
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from slime.files.model_directory import has_weights, model_directory
from slime.options.errors import OptionError, naming
from slime.options.flags.parser import StrictParser
from slime.options.flags.sglang import PassThrough, command_line
from slime.options.rollout import RANKS
from slime.options.rules import Rule, check

_FLAG = "--rm-sglang-args"

RULES = (
    Rule("!rm_num_gpus", "is missing: the engines of --rm-model-path have slots of their own"),
    Rule("rm_num_gpus", "is not a multiple of", "rm_num_gpus_per_engine"),
    Rule(
        "rm_num_gpus_per_engine",
        "is more than",
        "num_gpus_per_node",
        ": an engine of the reward model over several nodes is not available yet",
    ),
)
"""Of a reward model that is served."""


def derive_reward_model(args: Namespace, warnings: list[str]) -> None:
    """``rm_num_gpus``: 0 where no reward model is served; OptionError: slots or flags that do not fit."""
    if args.rm_model_path is None or args.placement == "train_only":
        args.rm_num_gpus = 0
        return
    check(args, RULES)
    if args.custom_rm_path is None:
        warnings.append("--rm-model-path serves a model that only your own code asks: is --custom-rm-path missing?")


def find_reward_model(args: Namespace) -> None:
    """Make ``rm_model_path`` an absolute directory; a hub id is downloaded first. OptionError: it holds no weights."""
    if not args.rm_num_gpus:
        return
    is_there = os.path.isdir(os.path.expanduser(args.rm_model_path)) or not args.dry_run
    args.rm_model_path = model_directory(args.rm_model_path, with_weights=not args.dry_run, flag="--rm-model-path")
    as_usual = "load_format" not in (args.rm_sglang_args or {})
    if as_usual and is_there and not has_weights(args.rm_model_path):
        raise OptionError(f"--rm-model-path {args.rm_model_path}: there are no *.safetensors in it")


def reward_engine_flags(parser: StrictParser, values: Mapping[str, Any] | None) -> list[str]:
    """The words of an SGLang command line that ``--rm-sglang-args`` means, checked like ``--sglang-`` flags; or
    OptionError."""
    actions = (a for a in parser._actions if isinstance(a, PassThrough) and a.words == "sglang_words")
    known = {action.dest.removeprefix("sglang_") for action in actions}
    settings = Namespace()
    for key, value in (values or {}).items():
        name = key.lstrip("-").replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            raise OptionError(
                f"{_FLAG}: {key!r} is not a flag of the installed SGLang, or one that slime decides"
                + (f"; did you mean {' or '.join(near)}?" if near else "")
            )
        with naming(f"{_FLAG}:"):
            parser.set_entry(f"sglang_{name}", value, settings)
    try:
        check(settings, RANKS)
    except OptionError as error:
        raise OptionError(f"{_FLAG}: {str(error).replace('--sglang-', '')}") from error
    return command_line(getattr(settings, "sglang_words", {}))
