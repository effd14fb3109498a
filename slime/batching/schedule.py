"""The data-parallel schedule: which rows make which micro-batch of which rank in which optimizer step.

Pack first, distribute second: micro-batches are made of a step's rows without regard to ranks, brought to a number that
every rank can have as many of, and only then dealt out. No rollout is ever dropped or cut across two steps.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ScheduledStep:
    """One optimizer step over all ranks: ``micro_batches[rank][i]`` holds row indices into the whole batch, int64.

    ``num_rollouts`` and ``num_tokens`` (loss tokens) are the step's two loss denominators.
    """

    micro_batches: list[list[np.ndarray]]
    num_rollouts: int
    num_tokens: int


def build_schedule(
    lengths: np.ndarray,
    rollout_ids: np.ndarray,
    mask_sums: np.ndarray,
    *,
    dp_size: int,
    global_batch_size: int,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
    micro_batch_multiple: int = 1,
    row_costs: np.ndarray | None = None,
) -> list[ScheduledStep]:
    """Cut a batch into optimizer steps of exactly ``global_batch_size`` rollouts, in order of their first row.

    Args:
        lengths: int [rows], tokens of each row, prompt and response.
        rollout_ids: int [rows], rows with one id are parts of one rollout.
        mask_sums: int [rows], loss tokens of each row.
        dp_size: data-parallel ranks; every rank gets as many micro-batches.
        global_batch_size: rollouts an optimizer step.
        micro_batch_size: rows a micro-batch (static); exactly one of this and ``max_tokens``.
        max_tokens: most tokens a micro-batch (dynamic); a longer row is a micro-batch of its own.
        micro_batch_multiple: micro-batches of a rank are a multiple of it (an interleaved pipeline needs that).
        row_costs: float [rows], spread micro-batches so that the ranks' sums of it are close; None deals them in turn.

    Raises:
        ValueError: rollouts that do not divide into steps, or a step with too few rows for the ranks.
    """
    if (micro_batch_size is None) == (max_tokens is None):
        raise ValueError(f"give micro_batch_size or max_tokens, not {micro_batch_size=} and {max_tokens=}")
    schedule = []
    for step, rows in enumerate(_rows_of_steps(rollout_ids, global_batch_size)):
        if max_tokens is not None:
            packed = pack_by_tokens(lengths, rows, max_tokens)
        else:
            assert micro_batch_size is not None
            packed = [rows[i : i + micro_batch_size] for i in range(0, len(rows), micro_batch_size)]
        multiple = dp_size * micro_batch_multiple
        needed = -(-len(packed) // multiple) * multiple
        if len(rows) < needed:
            raise ValueError(
                f"optimizer step {step} has {len(rows)} rows ({global_batch_size} rollouts), too few for the {needed} "
                f"micro-batches that {dp_size} data-parallel ranks x a multiple of {micro_batch_multiple} take: raise "
                f"--global-batch-size, allow larger micro-batches (--micro-batch-size, --max-tokens-per-gpu), "
                f"or use fewer data-parallel ranks (more tensor, pipeline or context parallelism)"
            )
        packed = _split_largest(packed, lengths, needed - len(packed))
        num_tokens = int(np.sum(mask_sums[rows]))
        schedule.append(ScheduledStep(_deal(packed, dp_size, row_costs), global_batch_size, num_tokens))
    return schedule


def attention_costs(lengths: np.ndarray, hidden_size: int) -> np.ndarray:
    """Relative forward FLOPs of each row: ``n * (6 * hidden_size + n)``, float64 [rows].

    A dense decoder layer takes about ``24 n h^2`` for its matrices and ``4 n^2 h`` for attention (causal halves the
    work but not every kernel makes use of it).
    """
    lengths = np.asarray(lengths, dtype=np.float64)
    return lengths * (6.0 * hidden_size + lengths)


def pack_by_tokens(lengths: np.ndarray, rows: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """Best-fit-decreasing bins of at most ``max_tokens`` (at most 11/9 of the optimum + 1); a longer row alone."""
    order = rows[np.argsort(-np.asarray(lengths)[rows], kind="stable")]
    bins: list[list[int]] = []
    space: list[tuple[int, int]] = []  # (tokens left, bin), sorted: the tightest fitting bin is a bisection away
    shortest = int(lengths[order[-1]])
    for row in order.tolist():
        length = int(lengths[row])
        at = bisect_left(space, (length, -1))
        if at == len(space):
            left, chosen = max_tokens, len(bins)
            bins.append([])
        else:
            left, chosen = space.pop(at)
        bins[chosen].append(row)
        if left - length >= shortest:
            insort(space, (left - length, chosen))
    return [np.sort(np.array(b, dtype=np.int64)) for b in bins]


def _rows_of_steps(rollout_ids: np.ndarray, global_batch_size: int) -> list[np.ndarray]:
    """Row indices of each step, in the given order of rows."""
    _, first_row, rollout_of_row = np.unique(rollout_ids, return_index=True, return_inverse=True)
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


def _split_largest(packed: list[np.ndarray], lengths: np.ndarray, splits: int) -> list[np.ndarray]:
    """Halve the micro-batch with the most tokens, ``splits`` times; halves stay in its place."""
    pieces = {i: [rows] for i, rows in enumerate(packed)}
    heap = [(-int(lengths[rows].sum()), i, 0) for i, rows in enumerate(packed) if len(rows) > 1]
    heapq.heapify(heap)
    for _ in range(splits):
        _, place, piece = heapq.heappop(heap)
        halves = _halve(pieces[place][piece], lengths)
        pieces[place][piece] = halves[0]
        pieces[place].append(halves[1])
        for index, rows in ((piece, halves[0]), (len(pieces[place]) - 1, halves[1])):
            if len(rows) > 1:
                heapq.heappush(heap, (-int(lengths[rows].sum()), place, index))
    return [rows for i in range(len(packed)) for rows in pieces[i]]


def _halve(rows: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two non-empty parts of about as many tokens: longest row first, to the lighter part."""
    parts: tuple[list[int], list[int]] = ([], [])
    tokens = [0, 0]
    for row in rows[np.argsort(-lengths[rows], kind="stable")].tolist():
        lighter = int(tokens[1] < tokens[0])
        parts[lighter].append(row)
        tokens[lighter] += int(lengths[row])
    return np.sort(np.array(parts[0], dtype=np.int64)), np.sort(np.array(parts[1], dtype=np.int64))


def _deal(packed: list[np.ndarray], dp_size: int, row_costs: np.ndarray | None) -> list[list[np.ndarray]]:
    """As many micro-batches to every rank: in turn, or, of each next ``dp_size`` costliest, most to the least loaded.

    The second keeps micro-batches of like cost at the same place of every rank, where expert parallelism waits for all.
    """
    ranks: list[list[np.ndarray]] = [[] for _ in range(dp_size)]
    if row_costs is None:
        for i, rows in enumerate(packed):
            ranks[i % dp_size].append(rows)
        return ranks
    costs = [float(np.sum(row_costs[rows])) for rows in packed]
    order = sorted(range(len(packed)), key=lambda i: (-costs[i], i))
    loads = [0.0] * dp_size
    for start in range(0, len(order), dp_size):
        by_load = sorted(range(dp_size), key=lambda rank: (loads[rank], rank))
        for rank, i in zip(by_load, order[start : start + dp_size], strict=True):
            ranks[rank].append(packed[i])
            loads[rank] += costs[i]
    return ranks
