"""Rows of a `TrainBatch` as one packed micro-batch.

Sequences lie one after the other in one stream of T tokens (no padding between them but for context parallelism).
Every per-token column is aligned with its *target*: entry t belongs to the prediction, made at position t, of the token
at t + 1. So a response of R tokens after a prompt of P uses positions P - 1 to P + R - 2 of its sequence, and whatever
the model returns for position t needs no shift.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slime.algorithms.weights import token_weights
from slime.backends.megatron.attention import packed_params, zigzag_index
from slime.utils.types import OptimizerStep, Ragged, TrainBatch


@dataclass(frozen=True)
class PackLayout:
    """How a stream is padded and which part of it this rank holds.

    Under context parallelism of size ``cp_size``, a sequence is padded to 2 * cp_size equal chunks and rank r holds the
    chunks r and 2 * cp_size - 1 - r of each, which balances causal attention.
    """

    cp_size: int
    cp_rank: int
    multiple: int
    """The local stream is padded to a multiple of it: sequence parallelism cuts it over the tensor-parallel ranks."""
    per_token_loss: bool
    device: torch.device


@dataclass
class MicroBatch:
    """One packed forward pass of this rank; every column has T entries, the local stream's length."""

    tokens: Tensor
    """int64 [1, T]"""
    position_ids: Tensor
    """int64 [1, T]"""
    packed_seq_params: PackedSeqParams
    """Cumulative lengths of the padded sequences of the *whole* stream, also under context parallelism."""
    labels: Tensor
    """int64 [T], the next token; arbitrary where ``weights`` is 0."""
    weights: Tensor
    """float32 [T], the token's weight in the loss; 0 at prompt, masked and padding positions."""
    advantages: Tensor
    """float32 [T]"""
    rollout_log_probs: Tensor | None
    """float32 [T], from the engine; 0 outside responses."""
    old_log_probs: Tensor | None = None
    """float32 [T], under the weights before the rollout's first optimizer step; None: the present pass's own."""
    ref_log_probs: Tensor | None = None
    """float32 [T], under the reference model."""


def pack(batch: TrainBatch, rows: np.ndarray, step: OptimizerStep, layout: PackLayout) -> MicroBatch:
    """The rows as one stream.

    Args:
        batch: this data-parallel rank's rows.
        rows: int64, which of them, in order.
        step: the optimizer step that the rows belong to; its denominators go into the weights.
        layout: padding and context parallelism.

    Raises:
        ValueError: a row whose first token is a response token: nothing predicts it.
    """
    lengths = batch.tokens.lengths[rows]
    responses = batch.loss_mask.lengths[rows]
    if (responses >= lengths).any():
        row = int(rows[np.flatnonzero(responses >= lengths)[0]])
        raise ValueError(
            f"sample {int(batch.sample_indices[row])}: {len(batch.loss_mask[row])} response tokens of "
            f"{len(batch.tokens[row])} leave no prompt token to predict the first from; a prompt needs one at least"
        )
    padded = _padded_lengths(lengths, layout)
    starts = np.cumsum(padded) - padded
    total = int(padded.sum())
    row_of_token = np.repeat(np.arange(len(padded)), padded)
    row_of_token[row_of_token >= len(rows)] = 0

    tokens = np.zeros(total, dtype=np.int64)
    tokens[ranges(starts[: len(rows)], lengths)] = _values(batch.tokens, rows)
    targets = ranges(starts[: len(rows)] + lengths - responses - 1, responses)
    local = zigzag_index(padded.tolist(), layout.cp_size, layout.cp_rank).numpy()

    def column(source: Ragged, dtype: type) -> np.ndarray:
        full: np.ndarray = np.zeros(total, dtype=dtype)
        full[targets] = _values(source, rows)
        return full[local]

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(layout.device)

    weights = token_weights(
        torch.from_numpy(column(batch.loss_mask, np.uint8)),
        torch.from_numpy(row_of_token[local]),
        torch.from_numpy(batch.rollout_mask_sums[rows]),
        num_rollouts=None if layout.per_token_loss else step.num_rollouts,
        num_tokens=step.num_tokens if layout.per_token_loss else None,
    )
    log_probs = batch.rollout_log_probs
    return MicroBatch(
        tokens=tensor(tokens[local])[None],
        position_ids=tensor((np.arange(total) - np.repeat(starts, padded))[local])[None],
        packed_seq_params=packed_params(padded.tolist()),
        labels=tensor(np.roll(tokens, -1)[local]),
        weights=weights.to(layout.device),
        advantages=tensor(batch.rewards.astype(np.float32)[rows][row_of_token[local]]),
        rollout_log_probs=None if log_probs is None else tensor(column(log_probs, np.float32)),
    )


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """``concatenate([arange(s, s + n) for s, n in zip(starts, lengths)])`` without the loop; int64."""
    lengths = np.asarray(lengths, dtype=np.int64)
    before = np.cumsum(lengths) - lengths
    return np.repeat(np.asarray(starts, dtype=np.int64) - before, lengths) + np.arange(int(lengths.sum()))


def _values(column: Ragged, rows: np.ndarray) -> np.ndarray:
    return column.values[ranges(column.offsets[rows], column.lengths[rows])]


def _padded_lengths(lengths: np.ndarray, layout: PackLayout) -> np.ndarray:
    """Lengths in the whole stream, with a last sequence of nothing but padding where the stream needs one."""
    chunk = 2 * layout.cp_size if layout.cp_size > 1 else 1
    padded = -(-lengths // chunk) * chunk
    tail = int(-padded.sum() % math.lcm(chunk, layout.cp_size * layout.multiple))
    return np.append(padded, tail) if tail else padded
