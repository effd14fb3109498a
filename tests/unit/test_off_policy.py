"""--mask-offpolicy-in-partial-rollout: tokens of older weights leave the loss by segment, however they came about."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.data import Sample
from slime.data.source.rollout_context import rollout_context
from slime.rollout.base_types import flatten_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.engine.loop import background_loop
from slime.rollout.engine.versions import MASKED_TOKENS, mask_older_tokens, note_version
from slime.rollout.fully_async_rollout import generate_rollout_fully_async
from tests.fake_client import FakeClient, hook_file, push, reply, rollout

NUM_GPUS = 0

Args = Callable[..., Namespace]
Use = Callable[..., FakeClient]

Segment = tuple[int | None, int, bool]
"""Version (None: not by an engine), tokens, and whether an earlier mask lets them into the loss."""
_segments = st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 6)), st.integers(1, 5), st.booleans()), max_size=8)


def sample_of(segments: list[Segment]) -> Sample:
    sample = Sample(tokens=[1])
    mask: list[int] = []
    for version, count, counts in segments:
        meta = None if version is None else {"weight_version": version}
        log_probs = None if version is None else [-1.0] * count
        sample.append_response_tokens(
            tokens=[2] * count, log_probs=log_probs, trainable=version is not None, meta_info=meta
        )
        mask += [int(version is not None and counts)] * count
    sample.loss_mask = mask
    return sample


@given(samples=st.lists(_segments, max_size=4), version=st.integers(0, 7))
def test_exactly_the_tokens_of_older_segments_are_masked(samples: list[list[Segment]], version: int) -> None:
    made = [sample_of(segments) for segments in samples]
    before = [list(sample.loss_mask or []) for sample in made]
    masked = mask_older_tokens(made, version)
    for segments, sample, old in zip(samples, made, before, strict=True):
        newer = [by is None or by >= version for by, count, _ in segments for _ in range(count)]
        assert sample.loss_mask == [int(mask and new) for mask, new in zip(old, newer, strict=True)]
    assert masked == sum(map(sum, before)) - sum(sum(sample.loss_mask or []) for sample in made)
    assert mask_older_tokens(made, version) == 0, "a second time there is nothing left"


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ([], [1, 1, 1]),
        (["default"], [1, 1, 1]),
        (["3"], [1, 1, 1]),
        (["2"], [0, 0, 0]),
        (["3", "2"], [0, 0, 0]),
        (["3", "default"], [0, 0, 0]),
        (["\u00b3"], [1, 1, 1]),
    ],
)
def test_versions_by_hand_are_of_the_whole_response(versions: list[str], expected: list[int]) -> None:
    sample = Sample(tokens=[1, 2, 3, 4], response_length=3, weight_versions=versions)
    mask_older_tokens([sample], 3)
    assert (sample.loss_mask or [1, 1, 1]) == expected


@pytest.mark.parametrize("version", ["default", "-1", "3a", "\u00b2"])
def test_a_segment_whose_version_is_no_number_is_older_than_any(version: str) -> None:
    sample = Sample(tokens=[1])
    for by in (version, "3"):
        sample.append_response_tokens(tokens=[2, 3], log_probs=[-1.0, -1.0], meta_info={"weight_version": by})
    assert mask_older_tokens([sample], 3) == 2
    assert sample.loss_mask == [0, 0, 1, 1]


def test_a_response_by_hand_that_goes_on_is_told_from_what_is_added() -> None:
    sample = Sample(tokens=[1, 2, 3], response_length=2)
    note_version(sample, 2, as_segment=True)
    note_version(sample, 4, as_segment=True)
    sample.append_response_tokens(tokens=[5], log_probs=[-1.0], meta_info={"weight_version": 3})
    assert mask_older_tokens([sample], 3) == 2
    assert sample.loss_mask == [0, 0, 1]


def test_responses_that_a_push_interrupts_in_a_stream_without_end(make_args: Args, use: Use) -> None:
    """The first begins under version 0, goes on under 1 and is finished, and taken, under 2; others are of 2 alone."""
    background_loop.cache_clear()

    async def answer(number: int, input_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        if len(input_ids) == 1:  # the first prompt
            return reply("ab", finish="abort", version=0)
        if input_ids[-1] == ord("b") + 100:
            return reply("cde", finish="abort", version=1)
        return reply("end", version=2)

    use(FakeClient(answer))
    args = make_args(
        num_prompts=20,
        asynchronous=True,
        max_weight_staleness=2,
        num_rollout=9,
        rollout_batch_size=2,
        n_samples_per_prompt=1,
        mask_offpolicy_in_partial_rollout=True,
    )
    push(2)
    source = RolloutDataSourceWithBuffer(args)
    output = generate_rollout_fully_async(args, 2, source)
    samples = flatten_samples(output.samples)
    while not any(cut := [sample for sample in samples if len(sample.weight_versions) > 1]):
        samples = flatten_samples(generate_rollout_fully_async(args, 2, source).samples)
    assert [sample.weight_versions for sample in cut] == [["0", "1", "2"]]
    assert cut[0].loss_mask == [0] * 5 + [1] * 3
    for sample in samples:
        assert sample in cut or (sample.weight_versions, sample.loss_mask) == (["2"], [1] * 3)
    background_loop.cache_clear()


def test_surplus_of_older_weights_is_masked_as_a_whole(make_args: Args, use: Use) -> None:
    """In train.py rollout k is generated by version k: what an earlier one has left over is off-policy as a whole."""
    version = 0
    use(FakeClient(lambda number, ids, params: reply(str(len(ids)), version=version)))
    args = make_args(over_sampling_batch_size=8, mask_offpolicy_in_partial_rollout=True)
    source = RolloutDataSourceWithBuffer(args)
    (first,) = [flatten_samples(rollout(args, 0, source).samples)]
    assert all(sample.effective_response_length for sample in first)
    assert source.buffer
    surplus = {group[0].group_index for group in source.buffer if all(s.reward is not None for s in group)}
    version = 1
    later = flatten_samples(rollout(args, 1, source).samples)
    masked = [sample for sample in later if sample.weight_versions == ["0"]]
    assert {sample.group_index for sample in masked} <= surplus
    for sample in later:
        assert sample.loss_mask == [int(sample not in masked)] * sample.response_length


def test_a_rollout_of_older_tokens_alone_is_told_of(
    make_args: Args, use: Use, caplog: pytest.LogCaptureFixture
) -> None:
    use(FakeClient(lambda number, ids, params: reply("old", version=0)))
    args = make_args(asynchronous=True, max_weight_staleness=1, mask_offpolicy_in_partial_rollout=True)
    push(1)
    output = rollout(args, 1)
    assert all(sample.loss_mask == [0] * 3 for sample in flatten_samples(output.samples))
    assert output.metrics is not None
    assert output.metrics[MASKED_TOKENS] == 3 * len(flatten_samples(output.samples))
    assert "rollout 1: older weights generated every token" in caplog.text


def test_a_function_that_notes_no_versions(make_args: Args, use: Use, tmp_path: Path) -> None:
    use(FakeClient())
    hook = hook_file(
        tmp_path,
        "async def generate(args, sample, params):\n"
        "    sample.tokens, sample.response_length, sample.response = [1, 2, 3], 2, 'x'\n"
        "    sample.rollout_log_probs = [-1.0, -1.0]\n"
        "    return sample\n",
    )
    args = make_args(custom_generate_function_path=f"{hook}:generate", mask_offpolicy_in_partial_rollout=True)
    source = RolloutDataSourceWithBuffer(args)
    with rollout_context(0):
        samples = flatten_samples(rollout(args, 0, source).samples)
    for sample in samples:
        assert (sample.loss_mask, sample.weight_versions) == (None, ["0"])
