"""Dynamic sampling filters in a rollout: what is drawn for what they drop, what is told of one that keeps nothing."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.rollout.base_types import flatten_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.utils.errors import BadInputError
from tests.fake_client import FakeClient, accounts, hook_file, indices, rollout

NUM_GPUS = 0

Args = Callable[..., Namespace]
Use = Callable[..., FakeClient]
FILTERS = "slime.rollout.filter_hub.dynamic_sampling_filters"


def test_dynamic_filter_drops_and_refills(make_args: Args, use: Use, tmp_path: Path) -> None:
    use(FakeClient())
    rm = hook_file(tmp_path, "def rm(args, sample): return float(sample.index % 2 and sample.group_index % 3 > 0)\n")
    args = make_args(custom_rm_path=f"{rm}:rm", dynamic_sampling_filter_path=f"{FILTERS}.check_reward_nonzero_std")
    source = RolloutDataSourceWithBuffer(args)
    output = rollout(args, 0, source)
    assert indices(output.samples) == [1, 2, 4, 5]
    assert output.metrics is not None
    assert output.metrics["rollout/dynamic_filter/drop_zero_std_0"] == 2
    figures = accounts(args, source, flatten_samples(output.samples))
    assert figures["rollout/prompts_read"] == 6, "only as many are drawn as are missing"
    assert figures["rollout/prompts_dropped/filter_zero_std_0"] == 2


@pytest.mark.parametrize(
    ("path", "reasons"), [(f"{FILTERS}.check_reward_nonzero_std", " (zero_std_0 {n})"), ("{hooks}:varied", "")]
)
def test_a_filter_that_keeps_nothing_is_told_of(
    make_args: Args, use: Use, tmp_path: Path, caplog: pytest.LogCaptureFixture, path: str, reasons: str
) -> None:
    """By its reasons, where it gives any, and with one of the samples that it has dropped."""
    use(FakeClient())
    hooks = hook_file(
        tmp_path,
        "def rm(args, sample): return float(sample.index % 2 and not 0 < sample.group_index < 71)\n"
        "def varied(args, samples): return len({sample.reward for sample in samples}) > 1\n",
    )
    args = make_args(custom_rm_path=f"{hooks}:rm", dynamic_sampling_filter_path=path.format(hooks=hooks))
    assert indices(rollout(args, 0, RolloutDataSourceWithBuffer(args)).samples) == [0, 71, 72, 73]
    # Threads of other tests' servers may end, and tell of it, at any time.
    own = [message for message in caplog.messages if message.startswith("--")]
    assert [message.partition(": check")[0] for message in own] == [
        f"--dynamic-sampling-filter-path has dropped {n} groups in a row{reasons.format(n=n)}" for n in (32, 64)
    ]
    assert all(re.search(r"\n  one of them: sample \d+, reward 0.0, label '\w+', response '.+'$", each) for each in own)


def test_a_deadline_tells_first_that_the_filter_keeps_nothing(make_args: Args, use: Use, tmp_path: Path) -> None:
    use(FakeClient())
    rm = hook_file(
        tmp_path,
        "from tests.waiting import skip\n"
        "async def rm(args, sample):\n"
        "    if sample.index == 20: skip(args.rollout_timeout)\n"
        "    return 0.0\n",
    )
    args = make_args(custom_rm_path=f"{rm}:rm", dynamic_sampling_filter_path=f"{FILTERS}.check_reward_nonzero_std")
    message = r"rollout 0: 0 groups kept, \d+ dropped \(filter_zero_std_0\); \d+ of \d+ samples finished.* within 20 s"
    with pytest.raises(TimeoutError, match=message):
        rollout(args, 0, RolloutDataSourceWithBuffer(args))


def test_filter_with_fallback_keeps_what_would_take_another_round(make_args: Args, use: Use, tmp_path: Path) -> None:
    use(FakeClient())
    path = f"{FILTERS}.check_reward_nonzero_std_with_fallback"
    args = make_args(rm_type="f1", dynamic_sampling_filter_path=path, over_sampling_batch_size=6)
    source = RolloutDataSourceWithBuffer(args)  # all rewards are 1
    output = rollout(args, 0, source)
    assert len(output.samples) == 4
    assert source.num_dropped == {"filter_zero_std_1": 2}
    assert source.num_read == 6


def test_an_answer_that_cannot_be_asked_what_it_is(make_args: Args, use: Use, tmp_path: Path) -> None:
    use(FakeClient())
    own = hook_file(
        tmp_path,
        "class Answer:\n    def __getattr__(self, name): raise RuntimeError(name)\n"
        "def keep(args, samples): return Answer()\n",
    )
    args = make_args(dynamic_sampling_filter_path=f"{own}:keep")
    with pytest.raises(BadInputError, match=r"^--dynamic-sampling-filter-path .*: its answer: asking it for 'ndim'"):
        rollout(args, 0, RolloutDataSourceWithBuffer(args))
