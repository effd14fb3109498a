"""Contracts of what slime calls around generation: data, rewards, filters, evaluation; as a program it checks yours.

python tests/plugin_contracts/test_plugin_path_loading_contracts.py --custom-rm-path my_env.py:reward_func
"""

from __future__ import annotations

import asyncio
import copy
import math
import os
import sys
from argparse import Namespace
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slime.data.source.prompts import draw_groups, put_back
from slime.data.source.rollout_context import rollout_context
from slime.data.source.users_class import restore_source, source_state
from slime.rollout.base_types import flatten_samples
from slime.rollout.batches.train_data import to_train_batches
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.rollout.engine.state import RolloutState
from slime.rollout.groups.collect import finish_batch
from slime.rollout.groups.pool import Pool
from slime.rollout.runtime import current
from slime.rollout.sampling import train_sampling_params
from slime.rollout.sglang_rollout import generate_and_rm
from slime.utils.errors import SlimeError
from slime.utils.types import Group, Sample
from tests.plugin_contracts.contract import Contract, NotMeantError, Subject
from tests.plugin_contracts.evaluations import check_evaluation
from tests.plugin_contracts.running import cases, main, run_case, words_of
from tests.plugin_contracts.setting import finish, finished_groups, make_source

NUM_GPUS = 0

T = TypeVar("T")


def _run(subject: Subject, coroutine: Awaitable[T]) -> T:
    async def within() -> T:
        async with asyncio.timeout(subject.args.rollout_timeout):
            return await coroutine

    with rollout_context(3):
        return asyncio.run(within())


def _texts(groups: list[Group]) -> list[Any]:
    return [sample.prompt for group in groups for sample in group]


# ---- --data-source-path


def check_draws(subject: Subject) -> None:
    """get_samples gives as many groups as asked for, of samples that share nothing"""
    args, source = subject.args, make_source(subject.args)
    drawn = draw_groups(args, source, 2) + draw_groups(args, source, 3)
    for group in drawn:
        subject.must(
            len(group) == args.n_samples_per_prompt,
            f"a group has {len(group)} samples, and --n-samples-per-prompt is {args.n_samples_per_prompt}",
            "return one list of args.n_samples_per_prompt samples for each prompt; or samples without group_index, "
            "one a prompt, which slime copies",
        )
    samples = [sample for group in drawn for sample in group]
    for name, what in (("metadata", "metadata"), ("tokens", "tokens")):
        different = {id(getattr(sample, name)) for sample in samples}
        subject.must(
            len({id(sample) for sample in samples}) == len(different) == len(samples),
            f"samples share {what}: what is written into one shows up in another",
            "give every sample its own copy (copy.deepcopy)",
        )
    numbers = [sample.group_index for group in drawn for sample in group[:1]]
    subject.must(
        len(set(numbers)) == len(numbers),
        f"groups have the same group_index: {numbers}",
        "number groups without repetition over the whole run, or leave group_index None",
    )
    subject.must(
        all(isinstance(sample.prompt, (str, list)) and (sample.prompt or sample.tokens) for sample in samples)
        or args.disable_rollout_global_dataset,
        "a sample has neither a prompt nor tokens",
        "set Sample.prompt to text or chat messages",
    )


def check_takes_back(subject: Subject) -> None:
    """add_samples takes groups that were not trained"""
    source = make_source(subject.args)
    drawn = draw_groups(subject.args, source, 2)
    finish(subject.args, drawn[0][0], reward=None)
    put_back(source, drawn)
    again = draw_groups(subject.args, source, 3)
    came_back = {id(sample) for group in again for sample in group} >= {id(s) for group in drawn for s in group}
    if not came_back and _texts(again[:2]) != _texts(drawn):
        subject.notes.append("groups that were put back are not handed out again: what a rollout leaves over is lost")


def check_resumes(subject: Subject) -> None:
    """A resumed run goes on where the checkpoint was written"""
    args, source = subject.args, make_source(subject.args)
    drawn = draw_groups(args, source, 3)
    if isinstance(source, RolloutDataSource):
        source.count_trained(flatten_samples(drawn))
    state = copy.deepcopy(source_state(source, 3))
    keeps = isinstance(source, RolloutDataSource) or (hasattr(source, "save") and hasattr(source, "load"))
    resumed = make_source(args)
    restore_source(resumed, 3, state)
    then, now = (_texts(draw_groups(args, each, 2)) for each in (source, resumed))
    if then != now and not keeps:
        raise NotMeantError("it has neither state_dict nor save and load: a resumed run starts at its first prompt")
    subject.must(
        then == now,
        f"it would have gone on with {then[0]!r:.60}, and goes on with {now[0]!r:.60}",
        "write in save(rollout_id) what decides which prompt is next, and read it in load(rollout_id)",
    )


def check_length(subject: Subject) -> None:
    """len() is the number of prompts of an epoch"""
    source = make_source(subject.args)
    if not hasattr(source, "__len__"):
        raise NotMeantError("it has no __len__: give --num-rollout, not --num-epoch")
    subject.must(len(source) > 0, f"len() of it is {len(source)}", "return how many prompts there are")


# ---- --buffer-filter-path


def check_buffer(subject: Subject) -> None:
    """It takes what it returns out of the buffer, and no more than asked for"""
    args = subject.args
    for waiting, wanted in ((4, 2), (1, 3), (3, 3)):
        source = RolloutDataSourceWithBuffer(args)
        groups = source.get_samples(waiting)
        for group in groups:
            finish(args, group[0])
        source.add_samples(groups)
        with rollout_context(3):
            drawn = source.get_samples(wanted)
        for chosen in subject.returned[-1:]:
            subject.must(isinstance(chosen, list), f"it returned {type(chosen).__name__}", "return a list of groups")
        subject.must(len(drawn) == wanted, f"asked for {wanted} groups with {waiting} waiting, {len(drawn)} came")
        if thrown := source.num_dropped["buffer_filter"]:
            subject.notes.append(
                f"of {waiting} groups in the buffer it threw {thrown} away, which are then not trained"
            )


# ---- --dynamic-sampling-filter-path


def check_verdicts(subject: Subject) -> None:
    """It judges groups of equal, of different and of few rewards"""
    rewards: list[list[Any]] = [[0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.5]]
    if subject.args.reward_key is not None:
        rewards = [[{subject.args.reward_key: reward} for reward in group] for group in rewards]
    groups = finished_groups(subject.args, rewards)
    source = RolloutDataSourceWithBuffer(subject.args)

    async def judge() -> Pool:
        pool = Pool(subject.args, source, _state(subject.args), 3)
        pool.begin(groups)
        while pool.num_under_way:
            await pool.advance(wanted=0)
        return pool

    pool = _run(subject, judge())
    verdicts = f"kept {len(pool.kept)} of {len(groups)} groups; dropped: {dict(pool.filtered) or 'none'}"
    subject.notes.append(f"of rewards {rewards} it {verdicts}")


# ---- --rollout-sample-filter-path, --rollout-all-samples-process-path


def _state(args: Namespace) -> RolloutState:
    runtime = current()
    assert runtime is not None
    return RolloutState(args, runtime, rank=0)


async def _finish(args: Namespace, groups: list[Any], all_done: list[Any]) -> None:
    await finish_batch(args, make_source(args), _state(args), groups, all_done)


def check_marks(subject: Subject) -> None:
    """It marks samples and changes nothing else"""
    args = subject.args
    groups = finished_groups(args, [[0.0, 1.0]] * args.rollout_batch_size)
    before = [list(map(id, group)) for group in groups]
    _run(subject, _finish(args, groups, []))
    subject.must(
        [list(map(id, group)) for group in groups] == before,
        "it changed which samples the groups hold",
        "set sample.remove_sample = True: the sample is masked out of the loss, and the counts stay",
    )
    samples = flatten_samples(groups)
    wrong = [s.remove_sample for s in samples if not isinstance(s.remove_sample, bool)]
    subject.must(not wrong, f"remove_sample is {wrong[:1]}", "set it to True or False")
    removed = sum(sample.remove_sample for sample in samples)
    subject.notes.append(f"it removed {removed} of {len(samples)} samples with rewards 0 and 1")
    args.global_batch_size = len(samples)
    to_train_batches(args, samples, dp_size=1)


def check_sees_all(subject: Subject) -> None:
    """It takes every finished group, filtered ones too, and the data source"""
    args = subject.args
    groups = finished_groups(args, [[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    _run(subject, _finish(args, groups[:2], groups))


# ---- --rollout-sample-hook-path


def check_hook(subject: Subject) -> None:
    """It is shown every sample between generation and reward, in training and in evaluation"""
    args = subject.args
    for evaluation in (False, True):
        (group,) = make_source(args).get_samples(1)
        done = _run(subject, generate_and_rm(args, group, train_sampling_params(args), evaluation=evaluation))
        for sample in flatten_samples(done):
            sample.check()
            subject.must(sample.reward is not None, f"sample {sample.index} has no reward after it")


# ---- --custom-rm-path

_RESPONSES = ("The answer is \\boxed{1}.", "", "}}{{ \\boxed{ <answer> \u4e00", "1", "x" * 5000)


def check_rewards(subject: Subject) -> None:
    """Every sample gets a reward, an empty or strange response too"""
    args = subject.args
    first = _as_generated(subject)
    group = [copy.deepcopy(first) for _ in _RESPONSES]
    for sample, response in zip(group, _RESPONSES, strict=True):
        finish(args, sample, response=response)
    try:
        done = _run(subject, generate_and_rm(args, group, train_sampling_params(args)))
    except SlimeError:
        if args.custom_generate_function_path is None:
            subject.notes.append(
                "the samples had prompt, label and response only: if it reads what your generate function writes, such "
                "as metadata, give --custom-generate-function-path too, which is then called first"
            )
        raise
    for sample in flatten_samples(done):
        _check_reward(subject, sample)


def _as_generated(subject: Subject) -> Sample:
    """A sample without a response, but with whatever else a generate function that is given too leaves in it."""
    args = subject.args
    (group,) = make_source(args).get_samples(1)
    if args.custom_generate_function_path is None:
        return group[0]
    first = flatten_samples(_run(subject, generate_and_rm(args, group[:1], train_sampling_params(args))))[0]
    _check_reward(subject, first)
    first.reset_response()
    return first


def check_group(subject: Subject) -> None:
    """With --group-rm it judges the samples of a group together"""
    args = subject.args
    args.group_rm = True
    (group,) = make_source(args).get_samples(1)
    done = _run(subject, generate_and_rm(args, group, train_sampling_params(args)))
    for sample in flatten_samples(done):
        _check_reward(subject, sample)


def _check_reward(subject: Subject, sample: Sample) -> None:
    key = subject.args.reward_key
    value = sample.get_reward_value(Namespace(reward_key=key))
    subject.must(
        math.isfinite(value),
        f"the reward of {sample.response!r:.60} is {value}",
        "return a finite number; 0.0, say, for what cannot be judged",
    )


CONTRACTS = (
    Contract(
        "--data-source-path",
        ("slime.rollout.data_source.RolloutDataSource", "slime.rollout.data_source.RolloutDataSourceWithBuffer"),
        "a class (args) with get_samples(n) -> n groups, add_samples(groups), save(rollout_id), load(rollout_id) and "
        "__len__(); subclasses of slime.data.RolloutDataSourceWithBuffer have them all",
        (check_draws, check_takes_back, check_resumes, check_length),
    ),
    Contract(
        "--buffer-filter-path",
        tuple(f"slime.rollout.filter_hub.buffer_filters.{name}" for name in ("pop_first", "pop_longest", "pop_fresh")),
        "return up to num_samples groups of `buffer`, and remove these from it (del buffer[...], buffer.pop)",
        (check_buffer,),
    ),
    Contract(
        "--dynamic-sampling-filter-path",
        tuple(
            f"slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std{suffix}"
            for suffix in ("", "_with_fallback")
        ),
        "return DynamicFilterOutput(keep=..., reason=...) of slime.rollout.filter_hub.base_types, or a bool, for "
        "groups of any size",
        (check_verdicts,),
    ),
    Contract(
        "--rollout-sample-filter-path",
        ("tests.plugin_contracts.plugins.remove_truncated",),
        "set sample.remove_sample = True for samples that are not to be trained on",
        (check_marks,),
    ),
    Contract(
        "--rollout-all-samples-process-path",
        ("tests.plugin_contracts.plugins.count_all",),
        "look at the groups, lists of Sample, and at the data source; what you return is not used",
        (check_sees_all,),
    ),
    Contract(
        "--rollout-sample-hook-path",
        ("tests.plugin_contracts.plugins.note_length",),
        "return the sample that takes the place of the given one, or None to keep it",
        (check_hook,),
    ),
    Contract(
        "--custom-rm-path",
        ("tests.plugin_contracts.plugins.reward_func", "tests.plugin_contracts.plugins.batched_custom_rm"),
        "return a number (or a dict, with --reward-key) for `sample`; for `samples` a list of as many, in their order",
        (check_rewards, check_group),
    ),
    Contract(
        "--eval-function-path",
        ("slime.rollout.sglang_rollout.generate_rollout",),
        "return RolloutFnEvalOutput(data={name: {'rewards': [...], 'truncated': [...], 'samples': [...]}})",
        (check_evaluation,),
    ),
)


def pytest_generate_tests(metafunc: Any) -> None:
    metafunc.parametrize("case", cases(CONTRACTS, words_of(os.environ)), ids=str)


def test_contract(case: Any) -> None:
    run_case(case)


if __name__ == "__main__":
    main(CONTRACTS)
