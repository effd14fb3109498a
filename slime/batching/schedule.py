"""The data-parallel schedule: which rows make which micro-batch of which rank in which optimizer step.

Pack first, distribute second: micro-batches are made of a step's rows without regard to ranks, brought to a number that
every rank can have as many of, and only then dealt out. No rollout is ever dropped or cut across two steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slime.batching.packing import pack_by_cost, pack_by_tokens, pack_in_order, split_largest
from slime.data import OptimizerStep, TrainBatch

_CLOSE = 1e-4
"""Loads this close, as a share of the mean load, count as equal: the cost model is not that exact."""
_WORTH = 0.99
"""An exchange has to bring the difference of two loads below this share of it, so that they come to an end."""


@dataclass(frozen=True)
class ScheduledStep:
    """One optimizer step over all ranks: ``micro_batches[rank][i]`` holds row indices into the whole batch, int64.

    ``num_rollouts`` and ``num_tokens`` (loss tokens) are the step's two loss denominators; ``num_trained_rollouts``,
    those of its rollouts that have a loss token, is what its metrics' means divide by.
    """

    micro_batches: list[list[np.ndarray]]
    num_rollouts: int
    num_tokens: int
    num_trained_rollouts: int


def build_schedule(
    lengths: np.ndarray,
    rollouts: np.ndarray,
    mask_sums: np.ndarray,
    *,
    dp_size: int,
    global_batch_size: int,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
    micro_batch_multiple: int = 1,
    row_costs: np.ndarray | None = None,
    balance_micro_batches: bool = False,
) -> list[ScheduledStep]:
    """Cut a batch into optimizer steps of exactly ``global_batch_size`` rollouts, in order of their first row.

    Args:
        lengths: int [rows], tokens that each row takes in a micro-batch: prompt, response, and what it is padded by.
        rollouts: int [rows], ids: rows with one are parts of one rollout.
        mask_sums: int [rows], loss tokens of each row.
        dp_size: data-parallel ranks; every rank gets as many micro-batches.
        global_batch_size: rollouts an optimizer step.
        micro_batch_size: rows a micro-batch (static); exactly one of this and ``max_tokens``.
        max_tokens: most tokens a micro-batch (dynamic); a longer row is a micro-batch of its own.
        micro_batch_multiple: micro-batches of a rank are a multiple of it (an interleaved pipeline needs that).
        row_costs: float [rows], the work of each (`forward_flops`): deal micro-batches so that the ranks' sums of it
            are close; None deals them in turn.
        balance_micro_batches: also pack so that the micro-batches' sums of ``row_costs`` are close, still within
            ``max_tokens``. That may take more micro-batches, up to 2% or one ``micro_batch_multiple`` a rank,
            whichever is more; where that is not enough, they are packed as without it.

    ValueError of rollouts that do not divide into steps, a step with too few rows for the ranks, or arguments that
    contradict each other.
    """
    lengths, mask_sums = np.asarray(lengths, dtype=np.int64), np.asarray(mask_sums, dtype=np.int64)
    rollouts = np.asarray(rollouts)
    _check_columns(lengths, rollouts, mask_sums, row_costs)
    _check_sizes(
        dp_size=dp_size,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        max_tokens=max_tokens,
        micro_batch_multiple=micro_batch_multiple,
    )
    if balance_micro_batches and (max_tokens is None or row_costs is None):
        raise ValueError("balance_micro_batches needs max_tokens (--use-dynamic-batch-size) and row_costs")
    multiple = dp_size * micro_batch_multiple
    schedule = []
    for step, rows in enumerate(_rows_of_steps(rollouts, global_batch_size)):
        packed = _pack(lengths, rows, micro_batch_size, max_tokens)
        needed = -(-len(packed) // multiple) * multiple
        if len(rows) < needed:
            where = f"optimizer step {step} has {len(rows)} rows ({global_batch_size} rollouts)"
            raise ValueError(_too_few(where, needed, dp_size, micro_batch_multiple))
        even = None
        if balance_micro_batches and max_tokens is not None and row_costs is not None:
            even = pack_by_cost(lengths, row_costs, rows, max_tokens, needed, multiple)
        packed = even or split_largest(packed, lengths, needed - len(packed))
        trained = len(np.unique(rollouts[rows[mask_sums[rows] > 0]]))
        dealt = _deal(packed, dp_size, row_costs)
        schedule.append(ScheduledStep(dealt, global_batch_size, int(mask_sums[rows].sum()), trained))
    return schedule


def train_batches(columns: TrainBatch, schedule: list[ScheduledStep]) -> list[TrainBatch]:
    """One batch a rank: its rows in the order in which its micro-batches use them, and its steps.

    Args:
        columns: every row of the rollout; its ``steps`` are ignored.
        schedule: from `build_schedule` over the same rows; row indices are renumbered to the rank's own.
    """
    return [_of_rank(columns, schedule, rank) for rank in range(len(schedule[0].micro_batches))]


def _of_rank(columns: TrainBatch, schedule: list[ScheduledStep], rank: int) -> TrainBatch:
    steps: list[OptimizerStep] = []
    chosen: list[np.ndarray] = []
    count = 0
    for step in schedule:
        own = []
        for rows in step.micro_batches[rank]:
            chosen.append(rows)
            own.append(np.arange(count, count + len(rows), dtype=np.int64))
            count += len(rows)
        steps.append(OptimizerStep(own, step.num_rollouts, step.num_tokens, step.num_trained_rollouts))
    return columns.take(np.concatenate(chosen), steps)


def _rows_of_steps(rollouts: np.ndarray, global_batch_size: int) -> list[np.ndarray]:
    _, first_row, rollout_of_row = np.unique(rollouts, return_index=True, return_inverse=True)
    num_rollouts = len(first_row)
    if num_rollouts == 0 or num_rollouts % global_batch_size:
        raise ValueError(
            f"{num_rollouts} rollouts cannot be cut into optimizer steps of {global_batch_size} "
            f"({num_rollouts % global_batch_size} would be left over): make --rollout-batch-size x "
            f"--n-samples-per-prompt a multiple of --global-batch-size"
        )
    position = np.empty(num_rollouts, dtype=np.int64)
    position[np.argsort(first_row)] = np.arange(num_rollouts)
    step_of_row = position[rollout_of_row] // global_batch_size
    order = np.argsort(step_of_row, kind="stable").astype(np.int64)
    ends = np.cumsum(np.bincount(step_of_row))
    return np.split(order, ends[:-1])


def _pack(
    lengths: np.ndarray, rows: np.ndarray, micro_batch_size: int | None, max_tokens: int | None
) -> list[np.ndarray]:
    if max_tokens is not None and micro_batch_size is None:
        return pack_by_tokens(lengths, rows, max_tokens)
    if micro_batch_size is not None and max_tokens is None:
        return pack_in_order(rows, micro_batch_size)
    raise ValueError(f"give micro_batch_size or max_tokens, not {micro_batch_size=} and {max_tokens=}")


def _too_few(where: str, needed: int, dp_size: int, micro_batch_multiple: int) -> str:
    return (
        f"{where}, too few for the {needed} micro-batches that {dp_size} data-parallel ranks x a multiple of "
        f"{micro_batch_multiple} take: raise --global-batch-size, allow larger micro-batches (--micro-batch-size, "
        f"--max-tokens-per-gpu), or use fewer data-parallel ranks (more tensor, pipeline or context parallelism)"
    )


def _deal(packed: list[np.ndarray], dp_size: int, row_costs: np.ndarray | None) -> list[list[np.ndarray]]:
    if row_costs is None:
        dealt = deal_in_turn(len(packed), dp_size)
    else:
        dealt = deal_by_cost(np.array([row_costs[rows].sum() for rows in packed], dtype=np.float64), dp_size)
    return [[packed[i] for i in rank] for rank in dealt.tolist()]


def _check_columns(
    lengths: np.ndarray, rollouts: np.ndarray, mask_sums: np.ndarray, row_costs: np.ndarray | None
) -> None:
    columns = {"lengths": lengths, "rollouts": rollouts, "mask_sums": mask_sums}
    if row_costs is not None:
        columns["row_costs"] = row_costs
    shapes = {name: column.shape for name, column in columns.items()}
    if lengths.ndim != 1 or len(set(shapes.values())) > 1:
        raise ValueError(f"one entry a row in every column, got shapes {shapes}")
    if (wrong := np.flatnonzero(lengths < 1)).size:
        raise ValueError(f"row {wrong[0]} has {lengths[wrong[0]]} tokens")
    if row_costs is not None and (wrong := np.flatnonzero(~(np.isfinite(row_costs) & (row_costs > 0)))).size:
        raise ValueError(f"row {wrong[0]} costs {row_costs[wrong[0]]}; costs have to be positive")


def _check_sizes(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name} is {size}, it has to be at least 1")


def deal_in_turn(count: int, dp_size: int) -> np.ndarray:
    """int64 [dp_size, count / dp_size]: each next micro-batch to the next rank."""
    return np.arange(count, dtype=np.int64).reshape(-1, dp_size).T.copy()


def deal_by_cost(costs: np.ndarray, dp_size: int) -> np.ndarray:
    """int64 [dp_size, count / dp_size]: micro-batches of each rank, costliest first, the sums of costs close.

    Of each next ``dp_size`` costliest, most goes to the rank with least; then the ranks with most exchange single
    micro-batches with others, as long as that helps. Starting from the better of that and `deal_in_turn`, and never
    raising the largest load, it is never worse than the latter. Like costs come to lie at about the same place of every
    rank, where expert parallelism waits for all. ``costs`` is float [count], and ``dp_size`` divides ``count``.
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
