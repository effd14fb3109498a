"""slime.algorithms against plain float64 loops over fresh random inputs, values and gradients."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict

import numpy as np
import pytest
import torch

from slime.algorithms.losses import KL_ESTIMATORS, kl_estimate, policy_loss
from slime.algorithms.rewards import normalize_rewards
from slime.algorithms.weights import token_weights

NUM_GPUS = 0


def make_groups(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Shuffled rows of uneven groups, rollouts cut into 1 to 4 rows of one reward: rewards, group ids, rollout ids."""
    rows = []
    rollout = 0
    for group in rng.choice(1000, size=6, replace=False):
        for _ in range(rng.integers(2, 7)):
            reward = float(rng.normal())
            rows += [(reward, int(group), rollout)] * int(rng.integers(1, 5))
            rollout += 1
    order = rng.permutation(len(rows))
    rewards, groups, rollouts = (np.array(column) for column in zip(*(rows[i] for i in order), strict=True))
    return rewards, groups, rollouts


@pytest.mark.parametrize("divide_by_std", [True, False])
def test_rewards_are_relative_to_the_rollouts_of_the_group(divide_by_std: bool) -> None:
    rewards, groups, rollouts = make_groups(np.random.default_rng())
    of_group: dict[int, dict[int, float]] = defaultdict(dict)
    for reward, group, rollout in zip(rewards, groups, rollouts, strict=True):
        of_group[group][rollout] = float(reward)
    got = normalize_rewards(rewards, groups, rollouts, divide_by_std=divide_by_std)
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        values = list(of_group[group].values())
        want = reward - statistics.fmean(values)
        if divide_by_std:
            want /= statistics.stdev(values) + 1e-6
        assert got[i] == pytest.approx(want, rel=1e-9, abs=1e-12)


def test_normalised_rewards_do_not_depend_on_how_rollouts_are_cut() -> None:
    rewards, groups, rollouts = make_groups(np.random.default_rng())
    _, first, inverse = np.unique(rollouts, return_index=True, return_inverse=True)
    whole = normalize_rewards(rewards[first], groups[first], rollouts[first], divide_by_std=True)
    cut = normalize_rewards(rewards, groups, rollouts, divide_by_std=True)
    np.testing.assert_allclose(cut, whole[inverse], rtol=1e-9, atol=1e-12)


def test_rows_of_one_rollout_with_different_rewards_count_as_their_mean() -> None:
    got = normalize_rewards(np.array([0.0, 1.0, 2.0]), np.zeros(3, int), np.array([7, 7, 8]), divide_by_std=False)
    np.testing.assert_allclose(got, [-1.25, -0.25, 0.75])


def test_a_group_of_equal_rewards_gives_exact_zeros() -> None:
    rewards = np.full(7, np.random.default_rng().normal())
    got = normalize_rewards(rewards, np.zeros(7, int), np.arange(7), divide_by_std=True)
    assert (got == 0).all()


def test_a_group_of_one_rollout_keeps_its_reward() -> None:
    rewards = np.array([0.7, 0.7, 1.0, 0.0])
    got = normalize_rewards(rewards, np.array([5, 5, 3, 3]), np.array([0, 0, 1, 2]), divide_by_std=True)
    np.testing.assert_allclose(got, [0.7, 0.7, math.sqrt(0.5), -math.sqrt(0.5)], rtol=1e-5)


def test_a_rollout_in_two_groups_is_an_error() -> None:
    with pytest.raises(ValueError, match="row 2: rollout_id 4 is in group 2 and in group 1"):
        normalize_rewards(np.ones(3), np.array([1, 1, 2]), np.array([4, 5, 4]), divide_by_std=True)


def plain_policy_loss(
    lp: float, old: float, advantage: float, low: float, high: float, dual: float | None
) -> tuple[float, float, bool]:
    """Loss, its derivative by ``lp``, and whether the clip decides, of one token."""
    ratio = math.exp(lp - old)
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
    lp = torch.randn(40, 5, dtype=torch.float64, requires_grad=True)
    old = lp.detach() + 0.7 * torch.randn(40, 5, dtype=torch.float64)
    advantages = torch.randn(40, 5, dtype=torch.float64)
    loss, clipped = policy_loss(lp, old, advantages, eps_clip=low, eps_clip_high=high, eps_clip_c=dual)
    loss.sum().backward()
    assert lp.grad is not None
    assert clipped.any()
    assert not clipped.all()
    for i in np.ndindex(40, 5):
        values = (lp[i].item(), old[i].item(), advantages[i].item())
        want, slope, was_clipped = plain_policy_loss(*values, low, low if high is None else high, dual)
        assert loss[i].item() == pytest.approx(want, rel=1e-10)
        assert lp.grad[i].item() == pytest.approx(slope, rel=1e-10, abs=1e-12)
        assert clipped[i].item() == was_clipped


def test_on_policy_loss_is_exactly_minus_the_advantage() -> None:
    lp = torch.randn(100, requires_grad=True)
    advantages = torch.randn(100)
    loss, clipped = policy_loss(lp, lp.detach(), advantages, eps_clip=0.2)
    loss.sum().backward()
    assert torch.equal(loss, -advantages)
    assert lp.grad is not None
    assert torch.equal(lp.grad, -advantages)
    assert not clipped.any()


def test_far_off_policy_tokens_stay_finite() -> None:
    lp = torch.tensor([500.0, -500.0, 500.0], requires_grad=True)
    loss, _ = policy_loss(lp, torch.zeros(3), torch.tensor([-1.0, 1.0, 0.0]), eps_clip=0.2)
    kl = sum(kl_estimate(lp, torch.zeros(3), kind).sum() for kind in KL_ESTIMATORS)
    (loss.sum() + kl).backward()
    assert lp.grad is not None
    assert torch.isfinite(loss).all()
    assert torch.isfinite(lp.grad).all()


def test_dual_clip_below_one_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"--eps-clip-c must be above 1, got 0\.9"):
        policy_loss(torch.zeros(1), torch.zeros(1), torch.ones(1), eps_clip=0.2, eps_clip_c=0.9)


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


def test_kl_of_a_policy_to_itself_is_exactly_zero() -> None:
    lp = torch.randn(50)
    for kind in KL_ESTIMATORS:
        assert (kl_estimate(lp, lp.clone(), kind) == 0).all()


def test_kl_estimators_agree_with_the_divergence_in_expectation() -> None:
    policy = torch.randn(8, dtype=torch.float64).log_softmax(0)
    base = (policy + 0.1 * torch.randn(8, dtype=torch.float64)).log_softmax(0)
    exact = (policy.exp() * (policy - base)).sum()
    for kind in ("k1", "k3", "low_var_kl"):
        assert (policy.exp() * kl_estimate(policy, base, kind)).sum().item() == pytest.approx(exact.item(), rel=1e-9)


def test_an_unknown_kl_type_is_an_error() -> None:
    with pytest.raises(ValueError, match="--kl-loss-type 'k4' is none of k1, k2, k3, low_var_kl"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def test_token_weights_give_both_reductions_however_rollouts_are_cut() -> None:
    rng = np.random.default_rng()
    masks = [rng.integers(0, 2, size=rng.integers(1, 30)) for _ in range(12)]
    masks[3][:] = 0
    losses = [rng.normal(size=len(m)) for m in masks]
    rollout_mean = sum((x * m).sum() / max(m.sum(), 1) for x, m in zip(losses, masks, strict=True)) / len(masks)
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
    weights = token_weights(mask, row_of_token, sums, num_tokens=tokens)
    assert weights.dtype is torch.float32
    assert (weights * loss).sum().item() == pytest.approx(token_mean, rel=1e-5, abs=1e-6)
    assert weights.sum().item() == pytest.approx(1.0, rel=1e-5)


def test_token_weights_take_exactly_one_denominator() -> None:
    mask, rows, sums = torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.tensor([2])
    with pytest.raises(ValueError, match="num_rollouts=None and num_tokens=None"):
        token_weights(mask, rows, sums)
    with pytest.raises(ValueError, match="num_rollouts=1 and num_tokens=2"):
        token_weights(mask, rows, sums, num_rollouts=1, num_tokens=2)
