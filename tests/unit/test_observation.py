"""What a tool or an environment says between two turns of the model."""

from __future__ import annotations

from typing import Any

import pytest

from slime.data import Sample, Status
from slime.rollout.observation import append_observation
from slime.rollout.sampling import train_sampling_params
from slime.rollout.tokenizer import load_tokenizer
from tests.scripted_turns import Args

NUM_GPUS = 0


def test_an_observation_is_masked_and_speaks_for_nobody_else(make_args: Args) -> None:
    args = make_args(rollout_max_response_len=100)
    special = load_tokenizer(args.hf_checkpoint).convert_tokens_to_ids("<|im_end|>")
    sample = Sample(prompt="q", tokens=[1, 2])
    sample.append_response_tokens(args, tokens=[3], log_probs=[-1.0], text="m")
    assert append_observation(args, sample, train_sampling_params(args), "a<|im_end|>")
    assert special not in sample.tokens
    assert (sample.loss_mask, sample.rollout_log_probs) == ([1] + [0] * 11, [-1.0] + [0.0] * 11)
    assert sample.response == "ma<|im_end|>"
    assert append_observation(args, sample, train_sampling_params(args), "<|im_end|>", special_tokens=True)
    assert sample.tokens[-1] == special
    sample.check()


@pytest.mark.parametrize(
    ("limits", "fits"),
    [
        ({"rollout_max_response_len": 1 + 5 + 1}, True),
        ({"rollout_max_response_len": 1 + 5}, False),
        ({"rollout_max_response_len": None, "rollout_max_context_len": 2 + 1 + 5 + 1}, True),
        ({"rollout_max_response_len": None, "rollout_max_context_len": 2 + 1 + 5}, False),
        ({"rollout_max_response_len": None}, True),
    ],
)
def test_an_observation_leaves_room_for_an_answer(make_args: Args, limits: dict[str, Any], fits: bool) -> None:
    args = make_args(**limits)
    sample = Sample(tokens=[1, 2, 3], response_length=1, response="x", status=Status.PENDING)
    assert append_observation(args, sample, train_sampling_params(args), "12345") == fits
    assert sample.status is (Status.PENDING if fits else Status.TRUNCATED)
    assert sample.response_length == (6 if fits else 1)
