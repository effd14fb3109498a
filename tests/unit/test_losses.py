"""slime.algorithms.losses and weights against plain float64 loops over fresh random inputs, values and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from slime.algorithms.losses import (
    KL_ESTIMATORS,
    cispo_loss,
    kl_estimate,
    opsm_keep,
    policy_loss,
    token_weights,
    value_loss,
)

NUM_GPUS = 0


def make_rows() -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Row of each token, loss mask (one row of a single loss token, one without any), and the mean over rows."""
    lengths = torch.randint(1, 20, (8,))
    lengths[0] = 1
    row = torch.repeat_interleave(torch.arange(8), lengths)
    mask = torch.randint(0, 2, row.shape)
    mask[row == 0] = 1
    mask[row == 1] = 0
    counts = torch.zeros(8, dtype=torch.int64).index_add(0, row, mask)

    def row_mean(x: Tensor) -> Tensor:
        return (torch.zeros(8, dtype=x.dtype).index_add(0, row, x * mask) / counts.clamp(min=1))[row]

    return row, mask, row_mean


def plain_row_means(values: Tensor, row: Tensor, mask: Tensor) -> list[float]:
    """The mean over the loss tokens of each token's row."""
    means = []
    for r in row.tolist():
        of_row = [values[t].item() for t in range(len(row)) if row[t] == r and mask[t]]
        means.append(math.fsum(of_row) / len(of_row) if of_row else 0.0)
    return means


def plain_policy_loss(
    log_ratio: float, advantage: float, low: float, high: float, dual: float | None
) -> tuple[float, float, bool]:
    """Loss, its derivative by ``log_ratio``, and whether the clip decides, of one token."""
    ratio = math.exp(log_ratio)
    inside = 1 - low <= ratio <= 1 + high
    free, bound = -ratio * advantage, -min(max(ratio, 1 - low), 1 + high) * advantage
    clipped = bound > free
    loss, slope = (bound, 0.0) if clipped and not inside else (free, -ratio * advantage)
    if dual is not None and advantage < 0 and loss > -dual * advantage:
        loss, slope = -dual * advantage, 0.0
    return loss, slope, clipped


@pytest.mark.parametrize(
    ("low", "high", "dual"), [(0.2, None, None), (0.2, 0.28, None), (0.1, 0.3, 3.0), (0.2, 0.2, 1.01)]
)
def test_policy_loss_and_gradient(low: float, high: float | None, dual: float | None) -> None:
    log_ratio = (0.7 * torch.randn(40, 5, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(40, 5, dtype=torch.float64)
    loss, clipped = policy_loss(log_ratio, advantages, eps_clip=low, eps_clip_high=high, eps_clip_c=dual)
    loss.sum().backward()
    assert log_ratio.grad is not None
    assert clipped.any()
    assert not clipped.all()
    for i in np.ndindex(40, 5):
        values = (log_ratio[i].item(), advantages[i].item())
        want, slope, was_clipped = plain_policy_loss(*values, low, low if high is None else high, dual)
        assert loss[i].item() == pytest.approx(want, rel=1e-10)
        assert log_ratio.grad[i].item() == pytest.approx(slope, rel=1e-10, abs=1e-12)
        assert clipped[i].item() == was_clipped


def test_gspo_is_the_clipped_loss_of_the_sequence_ratio() -> None:
    row, mask, row_mean = make_rows()
    log_ratio = (0.5 * torch.randn(len(row), dtype=torch.float64)).requires_grad_()
    advantages, weights = torch.randn(8, dtype=torch.float64)[row], torch.rand(len(row), dtype=torch.float64) * mask
    loss, clipped = policy_loss(row_mean(log_ratio), advantages, eps_clip=0.1, eps_clip_high=0.2)
    (loss * weights).sum().backward()
    assert log_ratio.grad is not None
    slope_of_row = [0.0] * 8
    for t, mean in enumerate(plain_row_means(log_ratio.detach(), row, mask)):
        want, slope, was_clipped = plain_policy_loss(mean, advantages[t].item(), 0.1, 0.2, None)
        assert loss[t].item() == pytest.approx(want, rel=1e-10)
        assert clipped[t].item() == was_clipped
        slope_of_row[row[t]] += slope * weights[t].item()
    for t, r in enumerate(row.tolist()):
        want = slope_of_row[r] / int(mask[row == r].sum()) if mask[t] else 0.0
        assert log_ratio.grad[t].item() == pytest.approx(want, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("low", "high"), [(0.2, None), (1.0, 0.28), (0.1, 4.0)])
def test_cispo_keeps_the_gradient_of_every_token(low: float, high: float | None) -> None:
    lp = torch.randn(200, dtype=torch.float64, requires_grad=True)
    old = lp.detach() + torch.randn(200, dtype=torch.float64)
    advantages = torch.randn(200, dtype=torch.float64)
    loss, clipped = cispo_loss(lp, lp - old, advantages, eps_clip=low, eps_clip_high=high)
    loss.sum().backward()
    assert lp.grad is not None
    for i in range(200):
        ratio = math.exp(lp[i].item() - old[i].item())
        weight = max(1 - low, min(ratio, 1 + (low if high is None else high)))
        slope = -weight * advantages[i].item()
        assert lp.grad[i].item() == pytest.approx(slope, rel=1e-10)
        assert loss[i].item() == pytest.approx(slope * lp[i].item(), rel=1e-10)
        assert clipped[i].item() == (abs(weight - ratio) > 1e-12)
    assert clipped.any()


@pytest.mark.parametrize("advantage", [1.3, -0.7])
@pytest.mark.parametrize("log_ratio", [0.2, -0.2])
def test_a_ratio_on_the_bound_is_not_clipped(log_ratio: float, advantage: float) -> None:
    """Its loss, and its whole gradient, are those of the ratio."""
    ratio = math.exp(log_ratio)
    clips = {"eps_clip": max(1.0 - ratio, 0.0), "eps_clip_high": max(ratio - 1.0, 0.0)}
    assert ratio in (1.0 - clips["eps_clip"], 1.0 + clips["eps_clip_high"])
    leaf = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    assert leaf.exp().item() == ratio
    loss, clipped = policy_loss(leaf, torch.tensor([advantage], dtype=torch.float64), **clips)
    loss.backward()
    assert leaf.grad is not None
    assert loss.item() == leaf.grad.item() == -ratio * advantage
    assert not clipped
    _, clipped = cispo_loss(leaf, leaf, torch.tensor([advantage], dtype=torch.float64), **clips)
    assert not clipped


def test_off_policy_sequences_of_negative_advantage_are_masked() -> None:
    row, mask, row_mean = make_rows()
    log_ratio = torch.randn(len(row), dtype=torch.float64, requires_grad=True)
    advantages = torch.randn(len(row), dtype=torch.float64)
    means = plain_row_means(log_ratio.detach(), row, mask)
    delta = sorted(-m for m in means)[len(means) // 2] + 1e-9
    keep = opsm_keep(log_ratio, advantages, row_mean, delta)
    assert not keep.requires_grad
    assert keep.dtype is torch.float64
    want = [0.0 if advantages[t] < 0 and -means[t] > delta else 1.0 for t in range(len(row))]
    assert keep.tolist() == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_policy_losses_are_exact(dtype: torch.dtype) -> None:
    row, _, row_mean = make_rows()
    lp = torch.randn(len(row)).to(dtype).float().requires_grad_()
    advantages = torch.randn(len(row))
    log_ratio = lp - lp.detach()
    loss, clipped = policy_loss(log_ratio, advantages, eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=3.0)
    loss.sum().backward()
    assert torch.equal(loss, -advantages)
    assert lp.grad is not None
    assert torch.equal(lp.grad, -advantages)
    assert not clipped.any()
    loss, clipped = policy_loss(row_mean(log_ratio), advantages, eps_clip=3e-4)
    assert torch.equal(loss, -advantages)
    assert not clipped.any()
    loss, clipped = cispo_loss(lp, log_ratio, advantages, eps_clip=0.2, eps_clip_high=0.28)
    assert torch.equal(loss, -advantages * lp)
    assert not clipped.any()
    assert (opsm_keep(log_ratio, advantages, row_mean, 0.0) == 1).all()


@pytest.mark.parametrize("size", [25.0, 500.0, 1e4])
def test_masked_tokens_far_off_policy_add_nothing_and_stay_finite(size: float) -> None:
    lp = (size * torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])).requires_grad_()
    advantages = torch.tensor([-3.0, -3.0, 3.0, 3.0, 0.0, 0.0])
    zeros = torch.zeros(6)
    losses = [
        policy_loss(lp, advantages, eps_clip=0.2)[0],
        policy_loss(lp, advantages, eps_clip=0.2, eps_clip_c=3.0)[0],
        policy_loss(lp, advantages, eps_clip=0.2)[0],
        cispo_loss(lp, lp, advantages, eps_clip=0.2)[0],
        value_loss(lp, zeros, advantages, value_clip=0.2)[0],
    ]
    losses += [kl_estimate(lp, zeros, kind) for kind in KL_ESTIMATORS]
    losses += [kl_estimate(lp, zeros, kind, sign * lp) for kind in KL_ESTIMATORS for sign in (1, -1)]
    for loss in losses:
        assert torch.isfinite(loss).all()
        assert (loss * 0).sum() == 0
        (gradient,) = torch.autograd.grad((loss * torch.tensor([0, 1, 1, 0, 1, 1])).sum(), lp, retain_graph=True)
        assert torch.isfinite(gradient).all()
        assert gradient[0] == 0
        assert gradient[3] == 0


def test_dual_clip_below_one_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"--eps-clip-c must be above 1, got 0\.9"):
        policy_loss(torch.zeros(1), torch.ones(1), eps_clip=0.2, eps_clip_c=0.9)


KL_PLAIN = {
    "k1": (lambda d: d, lambda d: 1.0),
    "k2": (lambda d: d * d / 2, lambda d: d),
    "k3": (lambda d: math.exp(-d) - 1 + d, lambda d: 1 - math.exp(-d)),
    "low_var_kl": (
        lambda d: min(math.exp(-d) - 1 + d, 10.0),
        lambda d: 1 - math.exp(-d) if math.exp(-d) - 1 + d < 10 else 0.0,
    ),
}


@pytest.mark.parametrize("kind", list(KL_PLAIN))
def test_kl_estimates_and_gradients(kind: str) -> None:
    lp = (3 * torch.randn(200, dtype=torch.float64)).requires_grad_()
    base = 3 * torch.randn(200, dtype=torch.float64)
    kl = kl_estimate(lp, base, kind)
    kl.sum().backward()
    assert lp.grad is not None
    value, slope = KL_PLAIN[kind]
    for i in range(200):
        d = lp[i].item() - base[i].item()
        assert kl[i].item() == pytest.approx(value(d), rel=1e-10, abs=1e-12)
        assert lp.grad[i].item() == pytest.approx(slope(d), rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("kind", list(KL_PLAIN))
def test_weighted_kl_estimates_and_gradients(kind: str) -> None:
    lp = (2 * torch.randn(200, dtype=torch.float64)).requires_grad_()
    base, old = lp.detach() + torch.randn(2, 200, dtype=torch.float64)
    kl = kl_estimate(lp, base, kind, lp - old)
    kl.sum().backward()
    assert lp.grad is not None
    value, slope = KL_PLAIN["k3" if kind == "low_var_kl" else kind]
    limit = 10.0 if kind == "low_var_kl" else math.inf
    for i in range(200):
        d, weight = lp[i].item() - base[i].item(), math.exp(lp[i].item() - old[i].item())
        inside = weight * value(d) < limit
        assert kl[i].item() == pytest.approx(min(weight * value(d), limit), rel=1e-9, abs=1e-12)
        assert lp.grad[i].item() == pytest.approx(weight * (value(d) + slope(d)) * inside, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_weighted_kl_is_unbiased_off_policy_and_so_is_its_gradient(kind: str) -> None:
    logits = torch.randn(8, dtype=torch.float64, requires_grad=True)
    base, old = torch.randn(2, 8, dtype=torch.float64).log_softmax(-1)
    policy = logits.log_softmax(0)
    exact = (policy.exp() * (policy - base)).sum()
    estimate = (old.exp() * kl_estimate(policy, base, kind, policy - old)).sum()
    torch.testing.assert_close(estimate, exact)
    gradients = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (estimate, exact)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("kind", ["k3", "low_var_kl"])
def test_kl_far_below_the_base_never_pushes_further_away(kind: str) -> None:
    lp = torch.tensor([-19.0, -21.0, -40.0], dtype=torch.float64, requires_grad=True)
    kl = kl_estimate(lp, torch.zeros(3, dtype=torch.float64), kind)
    kl.sum().backward()
    assert lp.grad is not None
    assert kl.isfinite().all()
    assert (lp.grad <= 0).all()


def test_kl_of_a_policy_to_itself_is_exactly_zero() -> None:
    lp = torch.randn(50)
    for kind in KL_ESTIMATORS:
        assert (kl_estimate(lp, lp.clone(), kind) == 0).all()
        assert (kl_estimate(lp, lp.clone(), kind, torch.randn(50)) == 0).all()


def test_kl_estimators_agree_with_the_divergence_in_expectation() -> None:
    policy = torch.randn(8, dtype=torch.float64).log_softmax(0)
    base = (policy + 0.1 * torch.randn(8, dtype=torch.float64)).log_softmax(0)
    exact = (policy.exp() * (policy - base)).sum()
    for kind in ("k1", "k3", "low_var_kl"):
        assert (policy.exp() * kl_estimate(policy, base, kind)).sum().item() == pytest.approx(exact.item(), rel=1e-9)


def test_an_unknown_kl_type_is_an_error() -> None:
    with pytest.raises(ValueError, match="--kl-loss-type 'k4' is not one of k1, k2, k3, low_var_kl"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def test_value_loss_and_gradient() -> None:
    values = torch.randn(300, dtype=torch.float64, requires_grad=True)
    old, returns = values.detach() + 0.4 * torch.randn(2, 300, dtype=torch.float64)
    loss, clipped = value_loss(values, old, returns, value_clip=0.3)
    loss.sum().backward()
    assert values.grad is not None
    assert clipped.any()
    for i in range(300):
        v, before, g = values[i].item(), old[i].item(), returns[i].item()
        limited = min(max(v, before - 0.3), before + 0.3)
        left = abs(v - before) > 0.3
        bound_decides = left and (limited - g) ** 2 > (v - g) ** 2
        assert loss[i].item() == pytest.approx(max((limited - g) ** 2, (v - g) ** 2), rel=1e-10)
        assert values.grad[i].item() == pytest.approx(0.0 if bound_decides else 2 * (v - g), rel=1e-10)
        assert clipped[i].item() == left


@pytest.mark.parametrize("distance", [1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize("kind", ["k3", "low_var_kl"])
def test_k3_keeps_its_digits_near_0(kind: str, distance: float) -> None:
    """exp(-d) - 1 + d in float32 is off by 4% at 1e-3, and by more than all of it at 1e-4."""
    d = (torch.rand(1000) + 0.5) * distance
    d[::2] *= -1
    exact = (-d.double()).expm1() + d.double()
    got = kl_estimate(d, torch.zeros(()), kind).double()
    assert ((got - exact).abs() <= 3e-7 / distance * exact).all()
    assert (got > 0).all()
    assert got.mean().item() == pytest.approx(exact.mean().item(), rel=1e-3)


def test_value_loss_of_unchanged_values_is_the_plain_square() -> None:
    values, returns = torch.randn(2, 100)
    loss, clipped = value_loss(values, values.clone(), returns, value_clip=0.2)
    assert torch.equal(loss, (values - returns).square())
    assert not clipped.any()


def test_token_weights_give_every_reduction_however_rollouts_are_cut() -> None:
    rng = np.random.default_rng()
    masks = [rng.integers(0, 2, size=rng.integers(1, 30)) for _ in range(12)]
    masks[3][:] = 0
    losses = [rng.normal(size=len(m)) for m in masks]
    rollout_mean = sum((x * m).sum() / max(m.sum(), 1) for x, m in zip(losses, masks, strict=True)) / len(masks)
    constant_mean = sum((x * m).sum() / 17 for x, m in zip(losses, masks, strict=True)) / len(masks)
    tokens = int(sum(m.sum() for m in masks))
    token_mean = sum((x * m).sum() for x, m in zip(losses, masks, strict=True)) / tokens

    cuts = [sorted(rng.integers(0, len(m) + 1, size=rng.integers(0, 4)).tolist()) for m in masks]
    mask_rows = [part for m, cut in zip(masks, cuts, strict=True) for part in np.split(m, cut)]
    sums = torch.tensor([m.sum() for m, cut in zip(masks, cuts, strict=True) for _ in range(len(cut) + 1)])
    row_of_token = torch.tensor([i for i, m in enumerate(mask_rows) for _ in range(len(m))], dtype=torch.int64)
    mask = torch.tensor(np.concatenate(mask_rows), dtype=torch.uint8)
    loss = torch.tensor(np.concatenate(losses))

    weights = token_weights(mask, row_of_token, sums, num_rollouts=len(masks))
    assert (weights * loss).sum().item() == pytest.approx(rollout_mean, rel=1e-5, abs=1e-6)
    weights = token_weights(mask, row_of_token, sums, num_rollouts=len(masks), constant_length=17)
    assert (weights * loss).sum().item() == pytest.approx(constant_mean, rel=1e-5, abs=1e-6)
    weights = token_weights(mask, row_of_token, sums, num_tokens=tokens)
    assert weights.dtype is torch.float32
    assert (weights * loss).sum().item() == pytest.approx(token_mean, rel=1e-5, abs=1e-6)
    assert weights.sum().item() == pytest.approx(1.0, rel=1e-5)


def test_token_weights_take_exactly_one_denominator() -> None:
    mask, rows, sums = torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.tensor([2])
    with pytest.raises(ValueError, match="a mean over tokens has no constant length: num_tokens=2"):
        token_weights(mask, rows, sums, num_tokens=2, constant_length=5)
    with pytest.raises(ValueError, match="num_rollouts=None and num_tokens=None"):
        token_weights(mask, rows, sums)
    with pytest.raises(ValueError, match="num_rollouts=1 and num_tokens=2"):
        token_weights(mask, rows, sums, num_rollouts=1, num_tokens=2)
