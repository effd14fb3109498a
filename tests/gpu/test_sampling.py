"""Sampling in one pass against torch's softmax in float64: what is drawn how often, and its log-probs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from slime.utils import device

NUM_GPUS = 1
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not device.is_cuda(), reason="needs a CUDA device")]
if device.is_cuda():
    from slime.backends.sglang.sampling_kernel import sample
_DRAWS = 4096


def draws_of(logits: Tensor, temperature: float, times: int) -> Tensor:
    """Tokens drawn ``_DRAWS`` x ``times`` times from one distribution."""
    rows = logits.expand(_DRAWS, -1).contiguous()
    temperatures = torch.full((_DRAWS, 1), temperature, device="cuda")
    return torch.cat([sample(rows, temperatures)[0] for _ in range(times)]).long()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "vocabulary"), [(256, 151_936), (1, 32_000), (7, 4096), (33, 4097), (3, 100), (0, 50)]
)
def test_log_probs_are_those_of_what_is_drawn(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(rows, vocabulary, device="cuda") * 4).to(dtype)
    logits[:, 5:9] = -math.inf
    temperatures = torch.rand(rows, 1, device="cuda") + 0.3
    before = logits.clone()
    tokens, log_probs = sample(logits, temperatures)
    assert (tokens.dtype, log_probs.dtype, tuple(tokens.shape)) == (torch.int32, torch.float32, (rows,))
    assert torch.equal(logits, before)
    assert not torch.isin(tokens, torch.arange(5, 9, device="cuda")).any()
    exact = torch.log_softmax(logits.double() / temperatures.double(), -1).gather(1, tokens.long()[:, None])[:, 0]
    torch.testing.assert_close(log_probs.double(), exact, rtol=1e-6, atol=5e-6)


def test_tokens_are_drawn_as_often_as_their_probabilities_say() -> None:
    """64 tokens across a large vocabulary, of 0.3 down to 1e-4, by Pearson's statistic; and no other."""
    logits = torch.full((151_936,), -math.inf, device="cuda")
    places = torch.randperm(151_936, device="cuda")[:64].sort().values
    logits[places] = torch.linspace(0, 8, 64, device="cuda")[torch.randperm(64, device="cuda")]
    tokens = draws_of(logits, 0.9, 64)
    assert torch.isin(tokens, places).all()
    expected = torch.softmax(logits[places].double() / 0.9, 0) * len(tokens)
    found = torch.bincount(tokens, minlength=151_936)[places].double()
    statistic = float(((found - expected) ** 2 / expected).sum())
    # Of 63 degrees of freedom: its mean and six standard deviations on either side.
    assert abs(statistic - 63) < 6 * math.sqrt(2 * 63)


def test_unlikely_tokens_are_not_left_out() -> None:
    """150,000 tokens of 2e-7 each, together 0.03, beside a likely one."""
    logits = torch.zeros(150_001, device="cuda")
    logits[777] = math.log(150_000 / 0.03)
    tokens = draws_of(logits, 1.0, 64)
    unlikely = tokens[tokens != 777]
    expected = len(tokens) * 0.03 / 1.03
    assert abs(len(unlikely) - expected) < 6 * math.sqrt(expected)
    # Spread over all of them: hardly one twice.
    assert len(unlikely.unique()) > 0.9 * len(unlikely)
    quarters = torch.bincount(unlikely * 4 // 150_001, minlength=4).double()
    assert bool(((quarters - expected / 4).abs() < 6 * math.sqrt(expected / 4)).all())


def test_draws_differ_and_come_again_with_the_generator_s_state() -> None:
    logits = torch.randn(64, 151_936, device="cuda")
    temperatures = torch.ones(64, 1, device="cuda")
    torch.manual_seed(3)
    first, second = sample(logits, temperatures), sample(logits, temperatures)
    assert not torch.equal(first[0], second[0])
    torch.manual_seed(3)
    again = sample(logits, temperatures)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    same = sample(logits[:1].expand(64, -1).contiguous(), temperatures)[0]
    assert len(same.unique()) > 32  # rows draw numbers of their own
    torch.manual_seed(3)
    assert not torch.equal(first[0], sample(logits, temperatures, 1)[0])


def test_the_only_token_that_is_allowed_is_drawn_always() -> None:
    """Whatever the numbers: 6 million draws have some of the largest ones."""
    logits = torch.full((_DRAWS, 1500), -math.inf, device="cuda")
    logits[:, 1234] = 0.5
    tokens, log_probs = sample(logits, torch.ones(_DRAWS, 1, device="cuda"))
    assert bool((tokens == 1234).all())
    assert bool((log_probs == 0).all())
