"""Tries and calls of a custom generate function: what one leaves behind, and samples that are no use to training."""

from __future__ import annotations

import threading
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.data import Group
from slime.data.rows.conversation import RowError
from slime.rollout.base_types import flatten_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.runtime import RolloutRuntime
from slime.utils.errors import SettingError
from tests.fake_client import FakeClient, hook_file, indices, rollout

NUM_GPUS = 0

Args = Callable[..., Namespace]
Use = Callable[..., FakeClient]
PATIENT = (
    "import itertools, threading, time\n"
    "from tests.waiting import skip\n"
    "from slime.rollout.engine.loop import background_loop\n"
)
"""What a function needs that lets its own deadline pass, and goes on in its thread."""


def functions_of(hook: Path) -> dict[str, str]:
    return {"custom_generate_function_path": f"{hook}:generate", "custom_rm_path": f"{hook}:rm"}


@pytest.mark.parametrize(
    ("flag", "parameters", "tokens"),
    [
        ("custom_generate_function_path", "args, sample, params", "7, 8"),
        ("rollout_sample_hook_path", "args, sample", ""),
    ],
)
def test_function_in_a_thread_that_was_given_up_cannot_write_into_the_next_try(
    flag: str, parameters: str, tokens: str, make_args: Args, use: Use, tmp_path: Path
) -> None:
    use(FakeClient())
    hook = hook_file(
        tmp_path,
        PATIENT + "tries, second, wrote = itertools.count(1), threading.Event(), threading.Event()\n"
        f"def function({parameters}):\n"
        "    number = next(tries) if sample.index == 0 else None\n"
        "    if number == 1:\n"
        "        background_loop().soon(skip, args.generate_timeout)\n"
        "        assert second.wait(100)\n"
        "        sample.append_response_tokens(tokens=[66], log_probs=[-6.0])\n"
        "        wrote.set()\n"
        "        return sample\n"
        "    if number == 2:\n"
        "        second.set()\n"
        "        assert wrote.wait(100)\n"
        f"    sample.append_response_tokens(tokens=[{tokens}], log_probs=[-1.0 for _ in ({tokens})])\n"
        "    return sample\n"
        "def rm(args, sample): return 1.0\n",
    )
    path = f"{hook}:function"
    functions = {flag: path if flag.startswith("custom") else [path], "custom_rm_path": f"{hook}:rm"}
    args = make_args(**functions, generate_timeout=50.0, rollout_timeout=2000.0, on_sample_error="retry")
    first, *_ = flatten_samples(rollout(args).samples)
    assert first.index == 0
    assert first.tokens[-first.response_length :] == ([7, 8] if tokens else [149])
    assert first.failure is not None
    assert first.failure.startswith("generate_timeout: ")


def test_a_sample_that_cannot_be_copied_is_named(make_args: Args, use: Use, tmp_path: Path) -> None:
    class Source(RolloutDataSourceWithBuffer):
        def get_samples(self, num_samples: int) -> list[Group]:
            groups = super().get_samples(num_samples)
            groups[1][1].metadata["lock"] = threading.Lock()
            return groups

    use(FakeClient())
    hook = hook_file(tmp_path, "def hook(args, sample): return None\n")
    args = make_args(rollout_sample_hook_path=[f"{hook}:hook"], on_sample_error="drop")
    with pytest.raises(SettingError, match=r"sample 3 cannot be copied for another try: TypeError: .*metadata"):
        rollout(args, 0, Source(args))


def test_function_in_a_thread_that_was_given_up_cannot_finish_a_sample_that_failed(
    make_args: Args, use: Use, tmp_path: Path
) -> None:
    use(FakeClient())
    hook = hook_file(
        tmp_path,
        PATIENT + "asked, failed, wrote = (threading.Event() for _ in range(3))\n"
        "judged = itertools.count(1)\n"
        "def generate(args, sample, params):\n"
        "    if sample.index == 0:\n"
        "        assert asked.wait(100)\n"
        "        background_loop().soon(skip, args.generate_timeout)\n"
        "        assert failed.wait(100)\n"
        "    sample.append_response_tokens(tokens=[7], log_probs=[-1.0])\n"
        "    sample.status = sample.Status.COMPLETED\n"
        "    if sample.index == 0: wrote.set()\n"
        "    return sample\n"
        "def rm(args, sample):\n"
        "    if next(judged) == 7: asked.set()\n"
        "    if sample.index == 1:\n"
        "        while args.first.status is not sample.Status.FAILED: time.sleep(0.01)\n"
        "        failed.set()\n"
        "        assert wrote.wait(100)\n"
        "    return 1.0\n",
    )
    paths = functions_of(hook)
    limits = {"generate_timeout": 50.0, "reward_timeout": 2000.0, "rollout_timeout": 2000.0}
    args = make_args(**paths, **limits, on_sample_error="drop")
    source = RolloutDataSourceWithBuffer(args)
    groups = source.get_samples(4)
    args.first = groups[0][0]
    source.add_samples(groups)
    assert indices(rollout(args, 0, source).samples) == [1, 2, 3, 4]
    assert source.num_dropped == {"generate_timeout": 1}


def test_each_call_of_a_generate_function_has_its_own_parameters_and_versions(
    make_args: Args, use: Use, tmp_path: Path, runtime: RolloutRuntime
) -> None:
    runtime.version = 4
    use(FakeClient())
    hook = hook_file(
        tmp_path,
        "from collections import Counter\n"
        "from slime.rollout.sglang_rollout import GenerateState\n"
        "from slime.data import Sample\n"
        "calls, seen = Counter(), []\n"
        "async def generate(args, sample, sampling_params):\n"
        "    state = GenerateState(args)\n"
        "    assert not state.aborted\n"
        "    assert state.sampling_params == sampling_params\n"
        "    calls[sample.index] += 1\n"
        "    sampling_params['max_new_tokens'] -= 3\n"
        "    sampling_params['stop'].append('</tool>')\n"
        "    seen.append(sampling_params['max_new_tokens'])\n"
        "    sample.tokens = state.tokenizer(sample.prompt)['input_ids'] + [7]\n"
        "    sample.response_length, sample.rollout_log_probs = 1, [-1.0]\n"
        "    sample.status = Sample.Status.ABORTED if calls[sample.index] < 3 else Sample.Status.COMPLETED\n"
        "    return sample\n"
        "def rm(args, sample): return 1.0\n",
    )
    paths = functions_of(hook)
    args = make_args(**paths, asynchronous=True, rollout_stop=["END"])
    samples = flatten_samples(rollout(args).samples)
    assert args.rollout_stop == ["END"]
    assert {tuple(sample.weight_versions) for sample in samples} == {("4",)}
    from slime.utils.misc import load_module

    assert set(load_module(str(hook)).seen) == {args.rollout_max_response_len - 3}


def test_samples_without_a_response_fail_one_by_one(make_args: Args, use: Use, tmp_path: Path) -> None:
    use(FakeClient())
    hook = hook_file(
        tmp_path,
        "import copy\n"
        "async def generate(args, sample, params):\n"
        "    parts = [sample, copy.deepcopy(sample)]\n"
        "    for part in parts[: 1 if sample.group_index == 1 else 2]:\n"
        "        part.append_response_tokens(tokens=[1], log_probs=[-1.0])\n"
        "    return parts\n"
        "def convert(args, samples): return {}\n"
        "def with_response(args, samples): return all(sample.response_length for sample in samples)\n"
        "def all_of_them(args, samples): return True\n"
        "def rm(args, sample): return 1.0\n",
    )
    paths = functions_of(hook)
    source = RolloutDataSourceWithBuffer(args := make_args(**paths, on_sample_error="drop"))
    assert indices(rollout(args, 0, source).samples) == [0, 2, 3, 4]
    assert source.num_dropped == {"generate_error": 1}
    with pytest.raises(RowError, match=r"sample 2 \(status completed\): empty response"):
        rollout(make_args(**paths, on_sample_error="stop"))
    own = make_args(**paths, custom_convert_samples_to_train_data_path=f"{hook}:convert")
    filtered = make_args(
        **paths,
        on_sample_error="stop",
        dynamic_sampling_filter_path=f"{hook}:with_response",
        over_sampling_batch_size=5,
    )
    source = RolloutDataSourceWithBuffer(filtered)
    assert indices(rollout(filtered, 0, source).samples) == [0, 2, 3, 4]
    assert source.num_dropped == {"filter_dynamic": 1}, "a filter may leave them out by itself"
    kept = make_args(**paths, on_sample_error="drop", dynamic_sampling_filter_path=f"{hook}:all_of_them")
    source = RolloutDataSourceWithBuffer(kept)
    assert indices(rollout(kept, 0, source).samples) == [0, 2, 3, 4]
    assert source.num_dropped == {"generate_error": 1}
    assert indices(rollout(own).samples) == [0, 1, 2, 3], "what can be trained is then for the user's function to say"


@pytest.mark.parametrize(("raised", "times"), [("BadInputError", 1), ("OSError", 3)])
def test_a_reward_that_refuses_a_sample_is_not_asked_again(
    make_args: Args, use: Use, tmp_path: Path, raised: str, times: int
) -> None:
    use(FakeClient())
    hook = hook_file(
        tmp_path,
        "from slime.utils.errors import BadInputError\n"
        "def rm(args, sample):\n"
        "    if sample.group_index == 0:\n"
        "        args.asked.append(sample.index)\n"
        f"        raise {raised}('no reference answer')\n"
        "    return 1.0\n",
    )
    args = make_args(custom_rm_path=f"{hook}:rm", on_sample_error="retry")
    args.asked = []
    source = RolloutDataSourceWithBuffer(args)
    assert 0 not in indices(rollout(args, 0, source).samples)
    assert args.asked.count(0) == times
    assert source.num_dropped == {"reward_error": 1}
