"""Rows into micro-batches, without regard to ranks: as few as the token cap allows, or of costs as even as it allows.

A micro-batch is an int64 array of row indices, ascending.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass, field

import numpy as np

_MORE_BINS = 0.02
"""The share by which `pack_by_cost` may exceed the count that it is asked for (at least one multiple)."""


def pack_in_order(rows: np.ndarray, micro_batch_size: int) -> list[np.ndarray]:
    """Each next ``micro_batch_size`` rows, the last one shorter where they do not divide."""
    return [rows[i : i + micro_batch_size] for i in range(0, len(rows), micro_batch_size)]


def pack_by_tokens(lengths: np.ndarray, rows: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """Best-fit-decreasing bins of at most ``max_tokens`` (at most 11/9 of the optimum + 1); a longer row alone."""
    order = rows[np.argsort(-lengths[rows], kind="stable")]
    bins: list[list[int]] = []
    space: list[tuple[int, int]] = []  # (tokens left, bin), sorted: the tightest fitting bin is a bisection away
    shortest = int(lengths[order[-1]])
    for row, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        at = bisect_left(space, (length, -1))
        if at == len(space):
            left, chosen = max_tokens, len(bins)
            bins.append([])
        else:
            left, chosen = space.pop(at)
        bins[chosen].append(row)
        if left - length >= shortest:
            insort(space, (left - length, chosen))
    return [_ascending(rows_of_bin) for rows_of_bin in bins]


def pack_by_cost(
    lengths: np.ndarray, costs: np.ndarray, rows: np.ndarray, max_tokens: int, count: int, multiple: int
) -> list[np.ndarray] | None:
    """Micro-batches of about the same cost, none above ``max_tokens`` but for a longer row alone.

    The longest row not yet placed goes to the cheapest micro-batch that has room for it. Where rows are left without
    room, it starts again with as many more micro-batches as would hold them, then with as many as are allowed.

    Args:
        lengths: int [all rows].
        costs: float [all rows], positive.
        rows: int64, which of them to pack.
        count: micro-batches to make, at most as many as rows.
        multiple: their number stays a multiple of it, as ``count`` is.

    Returns:
        ``count`` micro-batches, or more by at most 2% or one multiple, whichever is more; None where those do not do.
    """
    most = min(count + multiple * max(1, int(_MORE_BINS * count / multiple)), len(rows) // multiple * multiple)
    order = rows[np.argsort(-lengths[rows], kind="stable")]
    lengths, costs = lengths[order], costs[order]
    bins, without_room = _cheapest_with_room(lengths, costs, max_tokens, count)
    if without_room and count < most:
        count = min(most, count + multiple * -(-without_room // (max_tokens * multiple)))
        bins, without_room = _cheapest_with_room(lengths, costs, max_tokens, count)
    if without_room and count < most:
        bins, without_room = _cheapest_with_room(lengths, costs, max_tokens, most)
    return None if without_room else [np.sort(order[places]) for places in bins]


def split_largest(packed: list[np.ndarray], lengths: np.ndarray, splits: int) -> list[np.ndarray]:
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


@dataclass
class _Bins:
    """Micro-batches being filled by rows of descending length; each is in one of the two heaps."""

    room: list[int]
    with_room: list[tuple[float, int]]
    """(cost, bin), cheapest first; one without room for the present row may still be among them."""
    too_full: list[tuple[int, float, int]] = field(default_factory=list)
    """(-room, cost, bin), roomiest first: they wait for shorter rows."""

    def cheapest(self, length: int) -> int | None:
        """The cheapest bin with room for the row, which lies on top of ``with_room``."""
        while self.too_full and -self.too_full[0][0] >= length:
            _, cost, chosen = heapq.heappop(self.too_full)
            heapq.heappush(self.with_room, (cost, chosen))
        while self.with_room:
            cost, chosen = self.with_room[0]
            if cost == 0.0 or self.room[chosen] >= length:  # an empty one takes a row of any length
                return chosen
            heapq.heappop(self.with_room)
            heapq.heappush(self.too_full, (-self.room[chosen], cost, chosen))
        return None


def _cheapest_with_room(
    lengths: np.ndarray, costs: np.ndarray, max_tokens: int, count: int
) -> tuple[list[list[int]], int]:
    """Positions into ``lengths`` (descending) of each of ``count`` bins, and the tokens of those that got no room."""
    places: list[list[int]] = [[] for _ in range(count)]
    bins = _Bins([max_tokens] * count, [(0.0, i) for i in range(count)])
    without_room = 0
    for position, (length, cost) in enumerate(zip(lengths.tolist(), costs.tolist(), strict=True)):
        chosen = bins.cheapest(length)
        if chosen is None:
            without_room += length
            continue
        places[chosen].append(position)
        bins.room[chosen] -= length
        heapq.heapreplace(bins.with_room, (bins.with_room[0][0] + cost, chosen))
    return places, without_room


def _halve(rows: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two non-empty parts of about as many tokens: longest row first, to the lighter part."""
    parts: tuple[list[int], list[int]] = ([], [])
    tokens = [0, 0]
    for row in rows[np.argsort(-lengths[rows], kind="stable")].tolist():
        lighter = int(tokens[1] < tokens[0])
        parts[lighter].append(row)
        tokens[lighter] += int(lengths[row])
    return _ascending(parts[0]), _ascending(parts[1])


def _ascending(rows: list[int]) -> np.ndarray:
    return np.sort(np.array(rows, dtype=np.int64))
