"""What a rollout does where a sample, a judge, a tool or a hook fails, hangs or is slow; every prompt counted."""

from __future__ import annotations

import json
import logging
import re
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.data import Group, Status
from slime.data.source.rollout_context import rollout_context
from slime.observability import events
from slime.observability.logs import FailureLog
from slime.options.flags.schema import flag_named
from slime.rollout.base_types import flatten_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.utils.errors import HookError, SettingError
from slime.utils.misc import load_function
from tests.fake_client import Engine, FakeClient, accounts, hook_file, indices, rollout

NUM_GPUS = 0

Args = Callable[..., Namespace]
Use = Callable[..., FakeClient]
FILTERS = "slime.rollout.filter_hub.dynamic_sampling_filters"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("    return 'yes'\n", "must return a bool or a DynamicFilterOutput, not 'yes'"),
        ("    raise KeyError('x')\n", r"raised KeyError: 'x'[\s\S]*Traceback"),
    ],
)
def test_bad_filter(body: str, message: str, make_args: Args, use: Use, tmp_path: Path) -> None:
    use(FakeClient())
    hook = hook_file(tmp_path, f"def dynamic_sampling_filter(args, samples, **kwargs):\n{body}")
    with pytest.raises(HookError, match=f"rollout 0: --dynamic-sampling-filter-path .*{message}"):
        rollout(make_args(dynamic_sampling_filter_path=f"{hook}:dynamic_sampling_filter"))


def test_slow_judge_and_tool_do_not_hold_up_a_rollout_that_has_enough(
    make_args: Args, use: Use, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Engine(monkeypatch, longest=10**6)
    monkeypatch.setattr("slime.rollout.groups.pool._ABORT_S", 200.0)
    client = use(FakeClient())
    hook = hook_file(
        tmp_path,
        "import asyncio\n"
        "from slime.rollout.sglang_rollout import generate as ask\n"
        "cancelled = []\n"
        "async def forever(sample):\n"
        "    try:\n"
        "        await asyncio.sleep(3600)\n"
        "    except asyncio.CancelledError:\n"
        "        cancelled.append(sample.index)\n"
        "        raise\n"
        "async def generate(args, sample, params):\n"
        "    sample = await ask(args, sample, params)\n"
        "    if sample.group_index == 0: await forever(sample)\n"
        "    return sample\n"
        "async def rm(args, sample):\n"
        "    if sample.group_index == 1: await forever(sample)\n"
        "    return 1.0\n",
    )
    args = make_args(
        custom_generate_function_path=f"{hook}:generate",
        custom_rm_path=f"{hook}:rm",
        over_sampling_batch_size=6,
        sglang_server_concurrency=1,
        rollout_timeout=200.0,
    )
    source = RolloutDataSourceWithBuffer(args)
    started = time.monotonic()
    output = rollout(args, 0, source)
    assert time.monotonic() - started < 100
    assert indices(output.samples) == [2, 3, 4, 5], "a tool that hangs holds no place among the requests"
    assert client.most_running == 1
    tool, judge = source.buffer
    assert [(s.status, s.response_length) for s in tool] == [(Status.PENDING, 0)] * 2
    assert [(s.status, s.response, s.reward) for s in judge] == [(Status.COMPLETED, "2", None)] * 2
    from slime.utils.misc import load_module

    assert sorted(load_module(str(hook)).cancelled) == [0, 1, 2, 3]
    accounts(args, source, flatten_samples(output.samples))


FLAKY = (
    "from collections import Counter\n"
    "from slime.rollout.sglang_rollout import generate as ask\n"
    "calls = Counter()\n"
    "async def generate(args, sample, params):\n"
    "    assert not sample.metadata.get('seen'), 'a second try begins with what the first one was given'\n"
    "    sample.metadata['seen'] = True\n"
    "    calls[sample.index] += 1\n"
    "    if sample.index == 3 and calls[3] < FAILS: raise OSError('the sandbox is full')\n"
    "    return await ask(args, sample, params)\n"
    "async def rm(args, sample):\n"
    "    calls['rm', sample.index] += 1\n"
    "    if sample.index == 4 and calls['rm', 4] < FAILS: raise OSError('the judge sleeps')\n"
    "    return 1.0\n"
)


@pytest.mark.parametrize(
    ("policy", "fails", "trained"),
    [("retry", 3, [0, 1, 2, 3]), ("retry", 99, [0, 3, 4, 5]), ("drop", 2, [0, 3, 4, 5])],
)
def test_failed_samples(
    policy: str,
    fails: int,
    trained: list[int],
    make_args: Args,
    use: Use,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(FakeClient())
    monkeypatch.setattr(events, "_log", None)
    events.begin(str(tmp_path), "rollout_manager")
    hook = hook_file(tmp_path, FLAKY.replace("FAILS", str(fails)))
    paths = {"custom_generate_function_path": f"{hook}:generate", "custom_rm_path": f"{hook}:rm"}
    args = make_args(on_sample_error=policy, **paths)
    source = RolloutDataSourceWithBuffer(args)
    with rollout_context(7):
        output = rollout(args, 0, source)
    assert indices(output.samples) == trained
    assert output.metrics is not None
    tries = {"retry": min(fails - 1, 3), "drop": 1}[policy]
    assert output.metrics["rollout/sample_failures/generate_error"] == tries
    assert output.metrics["rollout/sample_failures/reward_error"] == tries
    dropped = {"generate_error": 1, "reward_error": 1} if trained != [0, 1, 2, 3] else {}
    assert source.num_dropped == dropped
    accounts(args, source, flatten_samples(output.samples))
    told = [json.loads(line) for line in (tmp_path / events.FILE).read_text().splitlines()]
    assert {(line["kind"], line["subject"], line["phase"]) for line in told} == {
        ("request_failed", "sample 3", "rollout 7"),
        ("reward_failed", "sample 4", "rollout 7"),
    }
    assert len(told) == 2, "the first of a rollout"
    assert {line["action"] for line in told} == {"it is given up" if policy == "drop" else "it is tried again"}
    assert all(re.search("raised OSError: the (sandbox|judge)", line["cause"]) for line in told)


def test_stop_on_the_first_failure_names_it(make_args: Args, use: Use, tmp_path: Path) -> None:
    use(FakeClient())
    hook = hook_file(tmp_path, FLAKY.replace("FAILS", "2"))
    args = make_args(on_sample_error="stop", custom_generate_function_path=f"{hook}:generate")
    with pytest.raises(HookError, match=r"rollout 0: --custom-generate-function-path .* raised OSError: the sandbox"):
        rollout(args)


def test_function_that_always_fails_stops_the_run(make_args: Args, use: Use, tmp_path: Path) -> None:
    use(FakeClient())
    hook = hook_file(tmp_path, "def rm(args, sample): raise KeyError('reward')\n")
    with pytest.raises(HookError, match=r"rollout 0: all 5 groups failed, more than a rollout has.*KeyError: 'reward'"):
        rollout(make_args(custom_rm_path=f"{hook}:rm"))


def test_groups_that_did_not_fail_are_not_among_those_that_did(make_args: Args, use: Use, tmp_path: Path) -> None:
    use(FakeClient())
    body = "def rm(args, sample):\n    if sample.group_index > 0:\n        raise KeyError('reward')\n    return 1.0\n"
    with pytest.raises(HookError, match=r"rollout 0: 5 groups failed, more than a rollout has"):
        rollout(make_args(custom_rm_path=f"{hook_file(tmp_path, body)}:rm"))


def test_reward_that_hangs_fails_its_sample(make_args: Args, use: Use, tmp_path: Path) -> None:
    use(FakeClient())
    hook = hook_file(
        tmp_path,
        "import asyncio\n"
        "from tests.waiting import skip\n"
        "async def rm(args, sample):\n"
        "    if sample.index == 0:\n"
        "        skip(args.reward_timeout)\n"
        "        await asyncio.sleep(60)\n"
        "    return 1\n",
    )
    args = make_args(custom_rm_path=f"{hook}:rm", rollout_timeout=200.0)
    source = RolloutDataSourceWithBuffer(args)
    assert indices(rollout(args, 0, source).samples) == [1, 2, 3, 4]
    assert source.num_dropped == {"reward_timeout": 1}


BUFFER_FILTERS = [
    ("    return buffer[:num_samples]\n", ValueError, "must take the groups that it returns out of the buffer"),
    ("    raise OSError('disk')\n", HookError, r"--buffer-filter-path .*:pop raised OSError: disk"),
    ("    import asyncio; raise asyncio.CancelledError\n", HookError, r"--buffer-filter-path .*:pop raised Cancelled"),
    ("    taken = buffer[:num_samples]; buffer.clear(); return [[1]]\n", ValueError, "must return up to 4 groups"),
    ("    return [buffer.pop(0)] * num_samples\n", ValueError, "has returned a group twice"),
    ("    taken = [buffer.pop()]; buffer += buffer[:1]; return taken\n", ValueError, "or left one twice in the buffer"),
    ("    buffer.pop()\n", ValueError, "must return a list of groups, not a NoneType"),
    ("    return (buffer.pop() for _ in range(2))\n", ValueError, "must return a list of groups, not a generator"),
    ("    return {i: buffer.pop() for i in range(2)}\n", ValueError, "must return a list of groups, not a dict"),
    ("    buffer[1].clear(); return [buffer.pop(1)]\n", ValueError, "has emptied a group"),
    ("    buffer.append(3); return []\n", ValueError, "put what is not a list of samples into the buffer"),
    ("    buffer.pop(); buffer[0].clear(); return buffer[0][5]\n", HookError, r":pop raised IndexError"),
]


@pytest.mark.parametrize("method", [False, True])
@pytest.mark.parametrize(("body", "error", "message"), BUFFER_FILTERS)
def test_bad_buffer_filter(
    body: str, error: type[Exception], message: str, method: bool, make_args: Args, tmp_path: Path
) -> None:
    """Its error names it, and the buffer is as it was."""
    hook = hook_file(tmp_path, f"def pop(args, rollout_id, buffer, num_samples):\n{body}")

    class Own(RolloutDataSourceWithBuffer):
        def buffer_filter(self, args: Namespace, buffer: list[Group], num_samples: int) -> list[Group]:
            return load_function(f"{hook}:pop")(args, 0, buffer, num_samples)

    named = r"Own\.buffer_filter \(--data-source-path\)" if method else f"--buffer-filter-path {hook}:pop"
    args = make_args(buffer_filter_path=None if method else f"{hook}:pop")
    source = (Own if method else RolloutDataSourceWithBuffer)(args)
    groups = source.get_samples(4)
    source.add_samples(groups)
    before = [list(group) for group in groups]
    if method and "must take" in message:
        assert source.get_samples(4) == groups, "a method may leave in the buffer what it returns"
        return
    message = message.removeprefix("--buffer-filter-path .*").removeprefix(":pop")
    with pytest.raises(error, match=rf"{named}.*{message}"):
        source.get_samples(4)
    assert source.buffer == before
    assert all(type(group) is list for group in source.buffer)
    assert (source.num_read, source.num_in_flight(), source.num_added, source.num_dropped.total()) == (4, 0, 0, 0)


def test_a_filter_that_puts_groups_of_its_own_into_the_buffer_and_changes_numbers(
    make_args: Args, tmp_path: Path
) -> None:
    hook = hook_file(
        tmp_path,
        "import copy\n"
        "def pop(args, rollout_id, buffer, num_samples):\n"
        "    for group in buffer:\n"
        "        for sample in group: sample.group_index = 7000\n"
        "    buffer.append(copy.deepcopy(list(buffer[-1])))\n"
        "    for sample in buffer[-1]: sample.group_index = sample.index = sample.rollout_id = None\n"
        "    return [buffer.pop(0)]\n",
    )
    args = make_args(buffer_filter_path=f"{hook}:pop")
    source = RolloutDataSourceWithBuffer(args)
    source.add_samples(source.get_samples(3))
    trained = source.get_samples(1)
    assert indices(trained) == [0]
    assert indices(source.buffer) == [1, 2, 3]
    assert source.buffer[2][0].index == 3 * args.n_samples_per_prompt
    accounts(args, source, flatten_samples(trained))


def test_judges_that_hang_in_threads_stop_nobody_else(
    make_args: Args, use: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.rollout.runtime.HOOK_THREADS", 4)
    hook = hook_file(
        tmp_path,
        "import itertools, time\n"
        "from slime.rollout.engine.loop import background_loop\n"
        "from tests.waiting import skip\n"
        "hanging = itertools.count(1)\n"
        "def rm(args, sample):\n"
        "    if sample.group_index < 4:\n"
        "        if next(hanging) in (4, 8):  # they have all threads, and the others soon wait for one\n"
        "            while args.client.running or len(args.client.requests) < 12: time.sleep(0.01)\n"
        "            time.sleep(0.1)\n"
        "            background_loop().soon(skip, args.reward_timeout)\n"
        "        time.sleep(200)\n"
        "    return 1\n"
        "def keep(args, samples): return True\n",
    )
    args = make_args(
        custom_rm_path=f"{hook}:rm",
        dynamic_sampling_filter_path=f"{hook}:keep",
        on_sample_error="drop",
        rollout_batch_size=6,
        rollout_timeout=200.0,
    )
    args.client = use(FakeClient())
    source = RolloutDataSourceWithBuffer(args)
    assert indices(rollout(args, 0, source).samples) == [4, 5, 6, 7, 8, 9]
    assert source.num_dropped == {"reward_timeout": 4}, "waiting for a thread is not the judge's time"


@pytest.mark.parametrize("flag", ["dynamic_sampling_filter_path", "rollout_sample_filter_path"])
def test_hook_of_a_batch_that_hangs_is_named(flag: str, make_args: Args, use: Use, tmp_path: Path) -> None:
    use(FakeClient())
    hook = hook_file(
        tmp_path,
        "import asyncio\n"
        "from tests.waiting import skip\n"
        "async def hang(args, samples):\n"
        "    skip(args.rollout_timeout)\n"
        "    await asyncio.sleep(60)\n",
    )
    args = make_args(**{flag: f"{hook}:hang"})
    expected = rf"rollout 0: .*waiting for {flag_named(flag)} .*:hang for \d+ s.*within 20 s \(--rollout-timeout\)"
    with pytest.raises(TimeoutError, match=expected):
        rollout(args)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("    import sys; sys.exit(3)\n", r"called sys.exit\(3\)"),
        ("    task = asyncio.ensure_future(asyncio.sleep(9)); task.cancel(); await task\n", "raised CancelledError"),
        ("    return float('nan')\n", "its reward is nan"),
        ("    return 1e308\n", r"sample \d+: its reward is 1e\+308, .* must give numbers within 1e\+18"),
        ("    return -float('inf')\n", "its reward is -inf"),
        ("    return 10**400\n", "raised OverflowError"),
        ("    raise KeyboardInterrupt\n", "raised KeyboardInterrupt"),
        ("    raise BaseException('odd')\n", "raised BaseException: odd"),
        ("    raise GeneratorExit\n", "raised RuntimeError: GeneratorExit"),
        ("    next(iter([]))\n", "raised RuntimeError: (coroutine raised )?StopIteration"),
    ],
)
@pytest.mark.parametrize("is_async", [True, False])
def test_reward_functions_that_fail_oddly(
    is_async: bool, body: str, message: str, make_args: Args, use: Use, tmp_path: Path
) -> None:
    if "await" in body and not is_async:
        return
    use(FakeClient())
    kind = "async def" if is_async else "def"
    hook = hook_file(tmp_path, f"import asyncio\n{kind} rm(args, sample):\n{body}")
    source = RolloutDataSourceWithBuffer(make_args())
    with pytest.raises(HookError, match=message):
        rollout(make_args(custom_rm_path=f"{hook}:rm", on_sample_error="stop"), 0, source)
    with pytest.raises(HookError, match=f"5 groups failed[\\s\\S]*{message}"):
        rollout(make_args(custom_rm_path=f"{hook}:rm"), 0, source)


@pytest.mark.parametrize(
    ("body", "flag", "message"),
    [
        ("async def own(args, sample):\n    return {'score': 1.0}\n", "custom_rm_path", "with --reward-key"),
        (
            "from slime.rollout.sglang_rollout import generate\n"
            "async def own(args, sample, params):\n"
            "    sample.prompt, sample.tokens = [{'role': 'user', 'content': 'x'}], []\n"
            "    return await generate(args, sample, params)\n",
            "custom_generate_function_path",
            "add --apply-chat-template",
        ),
    ],
)
def test_settings_that_are_wrong_for_all_samples_end_the_run_at_once(
    body: str, flag: str, message: str, make_args: Args, use: Use, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    use(FakeClient())
    hook = hook_file(tmp_path, body)
    with pytest.raises(SettingError, match=f"sample [0-9]+: .*{message}"):
        rollout(make_args(**{flag: f"{hook}:own"}))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_bug_of_a_hook_does_not_flood_the_console(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog()
    for number in range(40):
        error = HookError(f"--custom-rm-path f.py:rm raised OSError: {number}\nTraceback: line")
        error.__cause__ = OSError(number)
        log.warn(f"sample {number}", "reward_error", error)
    other = HookError("--custom-rm-path f.py:rm raised KeyError: 'x'\nTraceback: line")
    other.__cause__ = KeyError("x")
    log.warn("sample 40", "reward_error", other)
    told = [record.getMessage() for record in caplog.records]
    assert [text.split(":")[0] for text in told] == [f"sample {n}" for n in (0, 1, 2, 3, 7, 15, 31, 40)]
    assert [text for text in told if "Traceback" in text] == [told[0], told[-1]]
    assert told[4] == "sample 7: reward_error by the same kind of error as above, in 8 tries by now"


def test_the_same_words_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog()
    for number in range(24):  # eight samples, three tries each
        error = HookError("--custom-generate-function-path f.py:g raised KeyError: 'x'\nTraceback: line")
        error.__cause__ = KeyError("x")
        log.warn(f"sample {number}", "generate_error", error)
    told = [record.getMessage() for record in caplog.records]
    assert ["KeyError" in text for text in told] == [True, False, False]
    assert [text.split(":")[0] for text in told] == ["sample 0", "sample 7", "sample 15"]


def test_generate_function_that_hangs_fails_its_sample(make_args: Args, use: Use, tmp_path: Path) -> None:
    use(FakeClient())
    hook = hook_file(
        tmp_path,
        "import asyncio\n"
        "from slime.rollout.sglang_rollout import generate as ask\n"
        "from tests.waiting import skip\n"
        "done = []\n"
        "async def generate(args, sample, params):\n"
        "    if sample.group_index == 1:\n"
        "        while len(done) < 6: await asyncio.sleep(0.01)\n"
        "        skip(args.generate_timeout)\n"
        "        await asyncio.sleep(60)\n"
        "    sample = await ask(args, sample, params)\n"
        "    done.append(sample.index)\n"
        "    return sample\n",
    )
    args = make_args(custom_generate_function_path=f"{hook}:generate", generate_timeout=10.0, rollout_timeout=200.0)
    source = RolloutDataSourceWithBuffer(args)
    assert indices(rollout(args, 0, source).samples) == [0, 2, 3, 4]
    assert source.num_dropped == {"generate_timeout": 1}
