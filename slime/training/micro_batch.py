"""One packed micro-batch: what the batch has of its rows, put on the device when it is asked for, and what passes made.

Between passes only what passes and users' functions made stays on the device (`MicroBatch.unload`); a pass has one
micro-batch there at a time, and the next one is prepared in host memory meanwhile (`Pass`).
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime.algorithms.losses import token_weights
from slime.data import Column, OptimizerStep, Ragged, TrainBatch
from slime.data.batch import ColumnByName
from slime.data.columns import LOSS_MASK, ROUTES, TOKENS
from slime.data.media import MediaError, MediaRef
from slime.training.packing import PackLayout, Responses, Stream
from slime.training.parallel import sum_over_ranks
from slime.utils.device import from_host, to_host
from slime.utils.errors import BadInputError
from slime.utils.misc import refusing

T = TypeVar("T")
_LABELS, _COUNTS, _WEIGHTS, _MEAN_WEIGHTS = "<labels>", "<row counts>", "<weights>", "<mean weights>"
_POSITIONS, _ROWS, _RESPONSES = "<positions>", "<rows>", "<responses>"
"""What is worked out of columns, under names that none has."""


class MicroBatch:
    """One packed forward pass of this rank over T tokens of R samples, on this rank's device.

    Attributes:
        rows: int64 [R], the samples' rows in the `TrainBatch`.
        lengths: tokens of each sample, prompt and response.
        step: the optimizer step that they belong to.
        columns: those of the run.

    Token vectors are float32 [T] where they do not say otherwise, and None where there are none.
    """

    rollout_log_probs = ColumnByName[Any]()
    """From the engine; 0 outside responses."""
    weight_versions = ColumnByName[Any]()
    """int64, the version that made the target token; -1 elsewhere."""
    advantages = ColumnByName[Any]()
    returns = ColumnByName[Any]()
    values = ColumnByName[Any]()
    old_log_probs = ColumnByName[Any]()
    """Under the behaviour policy; None: the present pass's own."""
    ref_log_probs = ColumnByName[Any]()
    teacher_log_probs = ColumnByName[Any]()
    opd_reverse_kl = ColumnByName[Any]()
    """The student's log-probs less the teacher's, as the advantages have them."""

    def __init__(self, batch: TrainBatch, rows: np.ndarray, step: OptimizerStep, layout: PackLayout) -> None:
        """The ``rows`` (int64) of ``batch``, this data-parallel rank's, in order, as one stream; the denominators of
        ``step`` go into the weights. ValueError of a row whose first token is a response token."""
        self.rows, self.step = rows, step
        self._batch, self._layout = batch, layout
        self._stream = Stream(batch, rows, layout)
        self.lengths: list[int] = self._stream.lengths.tolist()
        self.columns = layout.columns
        self._columns = {column.name: column for column in layout.columns}
        self._made: dict[str, Tensor | None] = {}
        self._kept_on_host: dict[str, Callable[[], Tensor]] = {}
        self._host: dict[str, Any] = {}
        self._loaded: dict[str, Any] = {}
        self._attention: Any = None

    # ---- columns

    def get(self, name: str) -> Tensor | None:
        """A column as a token vector [T, *trailing]; None where neither the batch has it nor a pass has made it."""
        if name in self._made:
            return self._made[name]
        return self._there(name) if name in self._batch.columns or name in self._kept_on_host else None

    def put(self, name: str, value: Tensor | None) -> None:
        """Set a column to what a pass or a user's function made of it; it stays on the device."""
        self._made[name] = value

    def put_on_host(self, name: str, value: Tensor) -> None:
        """Keep in host memory what a pass made under a name that no column has; `get` puts it on the device again. The
        copy may be under way when this returns."""
        self._kept_on_host[name] = to_host(value)

    def whole(self, column: Column) -> list[Any] | None:
        """A column's entries of each sample, whatever the layout; None where there are none.

        Collective over the context-parallel ranks for what passes made, of which each rank has a part.
        """
        if (made := self._made.get(column.name)) is not None:
            return self.responses.rows(made)
        values = self._batch.columns.get(column.name)
        if values is None:
            return None
        if not isinstance(values, Ragged):
            return values[self.rows].tolist()
        kind = column.packed_as or column.dtype
        rows = [torch.from_numpy(values[row].astype(kind)) for row in self.rows.tolist()]
        return [self._to_device(row) for row in rows] if column.changeable else rows

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
        for name in self._media:
            inputs |= self._kept(name, functools.partial(self._media_inputs, name))
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
        return self._kept(_POSITIONS, lambda: self._array(self._stream.positions))[None]

    @property
    def labels(self) -> Tensor:
        """int64 [T], the next token; arbitrary where ``weights`` is 0."""
        return self._there(_LABELS)

    @property
    def row_of_token(self) -> Tensor:
        """int64 [T], which sample of the micro-batch a token is of; any of them at padding positions."""
        return self._kept(_ROWS, lambda: self._array(self._stream.row_of_token))

    @property
    def packed_seq_params(self) -> Any:
        """What the backend's attention takes: lengths of the *whole* stream, also under context parallelism."""
        if self._attention is None:  # kept: who attends to whom is worked out once
            self._attention = self._layout.describe(self._stream.padded.tolist())
        return self._attention

    @property
    def counts_scalars(self) -> float:
        """1 on the first of the context-parallel ranks, on which a scalar of whole samples counts, 0 on the others."""
        return float(self._layout.parallel.counts_rows)

    @property
    def responses(self) -> Responses:
        """Between this stream and whole responses."""
        stream = self._stream
        return self._kept(
            _RESPONSES,
            lambda: Responses(
                positions=self._array(stream.targets),
                lengths=torch.from_numpy(stream.response_lengths),
                local=self._array(stream.local),
                stream_length=stream.total,
                group=self._layout.parallel.cp.group,
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
        return self._there(_COUNTS)

    @property
    def num_trained(self) -> float:
        """The sum of `row_counts`."""
        made = self._made.get(_COUNTS)
        return float((self._prepared(_COUNTS) if made is None else made).sum())

    @property
    def weights(self) -> Tensor:
        """float32 [T], the token's weight in the loss; 0 where the mask is."""
        return self._there(_WEIGHTS)

    @property
    def mean_weights(self) -> Tensor:
        """float32 [T], its weight in a mean over the step, of rollouts with a trained token; no constant length."""
        return self._there(_MEAN_WEIGHTS)

    def set_mask(self, mask: Tensor) -> None:
        """Train on other tokens, by 0 or 1 for each response token; weights are still those of the tokens before."""
        self.put(_COUNTS, torch.stack([row.sum() for row in mask.split(self.response_lengths)]))
        self.put(LOSS_MASK, self.responses.scatter(mask))

    def set_weights(self, rollout_mask_sums: np.ndarray, trained_sums: np.ndarray, trained: OptimizerStep) -> None:
        """Weigh the tokens of a new mask: in the loss by the step's denominators as they were, in means by new ones.

        Args:
            rollout_mask_sums: int64 [R], loss tokens of each row's whole rollout, as the batch has them.
            trained_sums, trained: the same, and the step, as the new masks of all ranks make them.
        """
        mask = self.mask.cpu()
        self.put(_WEIGHTS, self._to_device(self._weigh(mask, rollout_mask_sums, self.step)[0]))
        self.put(_MEAN_WEIGHTS, self._to_device(self._weigh(mask, trained_sums, trained)[1]))

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

    def prepare(self, unread: Collection[str] = ()) -> None:
        """Work out in host memory what a pass needs on the device, without the columns that it leaves ``unread``; may
        be called in another thread."""
        for name in (*self._batch.columns, _LABELS, _COUNTS, _WEIGHTS, _MEAN_WEIGHTS):
            column = self._columns.get(name)
            if (
                name not in self._made
                and name not in unread
                and (column is None or column.span in ("response", "sequence"))
            ):
                self._prepared(name)
        for name in self._media:
            self._prepared(name)

    def unload(self) -> None:
        """Let go of what is on the device but can be put there again, and in host memory of what models alone get."""
        self._loaded.clear()
        for name in [name for name in self._host if name in self._columns]:
            if self._columns[name].model_input is not None or name in (*self._media, ROUTES):
                del self._host[name]

    @property
    def _media(self) -> list[str]:
        return [
            column.name for column in self.columns if column.load is not None and column.name in self._batch.columns
        ]

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

    def _media_inputs(self, name: str) -> dict[str, Tensor]:
        return {keyword: self._array(values) for keyword, values in self._prepared(name).items()}

    def _prepared(self, name: str) -> Any:
        if name in self._kept_on_host:
            return self._kept_on_host[name]()
        if name not in self._host:
            if name in (_WEIGHTS, _MEAN_WEIGHTS):
                sums = self._batch.rollout_mask_sums[self.rows]
                weights = self._weigh(self._prepared(LOSS_MASK), sums, self.step)
                self._host |= dict(zip((_WEIGHTS, _MEAN_WEIGHTS), weights, strict=True))
            else:
                self._host[name] = self._made_of_batch(name)
        return self._host[name]

    def _made_of_batch(self, name: str) -> Any:
        if name == _COUNTS:
            counts = [self._batch.loss_mask[row].sum() for row in self.rows.tolist()]
            return torch.tensor(counts, dtype=torch.float32)
        if name == _LABELS:
            return torch.from_numpy(self._stream.place(self._columns[TOKENS], self._batch.tokens, shift=1))
        column, values = self._columns[name], self._batch.columns[name]
        if column.load is not None:
            return _load_media(column, self._batch, self.rows.tolist(), self._layout.args)
        assert isinstance(values, Ragged)
        return torch.from_numpy(self._stream.place(column, values))

    def _weigh(self, mask: Tensor, rollout_mask_sums: np.ndarray, step: OptimizerStep) -> list[Tensor]:
        """In the loss, and in a mean over the step; computed on the CPU, as a GPU divides with other rounding."""
        args = self._layout.args
        per_token = args.calculate_per_token_loss
        weigh = functools.partial(
            token_weights,
            mask,
            torch.from_numpy(self._stream.row_of_token),
            torch.from_numpy(rollout_mask_sums),
            num_tokens=step.num_tokens if per_token else None,
        )
        counts = (step.num_rollouts, args.loss_constant_length), (step.num_trained_rollouts, None)
        return [weigh(num_rollouts=None if per_token else count, constant_length=length) for count, length in counts]


def _load_media(column: Column, batch: TrainBatch, rows: Sequence[int], args: Namespace) -> dict[str, np.ndarray]:
    """By keyword of the forward call, what the column's ``load`` makes of the rows' media, in the rows' order;
    BadInputError, with the sample, where bytes are missing or have changed, or the function raised."""
    assert column.load is not None
    parts: dict[str, list[np.ndarray]] = {}
    known: dict[MediaRef, bytes] = {}  # members of a group share them
    for row in rows:
        where = f"{batch.name_of(row)}: column {column.name}"
        references = batch.columns[column.name][row]
        try:
            known |= {reference: reference.load() for reference in references if reference not in known}
        except MediaError as error:
            raise BadInputError(f"{where}: {error}") from error
        if not references:
            continue
        with refusing(f"{where}: its load raised"):
            for keyword, values in column.load(args, [known[reference] for reference in references]).items():
                parts.setdefault(keyword, []).append(np.asarray(values))
    with refusing(f"column {column.name}: what its load gave of {len(rows)} samples does not fit together:"):
        return {keyword: np.concatenate(arrays) for keyword, arrays in parts.items()}


class Pass:
    """One pass over micro-batches, by one taker or several that each go through all of them, as the model chunks of an
    interleaved pipeline do: the next one is prepared meanwhile, and one that all are done with is let go.

    Who has taken one is done with its columns, but for what it keeps itself, when it asks for the next.
    """

    def __init__(self, micro_batches: Sequence[MicroBatch], takers: int = 1, unread: Collection[str] = ()) -> None:
        """The columns that are ``unread`` by the pass are not prepared; `MicroBatch.get` still has them."""
        self._micro_batches, self._unread = micro_batches, unread
        self._preparing = ThreadPoolExecutor(1)
        self._prepared: dict[int, Future[None]] = {}
        self._left = [takers] * len(micro_batches)

    def __enter__(self) -> Pass:
        return self

    def __exit__(self, *exc: object) -> None:
        # Not waited for: after an error of another rank, or of storage that hangs, it may go on for long.
        self._preparing.shutdown(wait=False, cancel_futures=True)
        for micro_batch in self._micro_batches:
            micro_batch.unload()

    def __iter__(self) -> Iterator[MicroBatch]:
        """The micro-batches as one of the takers gets them."""
        for number, micro_batch in enumerate(self._micro_batches):
            self._prepare(number)
            self._prepare(number + 1)
            self._prepared[number].result()
            yield micro_batch
            self._left[number] -= 1
            if not self._left[number]:
                micro_batch.unload()

    def _prepare(self, number: int) -> None:
        if number < len(self._micro_batches) and number not in self._prepared:
            self._prepared[number] = self._preparing.submit(self._micro_batches[number].prepare, self._unread)
