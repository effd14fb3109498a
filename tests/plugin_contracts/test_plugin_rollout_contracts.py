"""Contracts of the functions that make a rollout, or an evaluation; as a program it checks yours.

python tests/plugin_contracts/test_plugin_rollout_contracts.py --rollout-function-path my_rollout.py:generate_rollout
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slime.data.source.rollout_context import rollout_context
from slime.rollout.base_types import RolloutFnTrainOutput, flatten_samples
from slime.rollout.batches.train_data import to_train_batches
from slime.rollout.data_source import RolloutDataSource
from slime.utils.types import Sample, Status
from tests.plugin_contracts.contract import Contract, Subject
from tests.plugin_contracts.evaluations import check_evaluation
from tests.plugin_contracts.running import cases, main, run_case, words_of
from tests.plugin_contracts.setting import make_source

NUM_GPUS = 0


def check_samples(subject: Subject) -> None:
    """A rollout has as many groups and samples as the options say, each finished and rewarded"""
    args = subject.args
    groups, _ = _rollout(subject, make_source(args))
    subject.must(
        len(groups) == args.rollout_batch_size,
        f"it returned {len(groups)} groups, and --rollout-batch-size is {args.rollout_batch_size}",
        "return one list for each prompt that was asked for",
    )
    for group in groups:
        rollouts = {sample.rollout_id for sample in flatten_samples(group)}
        subject.must(
            len(rollouts) == args.n_samples_per_prompt,
            f"a group has {len(rollouts)} rollouts (different rollout_id), and --n-samples-per-prompt is "
            f"{args.n_samples_per_prompt}",
            "a group holds all responses to one prompt; parts of one response share a rollout_id, others do not",
        )
    for sample in flatten_samples(groups):
        _check_sample(subject, sample)


def check_training(subject: Subject) -> None:
    """What it returns can be trained on"""
    groups, _ = _rollout(subject, make_source(subject.args))
    subject.args.global_batch_size = len({sample.rollout_id for sample in flatten_samples(groups)})
    to_train_batches(subject.args, flatten_samples(groups), dp_size=1)


def check_accounting(subject: Subject) -> None:
    """Every prompt that it draws is trained, dropped with a reason, or put back"""
    source = make_source(subject.args)
    for rollout_id in range(2):
        groups, _ = _rollout(subject, source, rollout_id)
        if isinstance(source, RolloutDataSource):
            source.count_trained(flatten_samples(groups))
            under_way_still = source.num_in_flight(after=rollout_id)
            known = source.num_trained + source.num_dropped.total() + source.get_buffer_length() + under_way_still
            lost = source.num_read - known
            subject.must(
                lost == 0,
                f"of {source.num_read} prompts that it drew, {lost} were neither trained, dropped nor put back",
                "give back what you do not return by data_source.add_samples(groups), or report it by "
                "data_source.count_dropped(groups, reason)",
            )


def _rollout(subject: Subject, source: Any, rollout_id: int = 0) -> tuple[list[Any], dict[str, Any]]:
    """Groups and metrics of one call, as the rollout manager reads them."""
    with rollout_context(rollout_id):
        output = subject.function(subject.args, rollout_id, source)
    if not isinstance(output, RolloutFnTrainOutput):
        subject.must(
            isinstance(output, list),
            f"it returned {type(output).__name__}",
            "return RolloutFnTrainOutput(samples=groups, metrics=...), or the list of groups alone",
        )
        output = RolloutFnTrainOutput(samples=output)
    for group in output.samples:
        subject.must(
            isinstance(group, list) and bool(group) and all(isinstance(s, Sample) for s in _leaves(group)),
            f"a group must be a non-empty list of Sample, not {group!r:.120}",
        )
    for name, value in (output.metrics or {}).items():
        subject.must(
            isinstance(name, str) and isinstance(value, (int, float)),
            f"metrics[{name!r}] is {value!r:.80}",
            "metrics are numbers by their names",
        )
    return output.samples, output.metrics or {}


def _leaves(group: Any) -> list[Any]:
    return [leaf for part in group for leaf in _leaves(part)] if isinstance(group, list) else [group]


def _check_sample(subject: Subject, sample: Sample) -> None:
    sample.check()
    subject.must(
        sample.status in (Status.COMPLETED, Status.TRUNCATED),
        f"sample {sample.index} has status {sample.status}",
        "return samples that are done: Sample.Status.COMPLETED or TRUNCATED",
    )
    subject.must(
        sample.reward is not None,
        f"sample {sample.index} has no reward",
        "set sample.reward, for instance by `await async_rm(args, sample)` of slime.rollout.rm_hub",
    )
    subject.must(
        sample.response_length > 0 and all(type(token) is int for token in sample.tokens),
        f"sample {sample.index} has response_length {sample.response_length} and {len(sample.tokens)} tokens",
        "tokens are ints, the prompt's and then the response's, and response_length counts the latter",
    )
    subject.must(isinstance(sample.response, str), f"sample {sample.index}: response is {sample.response!r:.80}")


CONTRACTS = (
    Contract(
        "--rollout-function-path",
        (
            "slime.rollout.sglang_rollout.generate_rollout",
            "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
        ),
        "draw args.rollout_batch_size groups by data_source.get_samples, and return them finished and rewarded as "
        "RolloutFnTrainOutput(samples=groups); with evaluation=True return RolloutFnEvalOutput(data=...)",
        (check_samples, check_training, check_accounting, check_evaluation),
    ),
)


def pytest_generate_tests(metafunc: Any) -> None:
    import os

    metafunc.parametrize("case", cases(CONTRACTS, words_of(os.environ)), ids=str)


def test_contract(case: Any) -> None:
    run_case(case)


if __name__ == "__main__":
    main(CONTRACTS)
