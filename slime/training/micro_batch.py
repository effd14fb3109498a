"""One packed micro-batch: what the batch has of its rows, put on the device when it is asked for, and what passes made.

Between passes only what passes and users' functions made stays on the device (`MicroBatch.unload`); a pass has one
micro-batch there at a time, and the next one beside it (`in_turn`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime.algorithms.weights import token_weights
from slime.data import Column, OptimizerStep, Ragged, TrainBatch
from slime.data.columns import LOSS_MASK, TOKENS
from slime.training.media import load_media
from slime.training.packing import PackLayout, Stream
from slime.training.responses import Responses, sum_over_ranks
from slime.utils.device import from_host

T = TypeVar("T")


class _Column:
    """A token vector by its name, None where there is none; float32 [T] unless it says otherwise."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, micro_batch: MicroBatch, owner: type | None = None) -> Tensor | None:
        return micro_batch.get(self._name)

    def __set__(self, micro_batch: MicroBatch, value: Tensor | None) -> None:
        micro_batch.put(self._name, value)


class MicroBatch:
    """One packed forward pass of this rank over T tokens of R samples, on this rank's device.

    Attributes:
        rows: int64 [R], the samples' rows in the `TrainBatch`.
        lengths: tokens of each sample, prompt and response.
        step: the optimizer step that they belong to.
        columns: those of the run.
    """

    rollout_log_probs = _Column()
    """From the engine; 0 outside responses."""
    weight_versions = _Column()
    """int64, the version that made the target token; -1 elsewhere."""
    advantages = _Column()
    returns = _Column()
    values = _Column()
    old_log_probs = _Column()
    """Under the behaviour policy; None: the present pass's own."""
    ref_log_probs = _Column()

    def __init__(self, batch: TrainBatch, rows: np.ndarray, step: OptimizerStep, layout: PackLayout) -> None:
        """The rows as one stream.

        Args:
            batch: this data-parallel rank's rows.
            rows: int64, which of them, in order.
            step: the optimizer step that the rows belong to; its denominators go into the weights.
            layout: padding and context parallelism.

        Raises:
            ValueError: a row whose first token is a response token.
        """
        self.rows, self.step = rows, step
        self._batch, self._layout = batch, layout
        self._stream = Stream(batch, rows, layout)
        self.lengths: list[int] = self._stream.lengths.tolist()
        self.columns = layout.columns
        self._columns = {column.name: column for column in layout.columns}
        self._made: dict[str, Tensor | None] = {}
        self._host: dict[str, Any] = {}
        self._loaded: dict[str, Any] = {}

    # ---- columns

    def get(self, name: str) -> Tensor | None:
        """A column as a token vector [T, *trailing]; None where neither the batch has it nor a pass has made it."""
        if name in self._made:
            return self._made[name]
        if name not in self._batch.columns:
            return None
        return self._kept(name, lambda: self._to_device(self._prepared(name)))

    def put(self, name: str, value: Tensor | None) -> None:
        """Set a column to what a pass or a user's function made of it; it stays on the device."""
        self._made[name] = value

    def of_rows(self, name: str) -> np.ndarray | None:
        """Of each sample its entry of a column with one a row; None where the batch has none."""
        values = self._batch.columns.get(name)
        return None if values is None else values[self.rows]  # type: ignore[index]

    def whole(self, column: Column) -> list[Any] | None:
        """A column's entries of each sample, whatever the layout; None where there are none. Collective as above."""
        if column.span == "response":
            values = self.get(column.name)
            return None if values is None else self.responses.rows(values)
        if column.span in ("row", "media"):
            entries = self.of_rows(column.name)
            return None if entries is None else entries.tolist()
        ragged = self._batch.columns.get(column.name)
        if not isinstance(ragged, Ragged):
            return None
        kind = column.packed_as or column.dtype
        return [torch.from_numpy(ragged[row].astype(kind)) for row in self.rows.tolist()]

    @property
    def model_inputs(self) -> dict[str, Tensor]:
        """What the model's forward call gets beyond tokens and positions, by keyword.

        Of a column with an entry a token [1, T, *trailing]; of media what they were made into, of all samples, also
        under context parallelism.
        """
        inputs = {
            column.model_input: value[None]
            for column in self.columns
            if column.model_input is not None and (value := self.get(column.name)) is not None
        }
        for column in self.columns:
            if column.load is not None and column.name in self._batch.columns:
                inputs |= self._kept(column.name, functools.partial(self._media_inputs, column))
        return inputs

    # ---- the stream

    @property
    def num_tokens(self) -> int:
        """T"""
        return len(self._stream.local)

    @property
    def response_lengths(self) -> list[int]:
        """Response tokens of each sample, on all context-parallel ranks."""
        return self._stream.response_lengths.tolist()

    @property
    def tokens(self) -> Tensor:
        """int64 [1, T]"""
        return self._there(TOKENS)[None]

    @property
    def position_ids(self) -> Tensor:
        """int64 [1, T]"""
        return self._kept("position_ids", lambda: self._array(self._stream.positions))[None]

    @property
    def labels(self) -> Tensor:
        """int64 [T], the next token; arbitrary where ``weights`` is 0."""
        return self._kept("labels", lambda: self._to_device(self._prepared("labels")))

    @property
    def row_of_token(self) -> Tensor:
        """int64 [T], which sample of the micro-batch a token is of; any of them at padding positions."""
        return self._kept("row_of_token", lambda: self._array(self._stream.row_of_token))

    @property
    def packed_seq_params(self) -> Any:
        """What the backend's attention takes: lengths of the *whole* stream, also under context parallelism."""
        return self._kept("packed_seq_params", lambda: self._layout.describe(self._stream.padded.tolist()))

    @property
    def responses(self) -> Responses:
        """Between this stream and whole responses."""
        stream = self._stream
        return self._kept(
            "responses",
            lambda: Responses(
                positions=self._array(stream.targets),
                lengths=torch.from_numpy(stream.response_lengths),
                local=self._array(stream.local),
                stream_length=stream.total,
                group=self._layout.cp_group,
            ),
        )

    # ---- what is trained

    @property
    def mask(self) -> Tensor:
        """float32 [T], 1 at the predictions of tokens that are trained, 0 at prompt, masked and padding positions."""
        return self._there(LOSS_MASK)

    @property
    def row_counts(self) -> Tensor:
        """float32 [R], the trained tokens of each whole sample, on all context-parallel ranks."""
        return self._there("row_counts")

    @property
    def weights(self) -> Tensor:
        """float32 [T], the token's weight in the loss; 0 where the mask is."""
        return self._there("weights")

    @property
    def mean_weights(self) -> Tensor:
        """float32 [T], its weight in a mean over the step, of rollouts with a trained token; no constant length."""
        return self._there("mean_weights")

    def set_mask(self, mask: Tensor) -> None:
        """Train on other tokens; weights are then still those of the tokens before.

        Args:
            mask: 0 or 1 for each of the response tokens, in order.
        """
        self.put("row_counts", torch.stack([row.sum() for row in mask.split(self.response_lengths)]))
        self.put(LOSS_MASK, self.responses.scatter(mask))

    def set_weights(self, rollout_mask_sums: np.ndarray, trained_sums: np.ndarray, trained: OptimizerStep) -> None:
        """Weigh the tokens of a new mask: in the loss by the step's denominators as they were, in means by new ones.

        Args:
            rollout_mask_sums: int64 [R], loss tokens of each row's whole rollout, as the batch has them.
            trained_sums, trained: the same, and the step, as the new masks of all ranks make them.
        """
        mask = self.mask.cpu()
        self.put("weights", self._to_device(self._weigh(mask, rollout_mask_sums, self.step)[0]))
        self.put("mean_weights", self._to_device(self._weigh(mask, trained_sums, trained)[1]))

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

    # ---- host and device

    def prepare(self) -> None:
        """Work out in host memory what a pass needs on the device; may be called in another thread."""
        per_token = [column.name for column in self.columns if column.span in ("response", "sequence")]
        for name in (*per_token, "labels", "row_counts", "weights", "mean_weights"):
            if name not in self._made and (name in self._batch.columns or name not in self._columns):
                self._prepared(name)
        for column in self.columns:
            if column.load is not None and column.name in self._batch.columns:
                self._media(column)

    def unload(self) -> None:
        """Let go of what the batch has as well, on the device and as prepared for it."""
        self._loaded.clear()
        self._host.clear()

    def _there(self, name: str) -> Tensor:
        made = self._made.get(name)
        return self._kept(name, lambda: self._to_device(self._prepared(name))) if made is None else made

    def _kept(self, name: str, make: Callable[[], T]) -> T:
        if name not in self._loaded:
            self._loaded[name] = make()
        return self._loaded[name]

    def _array(self, values: np.ndarray) -> Tensor:
        return self._to_device(torch.from_numpy(values))

    def _to_device(self, values: Tensor) -> Tensor:
        return from_host(values, self._layout.device)

    def _prepared(self, name: str) -> Tensor:
        """In host memory, what goes to the device under a name."""
        if name not in self._host:
            if name in ("weights", "mean_weights"):
                mask = self._prepared(LOSS_MASK)
                weights = self._weigh(mask, self._batch.rollout_mask_sums[self.rows], self.step)
                self._host |= dict(zip(("weights", "mean_weights"), weights, strict=True))
            else:
                self._host[name] = torch.from_numpy(self._placed(name))
        return self._host[name]

    def _media(self, column: Column) -> dict[str, np.ndarray]:
        if column.name not in self._host:
            self._host[column.name] = load_media(column, self._batch, self.rows.tolist(), self._layout.args)
        return self._host[column.name]

    def _media_inputs(self, column: Column) -> dict[str, Tensor]:
        return {keyword: self._array(values) for keyword, values in self._media(column).items()}

    def _placed(self, name: str) -> np.ndarray:
        if name == "labels":
            return self._stream.place(self._columns[TOKENS], self._batch.tokens, shift=1)
        if name == "row_counts":
            counts = [self._batch.loss_mask[row].sum() for row in self.rows.tolist()]
            return np.array(counts, dtype=np.float32)
        values = self._batch.columns[name]
        assert isinstance(values, Ragged)
        return self._stream.place(self._columns[name], values)

    def _weigh(self, mask: Tensor, rollout_mask_sums: np.ndarray, step: OptimizerStep) -> list[Tensor]:
        """In the loss, and in a mean over the step; computed on the CPU, as a GPU divides with other rounding."""
        layout = self._layout
        weigh = functools.partial(
            token_weights,
            mask,
            torch.from_numpy(self._stream.row_of_token),
            torch.from_numpy(rollout_mask_sums),
            num_tokens=step.num_tokens if layout.per_token_loss else None,
        )
        counts = (step.num_rollouts, layout.constant_length), (step.num_trained_rollouts, None)
        return [
            weigh(num_rollouts=None if layout.per_token_loss else count, constant_length=length)
            for count, length in counts
        ]


def in_turn(micro_batches: Sequence[MicroBatch]) -> Iterator[MicroBatch]:
    """Each micro-batch as a pass takes it: the next one is prepared meanwhile, the one before is let go.

    Who has taken one is done with its columns, but for what it keeps itself, when it asks for the next.
    """
    with ThreadPoolExecutor(1) as beside:
        ready = beside.submit(micro_batches[0].prepare)
        for number, micro_batch in enumerate(micro_batches):
            ready.result()
            if number + 1 < len(micro_batches):
                ready = beside.submit(micro_batches[number + 1].prepare)
            yield micro_batch
            micro_batch.unload()


def known_columns(micro_batches: Sequence[MicroBatch]) -> dict[str, list[Any]]:
    """What is known of every sample, under the names for users' functions, in lists with an entry a sample.

    Of columns with an entry a token that is a tensor with those of the sample's response, or of all its tokens, under
    every layout. Collective over the context-parallel ranks.
    """
    data: dict[str, list[Any]] = {}
    for column in micro_batches[0].columns:
        if column.shown:
            parts = [micro_batch.whole(column) for micro_batch in micro_batches]
            if parts[0] is not None:
                data[column.name_for_users] = [entry for part in parts for entry in part or []]
    return data
