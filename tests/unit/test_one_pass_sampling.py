"""Which requests the sampler of one pass takes, and what it leaves to SGLang's; its kernel is in tests/gpu."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.backends.sglang import sampling

NUM_GPUS = 0
PLAIN: dict[str, Any] = {
    "need_top_p_sampling": False,
    "need_top_k_sampling": False,
    "need_min_p_sampling": False,
    "return_sampling_masks": None,
    "is_all_greedy": False,
    "sampling_seed": None,
}


class SglangsSampler:
    """As far as ours is concerned."""

    synced: list[Tensor]

    def forward(self, logits_output: Any, *_: Any) -> Tensor:
        logits_output.next_token_logprobs = torch.full((2,), -math.inf)
        return torch.tensor([9, 9])

    def _preprocess_logits(self, logits: Tensor, sampling_info: Any) -> Tensor:
        return logits + 1

    def _sync_token_ids_across_tp(self, tokens: Tensor, sampling_info: Any) -> None:
        self.synced.append(tokens)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    made: dict[str, Any] = {}
    module = SimpleNamespace(
        Sampler=SglangsSampler,
        SGLANG_RETURN_ORIGINAL_LOGPROB=False,
        register_sampler_backend=made.__setitem__,
        is_dp_attention_enabled=lambda: False,
        get_parallel=lambda: SimpleNamespace(attn_dp_rank=3),
    )
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.sampler", module)
    sampling.register(
        lambda logits, temperatures, stream: (logits.argmax(-1).int(), (logits / temperatures).amax(-1) + stream)
    )
    return made | {"module": module}


def forward(
    registered: dict[str, Any], asked: tuple[bool, list[int], list[Any]] = (True, [0, 0], [None, None]), **changes: Any
) -> tuple[list[int], Any, int]:
    """Tokens, their log-probs, and how often they were synced."""
    sampler = registered["pytorch"]()
    sampler.synced = []
    output = SimpleNamespace(next_token_logits=torch.tensor([[0.0, 3.0], [5.0, 1.0]]), next_token_logprobs=None)
    info = SimpleNamespace(temperatures=torch.full((2, 1), 2.0), **(PLAIN | changes))
    tokens = sampler.forward(output, info, *asked, torch.zeros(2))
    found = output.next_token_logprobs
    return tokens.tolist(), None if found is None else found.tolist(), len(sampler.synced)


def test_plain_requests_are_drawn_in_one_pass_under_either_name(registered: dict[str, Any]) -> None:
    assert registered["pytorch"] is registered["flashinfer"]
    assert forward(registered) == ([1, 0], [2.0, 3.0], 1)
    assert forward(registered, (False, [0, 0], [None, None])) == ([1, 0], None, 1)
    assert forward(registered, (False, [5, 0], [[1], None])) == ([1, 0], None, 1)
    assert forward(registered, return_sampling_masks=[False, False]) == ([1, 0], [2.0, 3.0], 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"need_top_p_sampling": True},
        {"need_top_k_sampling": True},
        {"need_min_p_sampling": True},
        {"return_sampling_masks": [False, True]},
        {"is_all_greedy": True},
        {"sampling_seed": torch.tensor([1, 2])},
        {"asked": (True, [0, 3], [None, None])},
        {"asked": (True, [0, 0], [None, [1, 2]])},
    ],
    ids=str,
)
def test_all_else_is_sglangs(changes: dict[str, Any], registered: dict[str, Any]) -> None:
    assert forward(registered, **changes) == ([9, 9], [-math.inf, -math.inf], 0)


def test_ranks_that_attend_for_requests_of_their_own_draw_by_themselves(registered: dict[str, Any]) -> None:
    registered["module"].is_dp_attention_enabled = lambda: True
    assert forward(registered) == ([1, 0], [5.0, 6.0], 1)


def test_log_probs_before_temperatures_are_sglangs(registered: dict[str, Any]) -> None:
    registered["module"].SGLANG_RETURN_ORIGINAL_LOGPROB = True
    assert forward(registered)[0] == [9, 9]
