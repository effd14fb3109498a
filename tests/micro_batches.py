"""Fresh random rollouts in packed micro-batches, and a plain loop's idea of where each of their tokens is.

Numbers are multiples of 1/64: their differences are exact in float32, and no ratio lies on a clip bound by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron.layers.attention import packed_params
from slime.data import Column, OptimizerStep, Ragged, TrainBatch
from slime.data.columns import COLUMNS
from slime.training.micro_batch import MicroBatch
from slime.training.packing import PackLayout
from slime.training.parallel import Parallel, Ranks
from tests.algorithm_options import algorithm_options
from tests.parallel import rollouts

GRID = 64
MULTIPLE = 8
Rows = list[np.ndarray]
"""float64, one array a row of the batch, one entry a response token."""


def fresh_rows(seed: int | None = None, *, cut: bool = True, with_engine: bool = True) -> TrainBatch:
    """Rows of very unequal length, the first fully masked, the second of one token.

    Args:
        cut: three of the rows are parts of one rollout, and two of another.
    """
    rng = np.random.default_rng(seed)
    rows = rollouts.columns(int(rng.integers(2**31)), rollouts=13, with_engine=with_engine)
    masks = [rows.loss_mask[row] for row in range(len(rows))]
    tokens = [rows.tokens[row] for row in range(len(rows))]
    tokens[1], masks[1] = tokens[1][: len(tokens[1]) - len(masks[1]) + 1], np.ones(1, np.uint8)
    ids = np.arange(len(rows))
    if cut:
        ids[[4, 5]], ids[8] = 3, 7
    sums = np.array([sum(int(masks[other].sum()) for other in np.flatnonzero(ids == i)) for i in ids])
    changed = rows.changed(
        tokens=Ragged.from_rows(tokens, np.int32),
        loss_mask=Ragged.from_rows(masks, np.uint8),
        rollout_ids=ids,
        rollout_mask_sums=sums,
        rewards=np.round(rows.rewards * 2) / 2,
        raw_rewards=np.round(rows.raw_rewards * 2) / 2,
    )
    log_probs = Ragged.from_rows(numbers(changed, -6, 0, rng), np.float32) if with_engine else None
    return changed.changed(rollout_log_probs=log_probs)


def numbers(batch: TrainBatch, low: float, high: float, rng: np.random.Generator | None = None) -> Rows:
    """Random multiples of 1/64 in [low, high], for every response token."""
    rng = rng or np.random.default_rng()
    return [
        rng.integers(round(low * GRID), round(high * GRID) + 1, int(n)) / GRID for n in batch.loss_mask.lengths.tolist()
    ]


def near(rows: Rows, distance: float, rng: np.random.Generator | None = None) -> Rows:
    """Random multiples of 1/64 at most so far from those given, and at most 0."""
    rng = rng or np.random.default_rng()
    limit = round(distance * GRID)
    return [np.minimum(row + rng.integers(-limit, limit + 1, len(row)) / GRID, 0.0) for row in rows]


def step_of(batch: TrainBatch) -> OptimizerStep:
    """One step of the whole batch."""
    ids, trained = batch.rollout_ids, np.array([batch.loss_mask[row].any() for row in range(len(batch))])
    counts = len(np.unique(ids)), int(batch.loss_mask.values.sum()), len(np.unique(ids[trained]))
    return OptimizerStep([np.arange(len(batch))], *counts)


def pack_layout(
    cp_size: int = 1,
    cp_rank: int = 0,
    per_token_loss: bool = False,
    constant_length: int | None = None,
    *,
    multiple: int = MULTIPLE,
    columns: tuple[Column, ...] = COLUMNS,
    cp_group: dist.ProcessGroup | None = None,
) -> PackLayout:
    """On the CPU."""
    args = algorithm_options()
    args.calculate_per_token_loss, args.loss_constant_length = per_token_loss, constant_length
    parallel = Parallel(cp=Ranks(cp_rank, cp_size, cp_group), tp=Ranks(size=multiple))
    return PackLayout(parallel, torch.device("cpu"), columns, args, packed_params)


def packed(
    batch: TrainBatch,
    seed: int | None = None,
    *,
    cp_size: int = 1,
    cp_rank: int = 0,
    cp_group: dist.ProcessGroup | None = None,
    per_token_loss: bool = False,
    constant_length: int | None = None,
    columns: tuple[Column, ...] = COLUMNS,
) -> list[MicroBatch]:
    """The batch in a random order, in four micro-batches of random size."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(np.arange(1, len(batch)), 3, replace=False))
    layout = pack_layout(cp_size, cp_rank, per_token_loss, constant_length, cp_group=cp_group, columns=columns)
    step = step_of(batch)
    return [MicroBatch(batch, rows, step, layout) for rows in np.split(rng.permutation(len(batch)), cuts)]


# ---- the stream, token by token


def whole_stream(
    batch: TrainBatch, rows: Sequence[int] | np.ndarray, cp_size: int, multiple: int
) -> list[dict[str, float]]:
    """One dict a token, padding included; where its successor is a response token, ``target`` is that one's place."""
    tokens: list[dict[str, float]] = []
    chunk = 2 * cp_size if cp_size > 1 else 1
    for row in rows:
        ids, mask = batch.tokens[row], batch.loss_mask[row]
        prompt = len(ids) - len(mask)
        for t in range(-(-len(ids) // chunk) * chunk):
            entry = {
                "token": int(ids[t]) if t < len(ids) else 0,
                "position": t,
                "row": int(row),
                "mask": 0,
                "log_prob": 0.0,
            }
            j = t + 1 - prompt
            if 0 <= j < len(mask):
                entry |= {"mask": int(mask[j]), "label": int(ids[t + 1]), "target": j}
                if batch.rollout_log_probs is not None:
                    entry["log_prob"] = batch.rollout_log_probs[row][j]
            tokens.append(entry)
    position = 0
    while len(tokens) % np.lcm(chunk, cp_size * multiple):
        tokens.append({"token": 0, "position": position, "row": -1, "mask": 0, "log_prob": 0.0})
        position += 1
    return tokens


def part_of_rank(tokens: list[dict[str, float]], cp_size: int, cp_rank: int) -> list[dict[str, float]]:
    """The zigzag cut, sequence by sequence."""
    if cp_size == 1:
        return tokens
    starts = [i for i, token in enumerate(tokens) if token["position"] == 0] + [len(tokens)]
    mine = []
    for start, end in pairwise(starts):
        chunk = (end - start) // (2 * cp_size)
        for c in (cp_rank, 2 * cp_size - 1 - cp_rank):
            mine += tokens[start + c * chunk : start + (c + 1) * chunk]
    return mine


def targets(
    batch: TrainBatch, micro_batch: MicroBatch, cp_size: int = 1, cp_rank: int = 0
) -> list[tuple[int, int, int]]:
    """(entry of a token vector, row, response token) of every response token that a rank holds."""
    stream = part_of_rank(whole_stream(batch, micro_batch.rows, cp_size, MULTIPLE), cp_size, cp_rank)
    return [(t, int(token["row"]), int(token["target"])) for t, token in enumerate(stream) if "target" in token]


def put(batch: TrainBatch, micro_batch: MicroBatch, rows: Rows, cp_size: int = 1, cp_rank: int = 0) -> Tensor:
    """A token vector of the values, with random numbers wherever there is no response token."""
    column = -4 * torch.rand(micro_batch.mask.shape)
    for t, row, j in targets(batch, micro_batch, cp_size, cp_rank):
        column[t] = float(rows[row][j])
    return column


def take(batch: TrainBatch, micro_batches: Sequence[MicroBatch], columns: Sequence[Tensor | None]) -> Rows:
    """The inverse of `put`, of all micro-batches."""
    rows = [np.full(int(n), np.nan) for n in batch.loss_mask.lengths]
    for micro_batch, column in zip(micro_batches, columns, strict=True):
        assert column is not None
        for t, row, j in targets(batch, micro_batch):
            rows[row][j] = float(column[t])
    return rows


def same(got: Rows, want: Sequence[np.ndarray | Tensor | None], tolerance: float = 2e-5) -> None:
    """Assert equality to float32 rounding; None stands for zeros."""
    for mine, theirs in zip(got, want, strict=True):
        wanted = np.zeros(len(mine)) if theirs is None else np.asarray(theirs, dtype=np.float64)
        np.testing.assert_allclose(mine, wanted, rtol=tolerance, atol=tolerance / 10)


def engine_rows(batch: TrainBatch) -> Rows:
    """The engine's log-probs."""
    assert batch.rollout_log_probs is not None
    return [batch.rollout_log_probs[row].astype(np.float64) for row in range(len(batch))]
