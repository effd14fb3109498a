"""What a sample does with an engine's reply: the values that users of `append_response_tokens` rely on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slime.data import PrefixCacheInfo, Sample, SpecInfo, Status

NUM_GPUS = 0
META = {
    "weight_version": 3,
    "finish_reason": {"type": "stop"},
    "prompt_tokens": 10,
    "cached_tokens": 4,
    "completion_tokens": 6,
    "spec_verify_ct": 2,
}


def prompt(**fields: object) -> Sample:
    return Sample(tokens=[7, 8], **fields)  # type: ignore[arg-type]


def test_lists_grow_in_place() -> None:
    """Upstream's retool keeps ``sample.loss_mask`` and hands it back."""
    sample = prompt(loss_mask=[], rollout_log_probs=[])
    held = sample.tokens, sample.loss_mask, sample.rollout_log_probs
    sample.append_response_tokens(tokens=[1, 2], log_probs=[-1.0, -2.0], meta_info=META)
    sample.append_response_tokens(tokens=[3], trainable=False)
    assert held == ([7, 8, 1, 2, 3], [1, 1, 0], [-1.0, -2.0, 0.0])
    assert sample.tokens is held[0]
    assert sample.loss_mask is held[1]
    assert sample.rollout_log_probs is held[2]


def test_samples_made_of_one_list_do_not_share_it() -> None:
    tokens = [1]
    parts = [Sample(tokens=tokens, loss_mask=None) for _ in range(2)]
    parts[0].append_response_tokens(tokens=[2], log_probs=[-1.0])
    assert (parts[0].tokens, parts[1].tokens, tokens) == ([1, 2], [1], [1])


@pytest.mark.parametrize("tokens", [[], None])
def test_a_reply_without_tokens(tokens: list[int] | None) -> None:
    sample = prompt()
    sample.append_response_tokens(tokens=tokens, meta_info=META | {"finish_reason": {"type": "abort"}})
    assert (sample.status, sample.response_length, sample.weight_versions) == (Status.ABORTED, 0, [])
    assert sample.prefix_cache_info.total_prompt_tokens == 10


def test_tokens_may_be_left_out() -> None:
    sample = prompt()
    sample.append_response_tokens(meta_info=META, text="")
    assert (sample.tokens, sample.loss_mask, sample.status) == ([7, 8], [], Status.COMPLETED)


@pytest.mark.parametrize("form", [torch.tensor, np.array, tuple])
def test_tokens_of_any_kind_become_ints(form: type) -> None:
    sample = prompt()
    sample.append_response_tokens(tokens=form([4, 5]), log_probs=form([-0.5, -1.5]))
    assert sample.tokens == [7, 8, 4, 5]
    assert sample.rollout_log_probs == [-0.5, -1.5]
    assert {type(token) for token in sample.tokens} == {int}
    assert {type(value) for value in sample.rollout_log_probs} == {float}


def test_tokens_that_a_hook_set_as_an_array_become_a_list() -> None:
    sample = prompt()
    sample.tokens = np.array([7, 8])  # type: ignore[assignment]
    sample.append_response_tokens(tokens=[1], log_probs=[-1.0])
    assert sample.tokens == [7, 8, 1]


@pytest.mark.parametrize("names", [("spec_accept_token_num", "spec_draft_token_num"),
                                   ("spec_num_correct_drafts", "spec_num_proposed_drafts")])  # fmt: skip
def test_counters_are_added_by_either_release_s_names(names: tuple[str, str]) -> None:
    sample = prompt()
    for _ in range(2):
        sample.append_response_tokens(
            tokens=[1], log_probs=[-1.0], meta_info=META | dict(zip(names, (3, 4), strict=True))
        )
    assert sample.spec_info == SpecInfo(6, 8, 4, 12)
    assert sample.prefix_cache_info == PrefixCacheInfo(8, 20)
    assert (sample.spec_info.spec_accept_rate, sample.spec_info.spec_accept_length) == (0.75, 3.0)
    assert sample.prefix_cache_info.prefix_cache_hit_rate == 0.4


def test_counters_without_requests() -> None:
    assert (SpecInfo().spec_accept_rate, SpecInfo().spec_accept_length) == (0.0, 0.0)
    assert PrefixCacheInfo().prefix_cache_hit_rate == 0.0
    info = SpecInfo(1, 2, 3, 4)
    assert SpecInfo.from_dict(info.to_dict()) == info
    assert PrefixCacheInfo.from_dict(PrefixCacheInfo(1, 2).to_dict()) == PrefixCacheInfo(1, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"tokens": [1, 2], "log_probs": [-1.0]}, "2 trainable tokens need as many log-probs, got 1"),
        ({"tokens": [1]}, "1 trainable tokens need as many log-probs, got none"),
        ({"log_probs": [-1.0]}, "0 trainable tokens need as many log-probs, got 1"),
    ],
)
def test_a_refused_call_changes_nothing(call: dict[str, object], message: str) -> None:
    sample = prompt()
    before = sample.to_dict()
    with pytest.raises(ValueError, match=message):
        sample.append_response_tokens(**call, meta_info=META)  # type: ignore[arg-type]
    assert sample.to_dict() == before


@pytest.mark.parametrize(
    ("meta", "fields", "error"),
    [
        ({"cached_tokens": "many"}, {}, TypeError),
        ({}, {"teacher_log_probs": []}, ValueError),
        ({}, {"response_length": 3, "loss_mask": [], "rollout_log_probs": []}, ValueError),
        ({}, {"response": None}, TypeError),
    ],
)
def test_a_call_that_fails_changes_nothing(
    meta: dict[str, object], fields: dict[str, object], error: type[Exception]
) -> None:
    sample = prompt(**fields)
    before = sample.to_dict()
    with pytest.raises(error):
        sample.append_response_tokens(tokens=[1], log_probs=[-1.0], text="x", meta_info=META | meta)
    assert sample.to_dict() == before


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("stop", Status.COMPLETED),
        ("length", Status.TRUNCATED),
        ({"type": "length", "length": 5}, Status.TRUNCATED),
        ("abort", Status.ABORTED),
        ("content_filter", Status.PENDING),
        ("", Status.PENDING),
        (None, Status.PENDING),
        ({}, Status.PENDING),
    ],
)
def test_finish_reasons_of_either_interface(reason: object, status: Status) -> None:
    sample = prompt()
    sample.append_response_tokens(tokens=[1], log_probs=[-1.0], meta_info={"finish_reason": reason})
    assert (sample.status, sample.tokens) == (status, [7, 8, 1])


def test_log_probs_of_what_a_tool_said_are_not_read() -> None:
    sample = prompt()
    sample.append_response_tokens(tokens=[1, 2], log_probs=[-1.0, -2.0], trainable=False)
    assert (sample.rollout_log_probs, sample.loss_mask) == ([0.0, 0.0], [0, 0])


def test_a_dict_is_of_the_moment() -> None:
    """Checkpoints are written while other samples go on."""
    sample = prompt(loss_mask=[], rollout_log_probs=[])
    before = sample.to_dict()
    sample.append_response_tokens(tokens=[1], log_probs=[-1.0], meta_info=META)
    assert (before["tokens"], before["loss_mask"], before["weight_versions"]) == ([7, 8], [], [])
