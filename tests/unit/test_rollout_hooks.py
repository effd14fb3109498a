"""Users' functions in a rollout: what they may do, and how their mistakes are told."""

from __future__ import annotations

import asyncio
import gc
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.data import Sample
from slime.rollout.base_types import flatten_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.engine.loop import background_loop
from slime.rollout.sglang_rollout import generate_and_rm
from slime.utils.errors import BadInputError, DeadlineError, HookError
from tests.fake_client import FakeClient, hook_file, indices, rollout
from tests.waiting import wait_for

NUM_GPUS = 0

Args = Callable[..., Namespace]


def test_custom_generate(make_args: Args, use: Callable[..., FakeClient], tmp_path: Path) -> None:
    client = use(FakeClient())
    hook = hook_file(
        tmp_path,
        "from slime.rollout.sglang_rollout import generate as one_turn\n"
        "async def generate(args, sample, sampling_params):\n"
        "    sample = await one_turn(args, sample, sampling_params)\n"
        "    sample.append_response_tokens(tokens=[1, 2], trainable=False, text=' tool ')\n"
        "    return await one_turn(args, sample, sampling_params)\n",
    )
    args = make_args(rm_type="random", custom_generate_function_path=f"{hook}:generate")
    for sample in flatten_samples(rollout(args).samples):
        assert " tool " in sample.response
        assert sample.loss_mask is not None
        assert sample.loss_mask.count(0) == 2
        sample.check()
    assert client.most_running <= 8
    assert client.made == 1, "the hook's requests use the rollout's own client"


def test_custom_generate_fan_out_and_evaluation(
    make_args: Args, use: Callable[..., FakeClient], tmp_path: Path
) -> None:
    use(FakeClient())
    hook = hook_file(
        tmp_path,
        "import copy\n"
        "async def generate(args, sample, sampling_params, evaluation=False):\n"
        "    parts = [copy.deepcopy(sample) for _ in range(1 + sample.index % 3)]\n"
        "    for i, part in enumerate(parts):\n"
        "        part.rollout_id = None\n"
        "        part.append_response_tokens(tokens=[i], log_probs=[-1.0], text=f'{evaluation}')\n"
        "    return parts\n",
    )
    args = make_args(custom_generate_function_path=str(hook), rm_type="random")
    output = rollout(args)
    assert [len(flatten_samples(group)) for group in output.samples] == [3, 4, 5, 3]
    for group in output.samples:
        for parts in group:
            assert len({part.rollout_id for part in parts}) == 1
            assert all(part.response == "False" for part in parts)
    result = asyncio.run(generate_and_rm(args, Sample(index=0, rollout_id=0, prompt="x"), {}, evaluation=True))
    assert result[0].response == "True"


FILLED = (
    "sample.tokens, sample.response, sample.response_length = [1, 2, 3], 'ab', 2\n"
    "    sample.loss_mask, sample.rollout_log_probs = [0, 1], [0.0, -0.5]\n"
)
BAD_HOOKS = [
    ("    raise KeyError('boom')\n", r"--custom-generate-function-path .* raised KeyError: 'boom'[\s\S]*Traceback"),
    ("    return None\n", "must return a Sample or a non-empty list of Sample, not None"),
    ("    return []\n", "must return a Sample or a non-empty list of Sample"),
    ("    sample.response_length = 99\n    return sample\n", "returned an inconsistent sample: .*response_length 99"),
    (
        "    import copy\n    a, b = copy.copy(sample), copy.copy(sample)\n    b.rollout_id = 77\n    return [a, b]\n",
        "cut one rollout into samples of different rollout_id",
    ),
    *(
        (f"    {FILLED}    {line}\n    return sample\n", rf"returned an inconsistent sample: sample \d: .*{message}")
        for line, message in (
            (
                "sample.rollout_log_probs[1] = float('nan')",
                "the rollout_log_prob of response token 1 is nan, which",
            ),
            ("sample.rollout_log_probs[0] = None", "the rollout_log_prob of response token 0 is None, which is masked"),
            ("sample.rollout_log_probs[0] = 'x'", "rollout_log_probs are not all numbers"),
            ("sample.loss_mask = [0.5, 1]", r"loss_mask must be of 0 and 1, got \[0.5, 1\]"),
            ("sample.tokens[0] = 1 << 30", "token id 1073741824 is outside the model's vocabulary of 1048576"),
            ("sample.tokens[0] = -1", "token id -1 is outside"),
            ("sample.tokens[0] = 1.0", "among its tokens is 1.0: they are ids, integers"),
            ("sample.tokens[0] = None", "among its tokens is None"),
            ("sample.response = None", "response is None, not of type str"),
            ("sample.metadata = None", "metadata is None, not of type dict"),
            ("sample.status = 'completed'", "status is 'completed', not of type Status"),
            ("sample.response_length = 2.0", "response_length is 2.0, not of type int"),
            ("sample.tokens = None", "tokens is None, not a list"),
            ("sample.loss_mask = 1", "loss_mask is 1, not a list"),
            ("sample.loss_mask = [[1], [0]]", r"loss_mask must be of 0 and 1, got \[\[1\], \[0\]\]"),
            ("sample.rollout_log_probs = -1.0", "rollout_log_probs is -1.0, not a list"),
            (
                "sample.rollout_log_probs = [(-1.0, 5, None)] * 2",
                r"rollout_log_probs must be a number a token, not \(-1",
            ),
            ("sample.rollout_log_probs = [(-1.0, 5)] * 2", r"rollout_log_probs must be a number a token, not \(-1"),
            ("sample.tokens = [[1], [2], [3]]", r"among its tokens is \[1\]"),
            ("sample.tokens = [True, True, True]", "among its tokens is True"),
            ("sample.tokens[1] = 2**70", "among its tokens is 1180591620717411303424"),
        )
    ),
]


@pytest.mark.parametrize(("body", "message"), BAD_HOOKS)
def test_bad_custom_generate(
    body: str, message: str, make_args: Args, use: Callable[..., FakeClient], tmp_path: Path
) -> None:
    use(FakeClient())
    hook = hook_file(tmp_path, f"async def generate(args, sample, sampling_params):\n{body}")
    with pytest.raises(HookError, match=message):
        rollout(make_args(custom_generate_function_path=str(hook)))


def test_arrays_and_tensors_of_a_function_are_lists_afterwards(
    make_args: Args, use: Callable[..., FakeClient], tmp_path: Path
) -> None:
    use(FakeClient())
    makes = "sample.tokens = torch.tensor(sample.tokens)\n    sample.loss_mask = np.array(sample.loss_mask)\n"
    makes += "    sample.rollout_log_probs = torch.tensor(sample.rollout_log_probs)\n"
    body = f"import numpy as np, torch\nasync def generate(args, sample, sampling_params):\n    {FILLED}    {makes}"
    hook = hook_file(tmp_path, f"{body}    return sample\n")
    for group in rollout(make_args(custom_generate_function_path=str(hook))).samples:
        for sample in flatten_samples(group):
            assert (sample.tokens, sample.loss_mask, sample.rollout_log_probs) == ([1, 2, 3], [0, 1], [0.0, -0.5])


@pytest.mark.parametrize(
    ("line", "changes", "evaluation"),
    [
        ("sample.tokens[0] = 1 << 30", {}, True),
        ("sample.rollout_log_probs = [None, None]", {}, True),
        ("sample.rollout_log_probs = [None, None]", {"custom_convert_samples_to_train_data_path": "mine.py"}, False),
        ("sample.rollout_log_probs, sample.status = [None, None], sample.Status.FAILED", {}, False),
        ("sample.response, sample.status = None, sample.Status.FAILED", {}, False),
        ("import torch; sample.response_length = torch.tensor(2)", {}, False),
        ("sample.loss_mask, sample.remove_sample = [0.5, 1], True", {}, False),
    ],
)
def test_what_nobody_trains_on_may_be_as_it_is(
    line: str,
    changes: dict[str, Any],
    evaluation: bool,
    make_args: Args,
    use: Callable[..., FakeClient],
    tmp_path: Path,
) -> None:
    use(FakeClient())
    body = f"async def generate(args, sample, params):\n    {FILLED}    {line}\n    return sample\n"
    args = make_args(custom_generate_function_path=str(hook_file(tmp_path, body)), **changes)
    given = Sample(index=0, rollout_id=0, prompt="x", label="ab")
    result = asyncio.run(generate_and_rm(args, given, {}, evaluation=evaluation))
    assert isinstance(result, Sample)
    assert (result.failure, result.response_length) == (None, 2)


def test_sample_names_its_own_functions(make_args: Args, use: Callable[..., FakeClient], tmp_path: Path) -> None:
    use(FakeClient())
    hook = hook_file(
        tmp_path,
        "async def generate(args, sample, params):\n"
        "    sample.append_response_tokens(tokens=[1], log_probs=[-1.0], text='own')\n"
        "    return sample\n"
        "def rm(args, sample, **kwargs): return 7\n",
    )
    args = make_args()
    source = RolloutDataSourceWithBuffer(args)
    (group,) = source.get_samples(1)
    group[0].generate_function_path, group[0].custom_rm_path = f"{hook}:generate", f"{hook}:rm"
    source.add_samples([group])
    first, second, *_ = flatten_samples(rollout(args, 0, source).samples)
    assert (first.response, first.reward) == ("own", 7.0)
    assert second.response == "1"


def test_missing_reward_is_an_error(make_args: Args, use: Callable[..., FakeClient], tmp_path: Path) -> None:
    use(FakeClient())
    hook = hook_file(tmp_path, "def rm(args, sample, **kwargs): return None if sample.index == 5 else 1.0\n")
    message = r"rollout 0: sample 5 has no reward \(status completed\): --custom-rm-path \S+:rm gave None"
    with pytest.raises(HookError, match=message):
        rollout(make_args(custom_rm_path=f"{hook}:rm", on_sample_error="stop"))


class Naming(RolloutDataSourceWithBuffer):
    """Names the reward of its samples, as long as it is told to."""

    names = True

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = super().get_samples(num_samples)
        for sample in flatten_samples(groups):
            if self.names:
                sample.metadata["rm_type"] = "f1"
        return groups


def test_a_data_source_may_name_rewards(make_args: Args, use: Callable[..., FakeClient]) -> None:
    use(FakeClient())
    args = make_args(rm_type=None, data_source_path=f"{__name__}.Naming")
    source = Naming(args)
    assert all(sample.reward is not None for sample in flatten_samples(rollout(args, 0, source).samples))
    source.names = False
    message = r"all \d+ groups failed.*the last one: reward_error: there is no reward for sample \d+: give --rm-type, "
    with pytest.raises(HookError, match=message):
        rollout(args, 1, source)
    with pytest.raises(BadInputError, match=r"^there is no reward for sample \d+: give --rm-type, --custom-rm"):
        rollout(Namespace(**vars(args) | {"on_sample_error": "stop"}), 1, source)


def test_blocked_loop_is_noticed(
    make_args: Args, use: Callable[..., FakeClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.rollout.engine.loop._GRACE_S", 0.2)
    use(FakeClient())
    hook = hook_file(tmp_path, "import time\nasync def generate(args, sample, params):\n    time.sleep(99)  # blocks\n")
    args = make_args(custom_generate_function_path=str(hook), rollout_timeout=3.0)
    loop = background_loop()
    with pytest.raises(TimeoutError, match=r"the event loop is blocked here:[\s\S]*time.sleep\(99\)"):
        rollout(args)
    assert background_loop() is not loop
    assert len(rollout(make_args()).samples) == 4


STUBBORN = (
    "import asyncio\n"
    "from tests.waiting import skip\n"
    "async def stubborn(args, samples):\n"
    "    skip(20)\n"
    "    for _ in range(200):\n"
    "        try:\n"
    "            await asyncio.sleep(0.1)\n"
    "        except asyncio.CancelledError:\n"
    "            pass\n"
)


@pytest.mark.parametrize(
    ("flag", "timeout", "message"),
    [
        ("custom_rm_path", "reward_timeout", r"the reward of samples \d by --custom-rm-path .* took longer than 20 s"),
        ("rollout_sample_filter_path", "rollout_timeout", "waiting for --rollout-sample-filter-path .* within 20 s"),
    ],
)
def test_a_hook_that_swallows_its_cancellation_is_left_alone(
    flag: str,
    timeout: str,
    message: str,
    make_args: Args,
    use: Callable[..., FakeClient],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slime.rollout.engine.loop._CANCEL_S", 0.1)
    use(FakeClient())
    hook = hook_file(tmp_path, STUBBORN)
    times = {"reward_timeout": 2000.0, "rollout_timeout": 2000.0, timeout: 20.0}
    args = make_args(**{flag: f"{hook}:stubborn"}, **times, on_sample_error="stop")
    with pytest.raises(DeadlineError, match=message):
        rollout(args)


def test_what_a_function_that_was_left_alone_raises_later_is_not_told_of(
    make_args: Args,
    use: Callable[..., FakeClient],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("slime.rollout.engine.loop._CANCEL_S", 0.01)
    use(FakeClient())
    hook = hook_file(
        tmp_path,
        "import asyncio\n"
        "from tests.waiting import skip\n"
        "async def rm(args, sample):\n"
        "    if sample.index > 1: return 1.0\n"
        "    skip(20)\n"
        "    try:\n"
        "        await asyncio.sleep(3000)\n"
        "    except asyncio.CancelledError:\n"
        "        await asyncio.sleep(0.1)\n"
        "    args.ends.append(sample.index)\n"
        "    raise KeyError('late')\n",
    )
    limits = {"reward_timeout": 20.0, "rollout_timeout": 2000.0}
    args = make_args(custom_rm_path=f"{hook}:rm", **limits, on_sample_error="drop")
    args.ends = []
    assert indices(rollout(args).samples) == [1, 2, 3, 4]
    wait_for(lambda: len(args.ends) == 2, "both have ended")
    background_loop().run(asyncio.sleep(0), timeout=60, what="their callbacks")
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_an_exit_in_a_task_that_a_hook_started_does_not_end_the_loop(
    make_args: Args, use: Callable[..., FakeClient], tmp_path: Path
) -> None:
    use(FakeClient())
    hook = hook_file(
        tmp_path,
        "import asyncio\n"
        "async def run(code): exec(code)\n"
        "async def rm(args, sample): await asyncio.gather(run('x = 1'), run('raise SystemExit(7)'))\n",
    )
    loop = background_loop()
    with pytest.raises(HookError, match=r"--custom-rm-path .* called sys.exit\(7\)"):
        rollout(make_args(custom_rm_path=f"{hook}:rm", on_sample_error="stop"))
    assert len(rollout(make_args()).samples) == 4
    assert background_loop() is loop
