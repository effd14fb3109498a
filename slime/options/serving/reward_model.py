"""The reward model: engines of its own, with slots and SGLang flags of their own."""

from __future__ import annotations

import os
from argparse import Namespace

from slime.files.model_directory import NO_WEIGHTS, has_weights, model_directory
from slime.options.errors import OptionError
from slime.options.rules import Rule, check

REWARD_ARGS = "--rm-sglang-args"

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
        raise OptionError(f"--rm-model-path {args.rm_model_path}: {NO_WEIGHTS}")
