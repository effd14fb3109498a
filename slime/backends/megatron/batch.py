"""Rows of a `TrainBatch` as one packed micro-batch.

Sequences lie one after the other in one stream of T tokens (no padding between them but for context parallelism).
Every per-token column is aligned with its *target*: entry t belongs to the prediction, made at position t, of the token
at t + 1. So a response of R tokens after a prompt of P uses positions P - 1 to P + R - 2 of its sequence, and whatever
the model returns for position t needs no shift.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slime.algorithms.weights import token_weights
from slime.backends.megatron.attention import packed_params, zigzag_index
from slime.backends.megatron.responses import Responses, sum_over_ranks
from slime.utils.device import from_host
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
    constant_length: int | None
    """``--loss-constant-length``"""
    device: torch.device
    cp_group: dist.ProcessGroup | None = None
    """The context-parallel ranks; None where there is one."""


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
    mask: Tensor
    """float32 [T], 1 at the predictions of tokens that are trained, 0 at prompt, masked and padding positions."""
    row_of_token: Tensor
    """int64 [T], which sample of the micro-batch a token is of; any of them at padding positions."""
    row_counts: Tensor
    """float32 [R], the trained tokens of each whole sample, on all context-parallel ranks."""
    weights: Tensor
    """float32 [T], the token's weight in the loss; 0 where the mask is."""
    mean_weights: Tensor
    """float32 [T], its weight in a mean over the step, of rollouts with a trained token; no constant length."""
    rows: np.ndarray
    """int64 [R], the samples' rows in the `TrainBatch`."""
    lengths: list[int]
    """Tokens of each sample, prompt and response."""
    step: OptimizerStep
    responses: Responses
    rollout_log_probs: Tensor | None
    """float32 [T], from the engine; 0 outside responses."""
    weight_versions: Tensor | None = None
    """int64 [T], the version that made the target token; -1 elsewhere, None unless the batch has them."""
    advantages: Tensor | None = None
    """float32 [T]; None for losses without, and before `advantages.set_advantages`."""
    returns: Tensor | None = None
    """float32 [T], what the critic is trained on."""
    values: Tensor | None = None
    """float32 [T], the critic's before the rollout's first optimizer step."""
    old_log_probs: Tensor | None = None
    """float32 [T], under the behaviour policy; None: the present pass's own."""
    ref_log_probs: Tensor | None = None
    """float32 [T], under the reference model."""
    metadata: list[Any] | None = None
    """`Sample.train_metadata` of each sample, where a user's function may read it."""

    def row_sum(self, column: Tensor) -> Tensor:
        """At each token the sum over its whole sample's trained tokens, of and as a token vector.

        Differentiable, and collective over the context-parallel ranks.
        """
        sums = column.new_zeros(len(self.row_counts)).index_add(0, self.row_of_token, column * self.mask)
        return sum_over_ranks(sums, self.responses.group)[self.row_of_token]

    def row_mean(self, column: Tensor) -> Tensor:
        """At each token the mean over its whole sample's trained tokens; as `row_sum`."""
        return self.row_sum(column) / self.row_counts.clamp(min=1)[self.row_of_token]

    def row_min(self, column: Tensor) -> Tensor:
        """At each token the least of its whole sample's trained tokens, inf where there is none; no gradient."""
        masked = column.detach().masked_fill(self.mask == 0, torch.inf)
        least = masked.new_full((len(self.row_counts),), torch.inf)
        least = least.scatter_reduce(0, self.row_of_token, masked, "amin")
        if self.responses.group is not None and self.responses.group.size() > 1:
            dist.all_reduce(least, dist.ReduceOp.MIN, group=self.responses.group)
        return least[self.row_of_token]


def known_columns(micro_batches: list[MicroBatch]) -> dict[str, list[Any]]:
    """What is known of every sample, under upstream's names: one tensor a response, for users' functions.

    Collective over the context-parallel ranks.
    """
    columns: dict[str, list[Any]] = {
        key: [row for m in micro_batches for row in m.responses.rows(getattr(m, name))]
        for key, name in UPSTREAM_COLUMNS.items()
        if getattr(micro_batches[0], name) is not None
    }
    if micro_batches[0].metadata is not None:
        columns["metadata"] = [row for m in micro_batches for row in m.metadata or []]
    return columns


UPSTREAM_COLUMNS = {
    "advantages": "advantages",
    "returns": "returns",
    "log_probs": "old_log_probs",
    "ref_log_probs": "ref_log_probs",
    "rollout_log_probs": "rollout_log_probs",
    "values": "values",
}
"""Per-token columns: users' name -> `MicroBatch`'s."""


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
        return from_host(torch.from_numpy(values), layout.device)

    mask = torch.from_numpy(column(batch.loss_mask, np.uint8).astype(np.float32))
    weights, mean_weights = _weights(
        mask, torch.from_numpy(row_of_token[local]), batch.rollout_mask_sums[rows], step, layout
    )
    log_probs, versions = batch.rollout_log_probs, batch.weight_versions
    return MicroBatch(
        tokens=tensor(tokens[local])[None],
        position_ids=tensor((np.arange(total) - np.repeat(starts, padded))[local])[None],
        packed_seq_params=packed_params(padded.tolist()),
        labels=tensor(np.roll(tokens, -1)[local]),
        mask=from_host(mask, layout.device),
        row_of_token=tensor(row_of_token[local]),
        row_counts=tensor(np.array([batch.loss_mask[row].sum() for row in rows.tolist()], dtype=np.float32)),
        weights=weights,
        mean_weights=mean_weights,
        rows=rows,
        lengths=lengths.tolist(),
        step=step,
        responses=Responses(tensor(targets), torch.from_numpy(responses), tensor(local), total, layout.cp_group),
        rollout_log_probs=None if log_probs is None else tensor(column(log_probs, np.float32)),
        weight_versions=None if versions is None else tensor(column(versions, np.int64)),
        metadata=None if batch.metadata is None else batch.metadata[rows].tolist(),
    )


def set_mask(micro_batch: MicroBatch, mask: Tensor) -> None:
    """Train on other tokens; weights are then still those of the tokens before.

    Args:
        mask: 0 or 1 for each of the response tokens, in order.
    """
    lengths = micro_batch.responses.lengths.tolist()
    micro_batch.row_counts = torch.stack([row.sum() for row in mask.split(lengths)])
    micro_batch.mask = micro_batch.responses.scatter(mask)


def set_weights(
    micro_batch: MicroBatch,
    rollout_mask_sums: np.ndarray,
    trained_sums: np.ndarray,
    trained: OptimizerStep,
    layout: PackLayout,
) -> None:
    """Weigh the tokens of a new mask: in the loss by the step's denominators as they were, in means by the new ones.

    Args:
        rollout_mask_sums: int64 [R], as `pack` had them.
        trained_sums, trained: the same, and the step, as the new masks of all ranks make them.
    """
    own = micro_batch.mask, micro_batch.row_of_token
    micro_batch.weights, _ = _weights(*own, rollout_mask_sums, micro_batch.step, layout)
    _, micro_batch.mean_weights = _weights(*own, trained_sums, trained, layout)


def _weights(
    mask: Tensor, row_of_token: Tensor, rollout_mask_sums: np.ndarray, step: OptimizerStep, layout: PackLayout
) -> list[Tensor]:
    """In the loss, and in a mean over the step; computed on the CPU, as a GPU divides with other rounding."""
    weigh = functools.partial(
        token_weights,
        mask.cpu(),
        row_of_token.cpu(),
        torch.from_numpy(rollout_mask_sums),
        num_tokens=step.num_tokens if layout.per_token_loss else None,
    )
    counts = (step.num_rollouts, layout.constant_length), (step.num_trained_rollouts, None)
    return [
        from_host(weigh(num_rollouts=None if layout.per_token_loss else count, constant_length=length), layout.device)
        for count, length in counts
    ]


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
