"""Micro-batches to data-parallel ranks, as many to each."""

from __future__ import annotations

import numpy as np

_CLOSE = 1e-4
"""Loads this close, as a share of the mean load, count as equal: the cost model is not that exact."""
_WORTH = 0.99
"""An exchange has to bring the difference of two loads below this share of it, so that they come to an end."""


def deal_in_turn(count: int, dp_size: int) -> np.ndarray:
    """int64 [dp_size, count / dp_size]: each next micro-batch to the next rank."""
    return np.arange(count, dtype=np.int64).reshape(-1, dp_size).T.copy()


def deal_by_cost(costs: np.ndarray, dp_size: int) -> np.ndarray:
    """int64 [dp_size, count / dp_size]: micro-batches of each rank, costliest first, the sums of costs close.

    Of each next ``dp_size`` costliest, most goes to the rank with least; then the ranks with most exchange single
    micro-batches with others, as long as that helps. Starting from the better of that and `deal_in_turn`, and never
    raising the largest load, it is never worse than the latter. Like costs come to lie at about the same place of every
    rank, where expert parallelism waits for all.

    Args:
        costs: float [count], of each micro-batch.
        dp_size: ranks; divides ``count``.
    """
    starts = (_costliest_first(costs, dp_size), deal_in_turn(len(costs), dp_size))
    dealt = _exchange(min(starts, key=lambda ranks: float(costs[ranks].sum(axis=1).max())), costs)
    order = np.argsort(-costs[dealt], axis=1, kind="stable")
    return np.take_along_axis(dealt, order, axis=1)


def _costliest_first(costs: np.ndarray, dp_size: int) -> np.ndarray:
    rounds = np.argsort(-costs, kind="stable").reshape(-1, dp_size)
    dealt = np.empty((dp_size, len(rounds)), dtype=np.int64)
    loads = np.zeros(dp_size)
    for number, micro_batches in enumerate(rounds):
        lightest_first = np.argsort(loads, kind="stable")
        dealt[lightest_first, number] = micro_batches
        loads[lightest_first] += costs[micro_batches]
    return dealt


def _exchange(dealt: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Exchange pairs between the heaviest rank and the lightest that it can profitably do so with, to the end."""
    dealt = dealt.copy()
    loads = costs[dealt].sum(axis=1)
    close = _CLOSE * loads.mean()
    while True:
        heavy = int(loads.argmax())
        for light in np.argsort(loads, kind="stable").tolist():
            gap = float(loads[heavy] - loads[light])
            if gap <= close:
                return dealt
            give, take, moved = _best_pair(costs[dealt[heavy]], costs[dealt[light]], gap)
            if abs(gap - 2 * moved) < _WORTH * gap:
                dealt[heavy, give], dealt[light, take] = dealt[light, take], dealt[heavy, give]
                loads[heavy] -= moved
                loads[light] += moved
                break


def _best_pair(heavy: np.ndarray, light: np.ndarray, gap: float) -> tuple[int, int, float]:
    """Positions whose exchange moves a cost closest to half the gap, and that cost."""
    order = np.argsort(light, kind="stable")
    above = np.searchsorted(light[order], heavy - gap / 2)
    near = np.stack([np.maximum(above - 1, 0), np.minimum(above, len(light) - 1)])
    moved = heavy - light[order[near]]
    side, give = np.unravel_index(np.abs(moved - gap / 2).argmin(), moved.shape)
    return int(give), int(order[near[side, give]]), float(moved[side, give])
