"""Where the rows of a batch lie in a packed stream, which part of it a context-parallel rank holds, and the way back.

Sequences lie one after the other in one stream, with no padding between them but for context parallelism. Columns with
an entry a response token are aligned with its *target*: entry t belongs to the prediction, made at position t, of the
token at t + 1. So a response of R tokens after a prompt of P uses positions P - 1 to P + R - 2 of its sequence, and
whatever the model returns for position t needs no shift.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime.data import Column, Ragged, TrainBatch
from slime.training.parallel import Parallel, sum_over_ranks


@dataclass(frozen=True)
class PackLayout:
    """How a stream is padded and which part of it this rank holds.

    Under context parallelism of n ranks a sequence is padded to 2 * n equal chunks and rank r holds the chunks r and
    2 * n - 1 - r of each, which balances causal attention. The local stream is padded to a multiple of the number of
    tensor-parallel ranks, over which sequence parallelism cuts it.
    """

    parallel: Parallel
    device: torch.device
    columns: tuple[Column, ...]
    """Those of the run."""
    args: Namespace
    """The run's options."""
    describe: Callable[[Sequence[int]], Any]
    """Makes of the padded lengths of a stream's sequences what the backend's attention takes."""


class Stream:
    """Of one micro-batch; numpy arrays, int64.

    Attributes:
        rows: [R] of the batch, in order.
        lengths, response_lengths: [R].
        padded: [R] or [R + 1], what each sequence takes of the whole stream, with a last one of nothing but padding
            where the stream needs it.
        total: tokens of the whole stream.
        local: [T], in the whole stream, of each token that this rank holds.
        targets: [N], in the whole stream, of the prediction of each response token.
        row_of_token: [T], which row a token is of; any of them at padding positions.
        positions: [T], of each token in its sequence.
    """

    def __init__(self, batch: TrainBatch, rows: np.ndarray, layout: PackLayout) -> None:
        """ValueError of a row whose first token is a response token: nothing predicts it."""
        self.rows = rows
        self.lengths, self.response_lengths = batch.lengths[rows], batch.response_lengths[rows]
        if (bad := np.flatnonzero(self.response_lengths >= self.lengths)).size:
            row = int(bad[0])
            raise ValueError(
                f"{batch.name_of(int(rows[row]))}: {self.response_lengths[row]} response tokens of "
                f"{self.lengths[row]} leave no prompt token to predict the first from; a prompt needs one at least"
            )
        self.padded = _padded_lengths(self.lengths, layout)
        starts = np.cumsum(self.padded) - self.padded
        self.total = int(self.padded.sum())
        first = starts[: len(rows)]
        self._sequences = ranges(first, self.lengths)
        self.targets = ranges(first + self.lengths - self.response_lengths - 1, self.response_lengths)
        self.local = zigzag_index(self.padded.tolist(), layout.parallel.cp.size, layout.parallel.cp.rank).numpy()
        of_token = np.repeat(np.arange(len(self.padded)), self.padded)
        of_token[of_token >= len(rows)] = 0
        self.row_of_token = of_token[self.local]
        self.positions = (np.arange(self.total) - np.repeat(starts, self.padded))[self.local]

    def place(self, column: Column, values: Ragged, *, shift: int = 0) -> np.ndarray:
        """A column's entries where they lie in this rank's part of the stream, each ``shift`` positions earlier:
        [T, *trailing], padding elsewhere."""
        full = np.full((self.total, *column.trailing), column.padding, dtype=column.packed_as or column.dtype)
        entries = ranges(values.offsets[self.rows], values.lengths[self.rows])
        full[self.targets if column.span == "response" else self._sequences] = values.values[entries]
        return (np.roll(full, -shift, axis=0) if shift else full)[self.local]


@dataclass(frozen=True)
class Responses:
    """Where the response tokens of a micro-batch lie; N of them in R responses.

    A token vector has one entry for each of the T tokens that this rank holds, aligned as in `MicroBatch`; a response
    vector has one for each response token, response after response, and is the same on all context-parallel ranks. An
    entry may be a tensor of its own: [T, *trailing] and [N, *trailing].
    """

    positions: Tensor
    """int64 [N], in the whole stream, of the prediction of each response token."""
    lengths: Tensor
    """int64 [R], on the CPU."""
    local: Tensor
    """int64 [T], in the whole stream, of each token of this rank."""
    stream_length: int
    group: dist.ProcessGroup | None
    """The context-parallel ranks."""

    def gather(self, column: Tensor) -> Tensor:
        """A token vector as a response vector, differentiable; collective over the context-parallel ranks."""
        stream = column.new_zeros((self.stream_length, *column.shape[1:])).index_put((self.local,), column)
        return sum_over_ranks(stream, self.group)[self.positions]

    def scatter(self, values: Tensor) -> Tensor:
        """A response vector as a token vector, 0 outside the responses; differentiable."""
        stream = values.new_zeros((self.stream_length, *values.shape[1:])).index_put((self.positions,), values)
        return stream[self.local]

    def rows(self, column: Tensor) -> list[Tensor]:
        """A token vector as one tensor a response; collective as `gather` is."""
        return list(self.gather(column).split(self.lengths.tolist()))


def zigzag_index(lengths: Sequence[int], cp_size: int, cp_rank: int) -> Tensor:
    """int64 [sum(lengths) / cp_size]: which tokens of the full packed stream a context-parallel rank holds, in order;
    ValueError of a length that is not a multiple of ``2 * cp_size``."""
    parts, start = [], 0
    for length in lengths:
        chunk = chunk_length(length, cp_size)
        parts += [torch.arange(chunk) + start + c * chunk for c in chunks_of(cp_rank, cp_size)]
        start += length
    return torch.cat(parts)


def chunks_of(cp_rank: int, cp_size: int) -> tuple[int, ...]:
    """Which chunks of a sequence a rank holds."""
    return (0,) if cp_size == 1 else (cp_rank, 2 * cp_size - 1 - cp_rank)


def chunk_length(length: int, cp_size: int) -> int:
    """Tokens of each chunk of a sequence; ValueError where they do not come out even."""
    chunks = 1 if cp_size == 1 else 2 * cp_size
    if length % chunks:
        raise ValueError(f"context parallelism of {cp_size} needs lengths in multiples of {chunks}, not {length}")
    return length // chunks


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """``concatenate([arange(s, s + n) for s, n in zip(starts, lengths)])`` without the loop; int64."""
    lengths = np.asarray(lengths, dtype=np.int64)
    before = np.cumsum(lengths) - lengths
    return np.repeat(np.asarray(starts, dtype=np.int64) - before, lengths) + np.arange(int(lengths.sum()))


def _padded_lengths(lengths: np.ndarray, layout: PackLayout) -> np.ndarray:
    """Lengths in the whole stream, with a last sequence of nothing but padding where the stream needs one."""
    cp, tp = layout.parallel.cp.size, layout.parallel.tp.size
    chunk = 2 * cp if cp > 1 else 1
    padded = -(-lengths // chunk) * chunk
    tail = int(-padded.sum() % math.lcm(chunk, cp * tp))
    return np.append(padded, tail) if tail else padded
