"""slime.algorithms.rewards against plain float64 loops over groups of fresh random rewards."""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.algorithms.rewards import normalize_rewards, rollout_rewards

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
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_rewards_are_relative_to_the_rollouts_of_the_group(
    divide_by_std: bool, baseline: Literal["mean", "leave_one_out"]
) -> None:
    rewards, groups, rollouts = make_groups(np.random.default_rng())
    of_group: dict[int, dict[int, float]] = defaultdict(dict)
    for reward, group, rollout in zip(rewards, groups, rollouts, strict=True):
        of_group[group][rollout] = float(reward)
    got = normalize_rewards(rewards, groups, rollouts, divide_by_std=divide_by_std, baseline=baseline)
    for i, (reward, group, rollout) in enumerate(zip(rewards, groups, rollouts, strict=True)):
        values = list(of_group[group].values())
        others = [value for other, value in of_group[group].items() if other != rollout]
        want = reward - statistics.fmean(values if baseline == "mean" else others)
        if divide_by_std:
            want /= statistics.stdev(values) + 1e-6
        assert got[i] == pytest.approx(want, rel=1e-9, abs=1e-12)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(-3, 3)), min_size=1, max_size=40),
    st.sampled_from(["mean", "leave_one_out"]),
    st.randoms(use_true_random=False),
)
def test_grouping_is_by_id_not_by_place(
    entries: list[tuple[int, int]], baseline: Literal["mean", "leave_one_out"], rng: random.Random
) -> None:
    groups, rewards = (np.array(column) for column in zip(*entries, strict=True))
    rollouts = np.arange(len(entries))
    got = normalize_rewards(rewards, groups, rollouts, divide_by_std=True, baseline=baseline)
    order = rollouts.tolist()
    rng.shuffle(order)
    shuffled = normalize_rewards(rewards[order], groups[order], rollouts[order], divide_by_std=True, baseline=baseline)
    np.testing.assert_allclose(shuffled, got[order], rtol=1e-9, atol=1e-9)
    for group in np.unique(groups):
        members = groups == group
        alone = normalize_rewards(
            rewards[members], groups[members], rollouts[members], divide_by_std=True, baseline=baseline
        )
        np.testing.assert_allclose(got[members], alone, rtol=1e-9, atol=1e-9)
        if members.sum() > 1:
            assert abs(got[members].sum()) < 1e-6
            assert (got[members] == 0).all() == (len(set(rewards[members])) == 1)
        else:
            assert got[members] == rewards[members]


def test_normalised_rewards_do_not_depend_on_how_rollouts_are_cut() -> None:
    rewards, groups, rollouts = make_groups(np.random.default_rng())
    _, first, inverse = np.unique(rollouts, return_index=True, return_inverse=True)
    whole = normalize_rewards(rewards[first], groups[first], rollouts[first], divide_by_std=True)
    cut = normalize_rewards(rewards, groups, rollouts, divide_by_std=True)
    np.testing.assert_allclose(cut, whole[inverse], rtol=1e-9, atol=1e-12)


def test_rows_of_one_rollout_with_different_rewards_count_as_their_mean() -> None:
    rewards, groups, rollouts = np.array([0.0, 1.0, 2.0]), np.zeros(3, int), np.array([7, 7, 8])
    got = normalize_rewards(rewards, groups, rollouts, divide_by_std=False)
    np.testing.assert_allclose(got, [-1.25, -0.25, 0.75])
    got = normalize_rewards(rewards, groups, rollouts, divide_by_std=False, baseline="leave_one_out")
    np.testing.assert_allclose(got, [-2.0, -1.0, 1.5])


@pytest.mark.parametrize(
    "rewards_of_rollouts", [[[0.1, 0.2, 0.3], [0.2]], [[0.0, 1.0], [1.0, 0.0]], [[0.0, 1.0], [0.6], [0.5]], None]
)
def test_rows_with_rewards_of_their_own_are_scaled_by_their_own_spread(
    rewards_of_rollouts: list[list[float]] | None,
) -> None:
    """Also where the rollouts' means tie, or nearly: the deviation is over rows, each by one over its rollout's."""
    rng = np.random.default_rng()
    parts = rewards_of_rollouts or [rng.normal(size=rng.integers(1, 5)).tolist() for _ in range(4)]
    rollouts = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    rewards = np.concatenate(parts)
    got = normalize_rewards(rewards, np.zeros(len(rewards), int), rollouts, divide_by_std=True)
    mean = statistics.fmean(statistics.fmean(part) for part in parts)
    variance = sum(statistics.fmean((r - mean) ** 2 for r in part) for part in parts) / (len(parts) - 1)
    np.testing.assert_allclose(got, (rewards - mean) / (math.sqrt(variance) + 1e-6), rtol=1e-9, atol=1e-9)
    assert abs(got).max() < 10


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_a_group_of_equal_rewards_gives_exact_zeros(baseline: Literal["mean", "leave_one_out"]) -> None:
    rewards = np.full(7, np.random.default_rng().normal())
    got = normalize_rewards(rewards, np.zeros(7, int), np.arange(7), divide_by_std=True, baseline=baseline)
    assert (got == 0).all()


def test_a_group_of_one_rollout_keeps_its_reward() -> None:
    rewards, groups, rollouts = np.array([0.7, 0.7, 1.0, 0.0]), np.array([5, 5, 3, 3]), np.array([0, 0, 1, 2])
    got = normalize_rewards(rewards, groups, rollouts, divide_by_std=True)
    np.testing.assert_allclose(got, [0.7, 0.7, math.sqrt(0.5), -math.sqrt(0.5)], rtol=1e-5)
    got = normalize_rewards(rewards, groups, rollouts, divide_by_std=False, baseline="leave_one_out")
    np.testing.assert_allclose(got, [0.7, 0.7, 1.0, -1.0])


def test_a_rollout_in_two_groups_is_an_error() -> None:
    with pytest.raises(ValueError, match="row 2: rollout_id 4 is in group 2 and in group 1"):
        normalize_rewards(np.ones(3), np.array([1, 1, 2]), np.array([4, 5, 4]), divide_by_std=True)


@pytest.mark.parametrize(
    ("ids", "rewards", "expected"),
    [
        ([7, 7, 7, 8], [0.0, 0.0, 1.0, 0.0], [1.0, 0.0]),
        ([7, 7, 8, 8], [1.0, 1.0, 0.0, 0.0], [1.0, 0.0]),
        ([7, 8, 7, 8], [0.5, 2.0, 1.0, None], [1.0, 2.0]),
        ([7, None, None, 7], [None, 1.0, 0.0, None], [None, 1.0, 0.0]),
    ],
    ids=["on the last part", "on each part", "interleaved", "without a number"],
)
def test_a_rollout_in_parts_has_the_last_reward(
    ids: list[int | None], rewards: list[float | None], expected: list[float | None]
) -> None:
    assert list(rollout_rewards(ids, rewards).values()) == expected
