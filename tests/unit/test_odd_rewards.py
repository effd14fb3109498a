"""Rewards that are odd: dicts in place of numbers, absurd ones, those that come with a response; judges that block."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.data import Sample, Status
from slime.rollout.base_types import flatten_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.groups.group import generate_and_rm
from slime.utils.errors import HookError
from tests.fake_client import FakeClient, accounts, hook_file, indices, rollout

NUM_GPUS = 0

Args = Callable[..., Namespace]
Use = Callable[..., FakeClient]


ODD_ONE = "def own(args, sample):\n    return {'score': 1.0} if sample.group_index == 1 else 1.0\n"


@pytest.mark.parametrize("policy", ["drop", "retry"])
def test_one_dict_among_numbers_is_a_sample_that_failed(policy: str, make_args: Args, use: Use, tmp_path: Path) -> None:
    use(FakeClient())
    hook = hook_file(tmp_path, ODD_ONE)
    args = make_args(custom_rm_path=f"{hook}:own", on_sample_error=policy)
    source = RolloutDataSourceWithBuffer(args)
    if policy == "retry":  # by then it is known that it gives numbers
        judged = Sample(index=0, prompt="x", tokens=[1, 2], response_length=1, status=Status.COMPLETED)
        assert asyncio.run(generate_and_rm(args, judged, {})).reward == 1.0
    samples = flatten_samples(rollout(args, 0, source).samples)
    assert [sample.group_index for sample in samples[::2]] == [0, 2, 3, 4]
    assert accounts(args, source, samples)["rollout/prompts_dropped"] == 1


@pytest.mark.parametrize("of_group", [False, True])
@pytest.mark.parametrize("value", ["{'score': 1.0}", "1e308", "{'other': 1}", "'text'", "{'score': 10**400}"])
def test_a_function_that_gives_dicts_alone_fails_with_what_to_do_when_samples_are_to_be_dropped(
    value: str, of_group: bool, make_args: Args, use: Use, tmp_path: Path
) -> None:
    use(FakeClient())
    code = (
        "def own(args, samples):\n    return [{0} for _ in samples]\n"
        if of_group
        else ("def own(args, sample):\n    return {0}\n")
    )
    hook = hook_file(tmp_path, code.replace("{0}", value))
    key = None if value == "{'score': 1.0}" else "score"
    args = make_args(custom_rm_path=f"{hook}:own", on_sample_error="drop", reward_key=key, group_rm=of_group)
    with pytest.raises(HookError, match="all 5 groups failed, more than a rollout has"):
        rollout(args)


@pytest.mark.parametrize("value", ["float('nan')", "1e308", "'text'", "{'score': 1.0}"])
@pytest.mark.parametrize("by", ["generate", "hook"])
def test_a_reward_that_comes_with_the_response_is_judged_as_any_other(
    by: str, value: str, make_args: Args, use: Use, tmp_path: Path
) -> None:
    use(FakeClient())
    spoil = (
        f"    if sample.group_index == 1: sample.reward = {value}\n    else: sample.reward = 1.0\n    return sample\n"
    )
    hook = hook_file(
        tmp_path,
        "from slime.rollout.sglang_rollout import generate as ask\n"
        f"async def generate(args, sample, params):\n    sample = await ask(args, sample, params)\n{spoil}"
        f"def hook(args, sample):\n{spoil}",
    )
    functions: dict[str, Any] = {
        "generate": {"custom_generate_function_path": f"{hook}:generate"},
        "hook": {"rollout_sample_hook_path": [f"{hook}:hook"]},
    }
    args = make_args(on_sample_error="drop", **functions[by])
    assert indices(rollout(args).samples) == [0, 2, 3, 4]


@pytest.mark.parametrize("by", ["custom_rm_path", "custom_generate_function_path"])
def test_a_function_that_keeps_the_event_loop_to_itself_is_named_once(
    by: str,
    make_args: Args,
    use: Use,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("slime.rollout.user.hooks._BLOCKED_S", 0.05)
    use(FakeClient())
    hook = hook_file(
        tmp_path,
        "import asyncio, time\n"
        "from slime.rollout.sglang_rollout import generate as ask\n"
        "async def blocks(sample):\n"
        "    await asyncio.sleep(0)\n"
        "    if sample.index < 2: time.sleep(0.1)\n"
        "async def rm(args, sample):\n    await blocks(sample)\n    return 1.0\n"
        "async def generate(args, sample, params):\n"
        "    await blocks(sample)\n"
        "    return await ask(args, sample, params)\n",
    )
    path = f"{hook}:{'rm' if by == 'custom_rm_path' else 'generate'}"
    assert len(rollout(make_args(**{by: path})).samples) == 4
    told = [record.getMessage() for record in caplog.records if "kept the event loop" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(f"--{by.replace('_', '-')} {path} kept the event loop to itself for 0 s: all other")
