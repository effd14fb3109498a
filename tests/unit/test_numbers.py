"""Functions of the user's that change the numbers by which slime keeps account: these are put back, and it is told."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.data import Sample, Status
from slime.rollout.base_types import flatten_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.user.hooks import logs_rollout
from tests.fake_client import Engine, FakeClient, accounts, hook_file, rollout

NUM_GPUS = 0

Args = Callable[..., Namespace]
Use = Callable[..., FakeClient]

SPOIL = "    sample.{name} = {value}\n"
GENERATE = "async def generate(args, sample, params):\n{spoil}" + (
    "    sample.append_response_tokens(tokens=[1], log_probs=[-1.0], text='x')\n    return sample\n"
)
REWARD = "def rm(args, sample):\n{spoil}    return 1.0\n"
GROUP_REWARD = "def rm(args, samples):\n    for sample in samples:\n    {spoil}    return [1.0 for _ in samples]\n"
HOOK = "def hook(args, sample):\n{spoil}"
NEW = "import copy\ndef hook(args, sample):\n    sample = copy.copy(sample)\n{spoil}    return sample\n"
FILTER = "def keep(args, samples):\n    for sample in samples:\n    {spoil}    return True\n"
BATCH = "def batch(args, groups):\n    for sample in sum(groups, []):\n    {spoil}"
ALL = "def process(args, groups, source):\n    for sample in sum(groups, []):\n    {spoil}"
FUNCTIONS = {
    "custom_generate_function_path": (GENERATE, "generate"),
    "custom_rm_path": (REWARD, "rm"),
    "custom_rm_path with group_rm": (GROUP_REWARD, "rm"),
    "rollout_sample_hook_path": (HOOK, "hook"),
    "rollout_sample_hook_path with a new sample": (NEW, "hook"),
    "dynamic_sampling_filter_path": (FILTER, "keep"),
    "rollout_sample_filter_path": (BATCH, "batch"),
    "rollout_all_samples_process_path": (ALL, "process"),
}


def numbers_by_group(samples: list[Sample]) -> list[tuple[Any, ...]]:
    return [(sample.group_index, sample.index, sample.rollout_id) for sample in samples]


@pytest.mark.parametrize("name", ["group_index", "index", "rollout_id"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_numbers_that_a_function_sets_are_put_back_and_named_once(
    function: str, name: str, make_args: Args, use: Use, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    use(FakeClient())
    code, called = FUNCTIONS[function]
    hook = hook_file(tmp_path, code.format(spoil=SPOIL.format(name=name, value="7")))
    option, _, more = function.partition(" with ")
    path: Any = f"{hook}:{called}"
    changes = {option: [path] if "sample_hook" in option else path}
    if more == "group_rm":
        changes["group_rm"] = True
    args = make_args(**changes)
    source = RolloutDataSourceWithBuffer(args)
    samples = flatten_samples(rollout(args, 0, source).samples)
    assert numbers_by_group(samples) == [(i // 2, i, i) for i in range(8)]
    figures = accounts(args, source, samples)
    assert (figures["rollout/prompts_trained"], figures["rollout/prompts_in_flight"]) == (4, 0)
    assert not source.state_dict()["in_flight"], "nothing leaks into a checkpoint"
    told = [record.getMessage() for record in caplog.records if f"set {name} of sample" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(f"--{option.replace('_', '-')} {hook}:{called} set {name} of sample ")


@pytest.mark.parametrize("value", ["None", "'seven'", "__import__('numpy').arange(3)", "[1]"])
def test_whatever_they_are_set_to(
    value: str, make_args: Args, use: Use, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    use(FakeClient())
    spoil = "".join(SPOIL.format(name=name, value=value) for name in ("group_index", "index", "rollout_id"))
    hook = hook_file(tmp_path, GENERATE.format(spoil=spoil))
    args = make_args(custom_generate_function_path=f"{hook}:generate", on_sample_error="stop")
    source = RolloutDataSourceWithBuffer(args)
    samples = flatten_samples(rollout(args, 0, source).samples)
    expected = [(i // 2, None if value == "None" else i, i) for i in range(8)]
    assert numbers_by_group(samples) == expected
    assert ("set group_index" in caplog.text) == (value != "None"), "a new sample may well have none"
    accounts(args, source, samples)


def test_parts_of_a_rollout_have_its_numbers(make_args: Args, use: Use, tmp_path: Path) -> None:
    use(FakeClient())
    hook = hook_file(
        tmp_path,
        "import copy\n"
        "from slime.data import Sample\n"
        "async def generate(args, sample, params):\n"
        "    new = Sample(prompt='summary', tokens=[5], label=sample.label)\n"
        "    own = copy.deepcopy(sample)\n"
        "    own.rollout_id = 10**6 + sample.index\n"
        "    for part in (new, own): part.append_response_tokens(tokens=[1], log_probs=[-1.0], text='x')\n"
        "    return [new, own]\n",
    )
    args = make_args(custom_generate_function_path=f"{hook}:generate", rm_type="random")
    source = RolloutDataSourceWithBuffer(args)
    samples = flatten_samples(rollout(args, 0, source).samples)
    assert numbers_by_group(samples[::2]) == [(i // 2, None, i) for i in range(8)]
    assert numbers_by_group(samples[1::2]) == [(i // 2, i, i) for i in range(8)]
    accounts(args, source, samples)


@pytest.mark.parametrize("policy", ["drop", "retry"])
def test_a_sample_that_fails_with_other_numbers_is_dropped_as_its_own(
    policy: str, make_args: Args, use: Use, tmp_path: Path
) -> None:
    use(FakeClient())
    body = "    before = sample.group_index\n    sample.group_index = 99\n    if before == 1: 1 / 0\n"
    for option, code, called in (
        ("custom_generate_function_path", GENERATE, "generate"),
        ("custom_rm_path", REWARD, "rm"),
    ):
        hook = hook_file(tmp_path, code.format(spoil=body))
        args = make_args(**{option: f"{hook}:{called}"}, on_sample_error=policy)
        source = RolloutDataSourceWithBuffer(args)
        samples = flatten_samples(rollout(args, 0, source).samples)
        assert [sample.group_index for sample in samples[::2]] == [0, 2, 3, 4]
        figures = accounts(args, source, samples)
        assert (figures["rollout/prompts_dropped"], figures["rollout/prompts_in_flight"]) == (1, 0)
        assert not source.state_dict()["in_flight"]


def test_a_function_that_is_given_up_half_done_puts_nothing_wrong_back(
    make_args: Args, use: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(FakeClient(Engine(monkeypatch, longest=10**6)))
    hook = hook_file(
        tmp_path,
        "import asyncio\n"
        "from slime.data import Sample\n"
        "async def generate(args, sample, params):\n"
        "    sample.append_response_tokens(tokens=[1], log_probs=[-1.0], text='x')\n"
        "    if sample.group_index >= 4:\n"
        "        sample.group_index = sample.index = 99\n"
        "        sample.status = Sample.Status.ABORTED\n"
        "        await asyncio.sleep(1000)\n"
        "    return sample\n",
    )
    path = {"custom_generate_function_path": f"{hook}:generate"}
    args = make_args(over_sampling_batch_size=6, partial_rollout=True, **path)
    source = RolloutDataSourceWithBuffer(args)
    samples = flatten_samples(rollout(args, 0, source).samples)
    back = flatten_samples(source.buffer)
    assert numbers_by_group(back) == [(i // 2, i, i) for i in range(8, 12)]
    assert {sample.status for sample in back} == {Status.ABORTED}
    accounts(args, source, samples)
    assert not source.state_dict()["in_flight"]


def test_a_function_that_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hook = hook_file(
        tmp_path, "def log(rollout_id, args, samples, metrics, seconds):\n    samples[0].group_index = 7\n"
    )
    samples = [Sample(group_index=0, index=0, rollout_id=0)]
    args = Namespace(custom_rollout_log_function_path=f"{hook}:log", rollout_timeout=60.0)
    caplog.set_level(logging.WARNING)
    assert not logs_rollout(args, 0, samples, {}, 1.0)
    assert samples[0].group_index == 0
    assert f"--custom-rollout-log-function-path {hook}:log set group_index of sample 0 to 7" in caplog.text
