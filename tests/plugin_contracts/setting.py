"""The small rollout in which a user's function is checked: options, prompts, and groups that are done."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.data.source.users_class import make_data_source
from slime.entry.arguments import GROUPS, _add_hook_flags, _parse_yaml, _read_yaml, _yaml_named
from slime.options.checks.hook_paths import load_hooks
from slime.options.eval_datasets import eval_datasets
from slime.options.flags.parser import StrictParser
from slime.options.flags.schema import add_options
from slime.options.learning.algorithm import derive_algorithm
from slime.options.serving.agents import GENERATE
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.engine.generation import prompt_tokens
from slime.rollout.sampling import eval_sampling_params
from slime.rollout.tokenizer import load_tokenizer
from slime.utils.types import Group, Sample
from tests.plugin_contracts.engine import ANSWERS
from tests.small_rollout import small_rollout, write_tokenizer

PROMPTS = 8
_MERGES = ("th", "he", "in", "er", "an", "on", "at", "en", "es", "ou")
"""Tokens of two letters: without one, text could only be tokenised in one way."""
_TRAINER = {
    "placement": "colocate",
    "micro_batch_size": 1,
    "context_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "microbatch_group_size_per_virtual_pipeline_stage": None,
    "lr_warmup_iters": 0,
    "lr_warmup_fraction": None,
}

_IMPLIED: dict[str, dict[str, Any]] = {
    "custom_agent_function_path": {"custom_generate_function_path": GENERATE},
    "custom_loss_function_path": {"loss_type": "custom_loss"},
    "custom_tis_function_path": {"use_tis": True},
}
"""What a run with a function of this option has besides."""


@functools.cache
def directory() -> Path:
    """Where the tokenizer, the prompts and what functions write are; it goes when the process ends."""
    path = Path(tempfile.mkdtemp(prefix="slime-contracts-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    write_tokenizer(path / "tokenizer", merges=_MERGES)
    rows = [
        {"prompt": f"What is {i} + 1?", "label": str(i + 1), "metadata": {"number": i, "rm_type": "random"}}
        for i in range(PROMPTS)
    ]
    (path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def contract_parser(prog: str) -> StrictParser:
    """A parser of slime's own flags, and of the two that only contracts have."""
    parser = StrictParser(prog=prog)
    for group in GROUPS:
        add_options(parser, group)
    parser.add_argument("--contract-answers", nargs="+", default=list(ANSWERS), metavar="TEXT")
    parser.add_argument("--contract-timeout", type=float, default=60.0, metavar="SECONDS")
    return parser


def contract_args(words: Sequence[str], prog: str) -> Namespace:
    """Options of a small rollout, with what the user gives over them.

    Raises:
        OptionError: a function does not load, or cannot be called as slime would.
        SystemExit: an unknown flag, or a value that does not parse.
    """
    parser = contract_parser(prog)
    yaml_values = _read_yaml(words)
    _add_hook_flags(parser, words, yaml_values)
    defaults = parser.split_defaults()
    given = parser.parse_set(words) | _parse_yaml(parser, yaml_values, _yaml_named(words))
    parser.check_required(given)
    small = vars(small_rollout(directory() / "tokenizer"))
    small |= {
        **_TRAINER,
        "prompt_data": str(directory() / "prompts.jsonl"),
        "rollout_batch_size": 2,
        "rollout_max_response_len": 512,
        "num_rollout": 2,
        "on_sample_error": "stop",
        "run_dir": str(directory() / "run"),
        "save": str(directory() / "run"),
    }
    if "prompt_data" in given:
        small |= {name: defaults[name] for name in ("input_key", "label_key")}
    args = Namespace(**defaults | small | given)
    load_hooks(args, set(given), GROUPS)
    if args.global_batch_size is None:
        args.global_batch_size = args.rollout_batch_size * args.n_samples_per_prompt
    for name, implied in _IMPLIED.items():
        if name in given:
            vars(args).update(implied)
    args.eval_reward_key = args.eval_reward_key or args.reward_key
    args.eval_prompt_data = args.eval_prompt_data or [["contract", args.prompt_data]]
    args.eval_datasets = eval_datasets(args)
    args.vocab_size = len(load_tokenizer(args.hf_checkpoint))
    derive_algorithm(args)
    return args


def make_source(args: Namespace) -> Any:
    """The data source of the options."""
    return make_data_source(args)


def eval_params(args: Namespace) -> dict[str, Any]:
    """The sampling parameters of an evaluation."""
    return eval_sampling_params(args.eval_datasets[0])


def finished_groups(args: Namespace, rewards: Sequence[Sequence[Any]]) -> list[Group]:
    """One group for each list of rewards, of a sample for each of them, as they are when they were generated."""
    source = RolloutDataSourceWithBuffer(Namespace(**vars(args) | {"n_samples_per_prompt": max(map(len, rewards))}))
    groups = source.get_samples(len(rewards))
    for group, of_group in zip(groups, rewards, strict=True):
        for sample, reward in zip(group, of_group, strict=False):
            finish(args, sample, reward)
    return [group[: len(of_group)] for group, of_group in zip(groups, rewards, strict=True)]


def finish(args: Namespace, sample: Sample, reward: Any = None, response: str = ANSWERS[0]) -> Sample:
    """Give a sample a response and a reward."""
    tokens = sample.tokens = sample.tokens or prompt_tokens(args, sample)
    answer = [1 + len(tokens) % 7] * max(1, len(response) // 4)
    meta = {"weight_version": "1", "finish_reason": {"type": "stop"}}
    sample.append_response_tokens(args, tokens=answer, log_probs=[-0.5] * len(answer), meta_info=meta, text=response)
    sample.reward = reward
    return sample
