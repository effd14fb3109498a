"""Rewards by users' functions, of one sample or of many: who is called how, and what each mistake is told."""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.data import Sample
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.utils.errors import BadInputError, HookError

NUM_GPUS = 0

Args = Callable[..., Namespace]
HOOKS = """
import asyncio, threading, time

CALLS = []

async def reward_func(args, sample, **kwargs):
    CALLS.append(sample.index)
    return 1.0 + sample.index

def custom_rm(args, sample): return -1

async def batched_custom_rm(args, samples, **kwargs):
    CALLS.append([sample.index for sample in samples])
    return [10.0 + sample.index for sample in samples]

def plain_list(args, samples, scale=1):
    assert threading.current_thread() is not threading.main_thread()
    return tuple({"score": scale * sample.index} for sample in samples)

async def meets(args, sample):
    CALLS.append(sample.index)
    while len(CALLS) < 3:
        await asyncio.sleep(0.001)
    return 0.0

async def wrong_names(args, s, **kwargs): return 0.0
async def both(args, sample, samples): return 0.0
async def one_number(args, samples, **kwargs): return 0.5
async def too_few(args, samples, **kwargs): return [0.5]
async def words(args, samples, **kwargs): return [1, "good", 2]
async def raising(args, samples, **kwargs): return [][7]
def hanging(args, samples, **kwargs): time.sleep(200)
def unsure(args, samples, **kwargs): return [None, 0.0, 1]
"""


@pytest.fixture
def hooks(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(HOOKS)
    return str(path)


def calls(hooks: str) -> list[Any]:
    from slime.utils.misc import load_module

    made: list[Any] = load_module(hooks).CALLS
    return made


def samples(*paths: str | None) -> list[Sample]:
    return [Sample(index=i, response="the x", label="x", custom_rm_path=path) for i, path in enumerate(paths)]


def judge(args: Namespace, group: list[Sample], **kwargs: Any) -> list[Any]:
    return asyncio.run(batched_async_rm(args, group, **kwargs))


def test_a_list_function_gets_all_in_one_call_and_a_single_one_each_at_once(rollout_args: Args, hooks: str) -> None:
    group = samples(None, None, None)
    args = rollout_args(custom_rm_path=f"{hooks}:batched_custom_rm")
    assert judge(args, group) == [10.0, 11.0, 12.0]
    assert calls(hooks) == [[0, 1, 2]]
    assert asyncio.run(async_rm(args, group[2])) == 12.0
    assert calls(hooks) == [[0, 1, 2], [2]]
    calls(hooks).clear()
    assert judge(rollout_args(custom_rm_path=f"{hooks}:meets"), group) == [0.0] * 3
    assert judge(rollout_args(custom_rm_path=f"{hooks}:plain_list"), group, scale=5)[2] == {"score": 10}
    assert judge(rollout_args(custom_rm_path=f"{hooks}:unsure"), group) == [None, 0.0, 1.0]
    assert judge(args, []) == []


def test_a_bare_file_is_searched_for_the_usual_names(rollout_args: Args, hooks: str, tmp_path: Path) -> None:
    group = samples(None, None)
    assert judge(rollout_args(custom_rm_path=hooks), group) == [1.0, 2.0]
    assert judge(rollout_args(custom_rm_path=hooks, group_rm=True), group) == [10.0, 11.0]
    single = tmp_path / "single.py"
    single.write_text("def reward_func(args, sample): return 4\ndef custom_rm(args, sample): return 5\n")
    assert judge(rollout_args(custom_rm_path=str(single), group_rm=True), group) == [4.0, 4.0]
    single = tmp_path / "other.py"
    single.write_text("def custom_rm(args, sample): return 5\n")
    assert judge(rollout_args(custom_rm_path=str(single)), group) == [5.0, 5.0]
    with pytest.raises(BadInputError, match=r"other.py: none of batched_custom_rm, reward_func is in it"):
        judge(rollout_args(custom_rm_path=str(single), group_rm=True), group)


def test_the_samples_own_path_wins_and_each_function_gets_its_samples(rollout_args: Args, hooks: str) -> None:
    listed = f"{hooks}:batched_custom_rm"
    group = samples(listed, f"{hooks}:custom_rm", None, listed, None)
    args = rollout_args(rm_type="f1")
    assert judge(args, group) == [10.0, -1.0, 1.0, 13.0, 1.0]
    assert calls(hooks) == [[0, 3]]
    args.custom_rm_path = listed
    calls(hooks).clear()
    assert judge(args, group) == [10.0, -1.0, 12.0, 13.0, 14.0]
    assert calls(hooks) == [[0, 2, 3, 4]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "wrong_names",
            r"it is called as \(args, sample, .*\) or as \(args, samples, .*must have a parameter sample or samples",
        ),
        ("both", r"it is called as .* takes \(.*sample, samples\): .*not both: the name tells how it is called"),
        ("one_number", r"must return a list of 3 rewards, one a sample \(`async \(args, samples, .*`\), not 0.5"),
        ("too_few", r"must return as many rewards as it was given samples, 3 \(`async.*`\), not 1: \[0.5\]"),
        ("words", r"must return a list whose entry 1 is a number or a dict, not 'good'"),
        ("raising", r"raised IndexError: list index out of range\n(.|\n)*return \[\]\[7\]"),
    ],
)
def test_a_mistake_names_flag_path_and_what_to_write(name: str, message: str, rollout_args: Args, hooks: str) -> None:
    with pytest.raises(HookError, match=rf"^--custom-rm-path .*mine.py:{name}:? {message}"):
        judge(rollout_args(custom_rm_path=f"{hooks}:{name}"), samples(None, None, None))
    with pytest.raises(HookError, match=rf"^Sample.custom_rm_path .*mine.py:{name}:? "):
        judge(rollout_args(), samples(*[f"{hooks}:{name}"] * 3))


def test_a_list_function_that_hangs_meets_the_deadline(rollout_args: Args, hooks: str) -> None:
    args = rollout_args(custom_rm_path=f"{hooks}:hanging", reward_timeout=0.1)

    async def late() -> float:
        started = time.monotonic()
        with pytest.raises(
            TimeoutError, match=r"samples 0, 1 by --custom-rm-path .* longer than 0.1 s \(--reward-time"
        ):
            await batched_async_rm(args, samples(None, None))
        return time.monotonic() - started

    assert asyncio.run(late()) < 100


def test_the_first_failure_ends_the_other_calls(rollout_args: Args, hooks: str) -> None:
    group = samples(f"{hooks}:raising", f"{hooks}:meets")
    with pytest.raises(HookError, match="raised IndexError"):
        judge(rollout_args(), group)
