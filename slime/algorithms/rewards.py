"""From one reward a rollout to one advantage-ready reward a row: normalisation within each prompt's group.

And the one reward of a rollout that was cut into rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Literal, TypeVar

import numpy as np

STD_EPSILON = 1e-6
LARGEST_REWARD = 1e18
"""Of a reward without its sign: rewards are float32 in training, and so are squares of their differences."""

Reward = TypeVar("Reward", float, float | None)


def rollout_rewards(rollout_ids: Iterable[Hashable], rewards: Iterable[Reward]) -> dict[Hashable, Reward]:
    """The reward of each rollout, in the order of their first parts: that of its last part that has one.

    So a rollout is judged by how it ended, whether all its parts have its reward or all but the last have 0. The
    advantages of rows do not follow from this: each has its own row's reward, see `normalize_rewards`.

    Args:
        rollout_ids: of each part; the parts of one rollout in their order. None is a rollout of its own.
        rewards: of each part; None where it has none.
    """
    found: dict[Hashable, Reward] = {}
    for position, (rollout, reward) in enumerate(zip(rollout_ids, rewards, strict=True)):
        key = ("alone", position) if rollout is None else rollout
        if reward is not None or key not in found:
            found[key] = reward
    return found


def overlong_penalty(lengths: np.ndarray, max_length: int, buffer: int, factor: float) -> np.ndarray:
    """What is added to the rewards of responses of these lengths in tokens, float64 from ``-factor`` to 0.

    Soft overlong punishment of Yu et al. 2025 (DAPO, arXiv:2503.14476), equation 13, times ``factor``: 0 up to
    ``max_length - buffer`` tokens, then falling in a line to ``-factor`` at ``max_length``, and ``-factor`` beyond.
    """
    return -factor * np.clip((np.asarray(lengths) - (max_length - buffer)) / buffer, 0.0, 1.0) + 0.0


def normalize_rewards(
    rewards: np.ndarray,
    group_ids: np.ndarray,
    rollout_ids: np.ndarray,
    *,
    divide_by_std: bool,
    baseline: Literal["mean", "leave_one_out"] = "mean",
) -> np.ndarray:
    """Group-relative rewards, ``(r - baseline) / (std + 1e-6)``.

    The baseline is the mean of the group (GRPO, arXiv:2402.03300, section 4.1.2), or, ``leave_one_out``, of the other
    rollouts of the group (RLOO, arXiv:2402.14740, which does not divide).

    Mean and (unbiased) standard deviation are taken over the *rollouts* of a group, found by ``group_ids`` and not by
    position, so groups may be uneven, interleaved, or cut into any number of rows without a change to the result. Where
    the rows of a rollout have rewards of their own, each counts in both by one over their number.

    A group with a single rollout has no baseline of its own: its rows keep their reward unchanged (plain REINFORCE,
    unbiased), never a silent zero. Option validation rejects ``--n-samples-per-prompt 1`` with normalisation, so that
    this happens only to a group that lost its other rollouts on the way.

    Args:
        rewards: float [rows].
        group_ids: int [rows], one id a prompt.
        rollout_ids: int [rows], rows with one id are parts of one rollout.
        divide_by_std: False subtracts the baseline only (Dr. GRPO, arXiv:2503.20783).

    Returns:
        float64 [rows]; ValueError of a rollout that belongs to two groups.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    rollouts, first_row, rollout_of_row = np.unique(rollout_ids, return_index=True, return_inverse=True)
    groups, group_of_row = np.unique(group_ids, return_inverse=True)
    group_of_rollout = group_of_row[first_row]
    stray = np.flatnonzero(group_of_rollout[rollout_of_row] != group_of_row)
    if stray.size:
        row = int(stray[0])
        raise ValueError(
            f"row {row}: rollout_id {rollouts[rollout_of_row[row]]} is in group {groups[group_of_row[row]]} and in "
            f"group {groups[group_of_rollout[rollout_of_row[row]]]}; a rollout belongs to one group"
        )

    # Measured from the group's first reward, so that equal rewards give exactly 0 and not a rounding error over 1e-6.
    first_rollout = np.unique(group_of_rollout, return_index=True)[1]
    origin = rewards[first_row[first_rollout]]
    shifted = rewards - origin[group_of_row]
    reward_of_rollout = np.bincount(rollout_of_row, shifted) / np.bincount(rollout_of_row)
    size = np.bincount(group_of_rollout)
    mean = np.bincount(group_of_rollout, reward_of_rollout) / size
    baseline_of_row = mean[group_of_row]
    if baseline == "leave_one_out":
        rollouts_of_row = size[group_of_row]
        others = rollouts_of_row * baseline_of_row - reward_of_rollout[rollout_of_row]
        baseline_of_row = others / np.maximum(rollouts_of_row - 1, 1)
    squares_of_rollout = np.bincount(rollout_of_row, (shifted - mean[group_of_row]) ** 2) / np.bincount(rollout_of_row)
    squares = np.bincount(group_of_rollout, squares_of_rollout)
    scale = np.sqrt(squares / np.maximum(size - 1, 1)) + STD_EPSILON if divide_by_std else np.ones(len(groups))
    normalized = (shifted - baseline_of_row) / scale[group_of_row]
    return np.where(size[group_of_row] == 1, rewards, normalized)
