"""slime.algorithms.advantages against float64 loops over the tokens of each response, written from the papers."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime.algorithms.advantages import (
    discounted_sums,
    gae,
    group_relative,
    reinforce_plus_plus,
    whiten,
    whitening_sums,
)

NUM_GPUS = 0


def make_mask(rng: np.random.Generator) -> Tensor:
    """Left-aligned responses of length 1 to N with holes; one row of a single token, one with all of its tokens masked,
    one with none, one that ends in masked tokens; other rows at random."""
    length = int(rng.integers(4, 70))
    mask = rng.integers(0, 2, size=(int(rng.integers(5, 9)), length)).astype(np.uint8)
    for row in mask:
        row[int(rng.integers(1, length + 1)) :] = 0
    mask[0] = np.arange(length) == 0
    mask[1] = 0
    mask[2] = 1
    mask[3, -2:] = 0
    mask[3, 0] = 1
    mask[4] = np.arange(length) == length - 1
    return torch.from_numpy(rng.permuted(mask, axis=0) if rng.integers(2) else mask)


def make_inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rewards with ties [R], values, mask, KL [R, N]; garbage in values and KL where the mask is 0."""
    mask = make_mask(np.random.default_rng())
    rewards = torch.randint(-1, 3, (len(mask),)).to(dtype)
    values, kl = torch.randn(2, *mask.shape, dtype=dtype)
    return rewards, torch.where(mask.bool(), values, 1e30), mask, torch.where(mask.bool(), kl, -1e30)


def chosen(mask: Tensor, row: int) -> list[int]:
    return [t for t in range(mask.shape[1]) if mask[row, t] != 0]


def plain_token_rewards(reward: float, kl: list[float], kl_coef: float) -> list[float]:
    rewards = [-kl_coef * value for value in kl]
    if rewards:
        rewards[-1] += reward
    return rewards


@pytest.mark.parametrize("discount", [0.0, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 8, 61])
def test_discounted_sums(length: int, discount: float) -> None:
    x = torch.randn(3, length, dtype=torch.float64)
    before = x.clone()
    got = discounted_sums(x, discount)
    assert torch.equal(x, before)
    for row in range(3):
        for t in range(length):
            want = math.fsum(discount ** (k - t) * x[row, k].item() for k in range(t, length))
            assert got[row, t].item() == pytest.approx(want, rel=1e-10, abs=1e-12)


def test_discounted_sums_of_long_rows_keep_float32_precision() -> None:
    x = torch.randn(2, 20_000)
    torch.testing.assert_close(
        discounted_sums(x, 1.0).double(), x.double().flip(1).cumsum(1).flip(1), rtol=0, atol=1e-3
    )


@pytest.mark.parametrize("kl_coef", [None, 0.3])
def test_group_relative(kl_coef: float | None) -> None:
    rewards, _, mask, kl = make_inputs()
    got = group_relative(rewards, mask) if kl_coef is None else group_relative(rewards, mask, kl, kl_coef)
    for i, t in np.ndindex(*mask.shape):
        want = rewards[i].item() - (kl_coef or 0.0) * kl[i, t].item() if mask[i, t] else 0.0
        assert got[i, t].item() == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
def test_reinforce_plus_plus_discounts_over_the_tokens_of_the_loss(gamma: float, kl_coef: float) -> None:
    rewards, _, mask, kl = make_inputs()
    got = reinforce_plus_plus(rewards, mask, kl if kl_coef else None, kl_coef=kl_coef, gamma=gamma)
    want = torch.zeros(mask.shape, dtype=torch.float64)
    for i in range(len(mask)):
        tokens = chosen(mask, i)
        rho = plain_token_rewards(rewards[i].item(), [kl[i, t].item() for t in tokens], kl_coef)
        for k, t in enumerate(tokens):
            want[i, t] = math.fsum(gamma ** (j - k) * rho[j] for j in range(k, len(rho)))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (1.0, 0.5)])
@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
def test_gae(gamma: float, lambd: float, kl_coef: float) -> None:
    rewards, values, mask, kl = make_inputs()
    advantages, returns = gae(rewards, values, mask, kl if kl_coef else None, kl_coef=kl_coef, gamma=gamma, lambd=lambd)
    want = torch.zeros(2, *mask.shape, dtype=torch.float64)
    for i in range(len(mask)):
        tokens = chosen(mask, i)
        rho = plain_token_rewards(rewards[i].item(), [kl[i, t].item() for t in tokens], kl_coef)
        v = [values[i, t].item() for t in tokens] + [0.0]
        delta = [rho[k] + gamma * v[k + 1] - v[k] for k in range(len(tokens))]
        for k, t in enumerate(tokens):
            want[0, i, t] = math.fsum((gamma * lambd) ** (j - k) * delta[j] for j in range(k, len(delta)))
            want[1, i, t] = want[0, i, t] + v[k]
    torch.testing.assert_close(advantages, want[0], rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(returns, want[1], rtol=1e-10, atol=1e-11)


def test_gae_with_lambda_one_returns_the_discounted_rewards_whatever_the_values() -> None:
    rewards, values, mask, kl = make_inputs()
    _, returns = gae(rewards, values, mask, kl, kl_coef=0.1, gamma=0.97, lambd=1.0)
    torch.testing.assert_close(returns, reinforce_plus_plus(rewards, mask, kl, kl_coef=0.1, gamma=0.97))


def test_the_terminal_reward_reaches_the_last_token_of_every_length() -> None:
    lengths = torch.arange(1, 70)
    mask = (torch.arange(80) < lengths[:, None]).float()
    rewards = torch.randn(len(lengths))
    _, returns = gae(rewards, torch.randn(mask.shape), mask, kl_coef=0.0, gamma=1.0, lambd=0.0)
    torch.testing.assert_close(returns[torch.arange(len(lengths)), lengths - 1], rewards)


@pytest.mark.parametrize("shape", [(3, 5), (3, 0), (0, 5)])
def test_nothing_to_train_on_gives_zeros(shape: tuple[int, int]) -> None:
    rewards, values, mask = torch.ones(shape[0]), torch.ones(shape), torch.zeros(shape)
    results = [
        group_relative(rewards, mask, values, 1.0),
        reinforce_plus_plus(rewards, mask, values, kl_coef=1.0, gamma=0.9),
        *gae(rewards, values, mask, values, kl_coef=1.0, gamma=0.9, lambd=0.9),
    ]
    for result in results:
        assert torch.equal(result, torch.zeros(shape))


def test_padding_and_masked_tokens_change_no_bit() -> None:
    rewards, values, mask, kl = make_inputs(torch.float32)

    def results(values: Tensor, mask: Tensor, kl: Tensor) -> list[Tensor]:
        return [
            group_relative(rewards, mask, kl, 0.1),
            reinforce_plus_plus(rewards, mask, kl, kl_coef=0.1, gamma=0.99),
            *gae(rewards, values, mask, kl, kl_coef=0.1, gamma=0.99, lambd=0.95),
        ]

    extra = int(torch.randint(1, 200, ()))
    padded = [torch.nn.functional.pad(x, (0, extra), value=7) for x in (values, kl)]
    wide = results(padded[0], torch.nn.functional.pad(mask, (0, extra)), padded[1])
    spread = [torch.stack([x, torch.full_like(x, 3)], 2).flatten(1) for x in (values, kl)]
    sparse = results(spread[0], torch.stack([mask, torch.zeros_like(mask)], 2).flatten(1), spread[1])
    for got, padded_got, sparse_got in zip(results(values, mask, kl), wide, sparse, strict=True):
        assert got.dtype is torch.float32
        assert torch.equal(got, padded_got[:, : mask.shape[1]])
        assert torch.equal(got, sparse_got[:, ::2])
        assert not padded_got[:, mask.shape[1] :].any()
        assert not got[mask == 0].any()


def test_float32_is_close_to_float64() -> None:
    rewards, values, mask, kl = make_inputs(torch.float32)
    got = gae(rewards, values, mask, kl, kl_coef=0.1, gamma=1.0, lambd=0.95)
    want = gae(rewards.double(), values.double(), mask, kl.double(), kl_coef=0.1, gamma=1.0, lambd=0.95)
    for single, double in zip(got, want, strict=True):
        assert single.dtype is torch.float32
        torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-5)


finite = st.floats(-1e3, 1e3, width=32)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(finite, st.booleans(), st.integers(0, 3)), min_size=1, max_size=60))
def test_whitening_over_ranks(entries: list[tuple[float, bool, int]]) -> None:
    x = torch.tensor([value if keep else math.nan for value, keep, _ in entries])
    mask = torch.tensor([keep for _, keep, _ in entries], dtype=torch.uint8)
    rank = torch.tensor([r for _, _, r in entries])
    sums = sum((whitening_sums(x[rank == r], mask[rank == r]) for r in range(4)), torch.zeros(3, dtype=torch.float64))
    values = [value for value, keep, _ in entries if keep]
    if not values:
        with pytest.raises(ValueError, match="cannot be whitened: every token of the step is masked"):
            whiten(x, mask, sums)
        return
    got = torch.cat([whiten(x[rank == r], mask[rank == r], sums) for r in range(4)])
    mean = statistics.fmean(values)
    variance = statistics.variance(values) if len(values) > 1 else 0.0
    of_rank = [entry for r in range(4) for entry in entries if entry[2] == r]
    for result, (value, keep, _) in zip(got.tolist(), of_rank, strict=True):
        # A variance as small as what rounding leaves of the squares is uncertain by as much.
        uncertain = 1e-14 * mean * mean + 1e-5 * variance
        low, high = ((value - mean) / math.sqrt(max(variance + d, 0) + 1e-8) for d in (uncertain, -uncertain))
        assert min(low, high) - 1e-5 <= result <= max(low, high) + 1e-5 if keep else result == 0


def test_whitened_entries_have_mean_zero_and_unbiased_variance_one() -> None:
    x, mask = 5 + 3 * torch.randn(40, 30), torch.randint(0, 2, (40, 30))
    white = whiten(x, mask, whitening_sums(x, mask))[mask.bool()].double()
    assert white.mean().item() == pytest.approx(0, abs=1e-6)
    assert white.var(correction=1).item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.1, -3.7e4])
@pytest.mark.parametrize("count", [1, 3, 1000])
def test_equal_entries_whiten_to_about_zero(value: float, count: int) -> None:
    x, mask = torch.full((1, count), value), torch.ones(1, count)
    white = whiten(x, mask, whitening_sums(x, mask))
    assert white.dtype is torch.float32
    assert torch.isfinite(white).all()
    assert white.abs().max().item() < 1e-3
    if count == 1:
        assert white.item() == 0
