"""Which reward judges responses, and what it needs: flags, and in which rows."""

from __future__ import annotations

import os
from argparse import Namespace
from urllib.parse import urlsplit

from slime.options.errors import OptionError
from slime.options.eval_datasets import EvalDataset
from slime.options.rollout import generates_itself
from slime.options.schema import flag_named

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
    """Whether code of a user's own comes before the reward of training samples, and may set it, its name or labels.

    A sample that then has no reward is an error of its own.
    """
    own_code = args.custom_generate_function_path or args.rollout_sample_hook_path
    return bool(own_code) or has_own_source(args) or not generates_itself(args.rollout_function_path)


def has_own_source(args: Namespace) -> bool:
    """Whether prompts come from a class of a user's own."""
    return not args.data_source_path.replace(":", ".").startswith(_SLIMES_SOURCES)


def check_rewards(args: Namespace) -> None:
    """A reward for whoever needs one, which entry of a dict reward counts, and answers to compare with."""
    generates = generates_itself(args.rollout_function_path) and args.placement != "train_only"
    if generates and args.custom_rm_path is None:
        if args.custom_reward_post_process_path is None and args.custom_convert_samples_to_train_data_path is None:
            _reward_key(args, "reward_key", args.rm_type, f"--rm-type {args.rm_type}")
        if args.label_key is None and not comes_before_reward(args):
            _need_no_label(args.rm_type, f"--label-key is missing: --rm-type {args.rm_type}")
    _url_of_reward(args, args.rm_type, "--rm-type")
    if args.eval_interval is not None and generates_itself(args.eval_function_path):
        for dataset in args.eval_datasets:
            _reward_of_dataset(args, dataset)


def _reward_of_dataset(args: Namespace, dataset: EvalDataset) -> None:
    """As `check_rewards`; a dataset's own reward comes first."""
    if dataset.custom_rm_path is not None or (args.custom_rm_path is not None and dataset.rm_type is None):
        return
    where, rm_type = reward_of_dataset(args, dataset)
    own_code = dataset.custom_generate_function_path or args.custom_generate_function_path
    if rm_type is None:
        if own_code or args.rollout_sample_hook_path or rows_may_name_rewards(dataset.path, dataset.metadata_key):
            return  # own code may set the reward: a sample without one is an error of its own
        raise OptionError(f"--eval-interval needs --rm-type or --custom-rm-path: {dataset} has no reward")
    _url_of_reward(args, rm_type, where)
    _reward_key(args, "eval_reward_key", rm_type, f"{where} {rm_type}")
    if dataset.label_key is None and own_code is None and not args.rollout_sample_hook_path:
        _need_no_label(rm_type, f"--eval-label-key is missing: {where} {rm_type}")


def reward_of_dataset(args: Namespace, dataset: EvalDataset) -> tuple[str, str | None]:
    """Where the built-in reward of a dataset's rows is named, unless in these, and its name.

    Raises:
        OptionError: a name that is no text.
    """
    override = (dataset.metadata_overrides or {}).get("rm_type")
    if dataset.rm_type is not None:
        return f"{dataset}: rm_type", dataset.rm_type
    if not override:
        return "--rm-type", args.rm_type
    where = f"{dataset}: metadata_overrides: rm_type"
    if not isinstance(override, str):
        raise OptionError(f"{where} must be text, not {override!r:.60}")
    return where, override


def _reward_key(args: Namespace, name: str, rm_type: str | None, where: str) -> None:
    key, keys = getattr(args, name), " or ".join(DAPO_REWARDS)
    if rm_type in ("dapo", "boxed_dapo") and key not in DAPO_REWARDS:
        given = "is missing" if key is None else f"{key} is no number in its reward"
        raise OptionError(f"{where}: {flag_named(name)} {given}, use {keys}")


def _need_no_label(rm_type: str | None, problem: str) -> None:
    """Graders that compare need a column of expected answers; a user's own code may set labels itself."""
    if (rm_type or "").removeprefix("boxed_") in NEEDS_LABEL:
        raise OptionError(f"{problem} compares responses with the expected answers")


def unmet_rewards(args: Namespace, dataset: EvalDataset | None = None) -> tuple[tuple[str, str], ...]:
    """Built-in rewards that no row may name, each with what it lacks, to follow its name.

    Args:
        dataset: whose rows; default those of the training prompts.
    """
    if args.debug_train_only:  # nothing is judged
        return ()
    of = "" if dataset is None else "eval_"
    own_code = args.custom_reward_post_process_path or args.custom_convert_samples_to_train_data_path
    unmet: dict[str, str] = {}
    if getattr(args, f"{of}reward_key") not in DAPO_REWARDS and (of or not own_code):
        flag = flag_named(f"{of}reward_key")
        unmet["dapo"] = f"answers with an object: {flag} must be {' or '.join(DAPO_REWARDS)}"
    if (dataset or args).label_key is None:
        problem = f"compares responses with the expected answers: {flag_named(f'{of}label_key')} is missing"
        unmet |= dict.fromkeys(NEEDS_LABEL, problem)
    if problem := _url_problem(args.rm_url):
        unmet["remote_rm"] = problem
    return tuple(unmet.items())


def _url_of_reward(args: Namespace, rm_type: str | None, where: str) -> None:
    if (rm_type or "").removeprefix("boxed_") == "remote_rm" and (problem := _url_problem(args.rm_url)):
        raise OptionError(f"{where} {rm_type} {problem}")


def _url_problem(url: str | None) -> str:
    """Why nothing could be asked at ``--rm-url``; it is not shown, as a password may be in it."""
    if not url:
        return "needs --rm-url"
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of a port that is none, or half an IPv6 address
        good = False
    return "" if good else "needs an address in --rm-url, such as http://judge.example:8000/score"
