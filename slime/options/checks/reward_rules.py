"""Which reward judges responses, and what it needs: flags, and in which rows."""

from __future__ import annotations

import os
from argparse import Namespace
from urllib.parse import urlsplit

from slime.options.errors import OptionError
from slime.options.eval_datasets import EvalDataset
from slime.options.flags.schema import flag_named
from slime.options.rollout import generates_itself

DAPO_REWARDS = ("score", "acc")
"""Numbers in the dict that ``--rm-type dapo`` answers with."""
NEEDS_LABEL = ("math", "dapo", "deepscaler", "f1")
"""Built-in rewards that compare a response with the row's label."""
_SLIMES_SOURCES = ("slime.rollout.data_source.", "slime.data.")
_FIRST_ROW = 1 << 20
"""Bytes of a file that are looked at before it is loaded."""


def rows_may_name_rewards(path: str | None, metadata_key: str | None) -> bool:
    """Whether every row of a file may have ``rm_type`` in its metadata, as far as the first one tells.

    Loading looks at all of them. Of parquet and of slices nothing is known before; of no file something else is said.
    """
    if path is None or not metadata_key:
        return False
    file = os.path.expanduser(path)
    if not os.path.isfile(file) or file.endswith(".parquet"):
        return True
    try:
        with open(file, "rb") as lines:
            rows = filter(bytes.strip, iter(lambda: lines.readline(_FIRST_ROW), b""))
            return b"rm_type" in next(rows, b"")
    except OSError:
        return True


def comes_before_reward(args: Namespace) -> bool:
    """Whether code of a user's own comes before the reward of training samples, and may set it, its name or labels."""
    own_code = args.custom_generate_function_path or args.rollout_sample_hook_path
    return bool(own_code) or has_own_source(args) or not generates_itself(args.rollout_function_path)


def has_own_source(args: Namespace) -> bool:
    """Whether prompts come from a class of a user's own."""
    return not args.data_source_path.replace(":", ".").startswith(_SLIMES_SOURCES)


def check_rewards(args: Namespace) -> None:
    """A reward for whoever needs one, which entry of a dict reward counts, and answers to compare with."""
    own_reward = args.custom_rm_path is not None
    if generates_itself(args.rollout_function_path) and args.placement != "train_only" and not own_reward:
        _need(args.rm_type, f"--rm-type {args.rm_type}", unmet_rewards(args, labelled=comes_before_reward(args)))
    _need(args.rm_type, f"--rm-type {args.rm_type}", _unmet_url(args))
    if args.eval_interval is None or not generates_itself(args.eval_function_path):
        return
    for dataset in args.eval_datasets:
        if dataset.custom_rm_path is not None or (own_reward and dataset.rm_type is None):
            continue
        where, rm_type = reward_of_dataset(args, dataset)
        own_code = dataset.custom_generate_function_path or args.custom_generate_function_path
        # Own code may set the reward or the label, and rows the reward: a sample without one is an error of its own.
        own_code = own_code or args.rollout_sample_hook_path
        if rm_type is not None:
            unmet = unmet_rewards(args, dataset, labelled=bool(own_code))
            _need(rm_type, f"{where} {rm_type}", unmet)
        elif not own_code and not rows_may_name_rewards(dataset.path, dataset.metadata_key):
            raise OptionError(f"--eval-interval needs --rm-type or --custom-rm-path: {dataset} has no reward")


def _need(rm_type: str | None, where: str, unmet: tuple[tuple[str, str], ...]) -> None:
    if problem := dict(unmet).get((rm_type or "").removeprefix("boxed_")):
        raise OptionError(f"{where} {problem}")


def reward_of_dataset(args: Namespace, dataset: EvalDataset) -> tuple[str, str | None]:
    """Where the built-in reward of a dataset's rows is named, unless in these, and its name; OptionError: it is no
    text."""
    override = (dataset.metadata_overrides or {}).get("rm_type")
    if dataset.rm_type is not None:
        return f"{dataset}: rm_type", dataset.rm_type
    if not override:
        return "--rm-type", args.rm_type
    where = f"{dataset}: metadata_overrides: rm_type"
    if not isinstance(override, str):
        raise OptionError(f"{where} must be text, not {override!r:.60}")
    return where, override


def unmet_rewards(
    args: Namespace, dataset: EvalDataset | None = None, *, labelled: bool = False
) -> tuple[tuple[str, str], ...]:
    """Built-in rewards that no row may name, each with what it lacks, to follow its name.

    Args:
        dataset: whose rows; default those of the training prompts.
        labelled: whether a user's own code may set labels.
    """
    if args.debug_train_only:  # nothing is judged
        return ()
    of = "" if dataset is None else "eval_"
    own_code = args.custom_reward_post_process_path or args.custom_convert_samples_to_train_data_path
    unmet: dict[str, str] = {}
    key = getattr(args, f"{of}reward_key")
    if key not in DAPO_REWARDS and (of or not own_code):
        given = "" if key is None else f", not {key}"
        flag, keys = flag_named(f"{of}reward_key"), " or ".join(DAPO_REWARDS)
        unmet["dapo"] = f"answers with an object: {flag} must be {keys}{given}"
    if (dataset or args).label_key is None and not labelled:
        problem = f"compares responses with the expected answers: {flag_named(f'{of}label_key')} is missing"
        unmet |= dict.fromkeys(NEEDS_LABEL, problem)
    return (*unmet.items(), *_unmet_url(args))


def _unmet_url(args: Namespace) -> tuple[tuple[str, str], ...]:
    """Why nothing could be asked at ``--rm-url``; it is not shown, as a password may be in it."""
    if not args.rm_url:
        return (("remote_rm", "needs --rm-url"),)
    try:
        parts = urlsplit(args.rm_url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of a port that is none, or half an IPv6 address
        good = False
    return () if good else (("remote_rm", "needs an address in --rm-url, such as http://judge.example:8000/score"),)
