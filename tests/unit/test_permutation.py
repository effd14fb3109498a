"""Tokens to experts and back, against Megatron's own functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_utils
from torch import Tensor

from slime.backends.megatron.layers import permutation

NUM_GPUS = 0
TOKENS, HIDDEN, EXPERTS = 21, 12, 6


def routing(topk: int) -> Tensor:
    """bool [tokens, experts]; one expert has no tokens, if that can be."""
    scores = torch.rand(TOKENS, EXPERTS)
    if topk < EXPERTS:
        scores[:, 2] = -1
    return torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, scores.topk(topk).indices, True)


def there_and_back(
    permute: Callable[..., Any], unpermute: Callable[..., Any], inputs: tuple[Tensor, ...], topk: int
) -> list[Tensor]:
    """Rows, their probabilities, tokens again; and gradients of tokens and probabilities."""
    tokens, probs, chosen, upstream = inputs
    tokens, probs = tokens.clone().requires_grad_(), probs.clone().requires_grad_()
    rows, of_rows, index, *_ = permute(tokens, chosen, probs=probs, num_out_tokens=TOKENS * topk)
    out = unpermute(rows * of_rows[:, None].to(rows.dtype), index, restore_shape=tokens.shape, routing_map=chosen)
    out.backward(upstream)
    assert tokens.grad is not None
    assert probs.grad is not None
    return [rows.detach(), of_rows.detach(), index, out.detach(), tokens.grad, probs.grad]


@pytest.mark.parametrize("topk", [1, 3, EXPERTS])
def test_same_as_megatron(topk: int) -> None:
    inputs = torch.randn(TOKENS, HIDDEN), torch.rand(TOKENS, EXPERTS), routing(topk), torch.randn(TOKENS, HIDDEN)
    got = there_and_back(permutation.permute, permutation.unpermute, inputs, topk)
    want = there_and_back(moe_utils.permute, moe_utils.unpermute, inputs, topk)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_sums_of_bfloat16_are_rounded_once() -> None:
    tokens, probs, chosen = torch.randn(TOKENS, HIDDEN), torch.rand(TOKENS, EXPERTS), routing(5)
    rows, _, index, *_ = permutation.permute(tokens.bfloat16(), chosen, probs=probs, num_out_tokens=TOKENS * 5)
    rows = torch.randn_like(rows)
    out = permutation.unpermute(rows, index, restore_shape=tokens.shape)
    want = torch.zeros(TOKENS, HIDDEN).index_add(0, index, rows.float())
    assert torch.equal(out, want.bfloat16())


def test_megatron_drops_tokens_itself() -> None:
    """With a capacity the numbers of rows differ between tokens."""
    chosen = routing(2)
    chosen[3] = False
    inputs = torch.randn(TOKENS, HIDDEN), torch.rand(TOKENS, EXPERTS), chosen, torch.randn(TOKENS, HIDDEN)

    def counted(permute: Any) -> Any:
        return lambda tokens, chosen, probs, num_out_tokens: permute(
            tokens, chosen, probs=probs, num_out_tokens=chosen.sum()
        )

    got = there_and_back(counted(permutation.permute), permutation.unpermute, inputs, 2)
    want = there_and_back(counted(moe_utils.permute), moe_utils.unpermute, inputs, 2)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
