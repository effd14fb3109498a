"""What one training rank receives of a rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from slime.data.columns import LOSS_MASK, ROLLOUT_MASK_SUMS, SAMPLE_INDICES, TOKENS, Values
from slime.data.ragged import Ragged

T = TypeVar("T")


@dataclass(frozen=True)
class OptimizerStep:
    """One optimizer step of one data-parallel rank.

    ``num_rollouts`` and ``num_tokens`` (loss tokens) count over *all* ranks: they are the two denominators of the loss,
    known before the first forward pass. So does ``num_trained_rollouts``, the rollouts that have a loss token: means
    that are reported divide by it, while the loss counts fully masked rollouts too.
    """

    micro_batches: list[np.ndarray]
    """Row indices into the rank's `TrainBatch`, one int64 array a micro-batch; every rank has as many of them."""
    num_rollouts: int
    num_tokens: int
    num_trained_rollouts: int


class ColumnByName(Generic[T]):
    """An attribute that is the column of its name: what its owner's ``get`` has, and ``put`` takes."""

    def __set_name__(self, kind: type, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: type | None = None) -> T:
        return self if owner is None else owner.get(self._name)  # type: ignore[return-value]

    def __set__(self, owner: Any, value: T) -> None:
        owner.put(self._name, value)


@dataclass(frozen=True)
class TrainBatch:
    """One rollout's samples for one data-parallel rank, as columns with one row a sample (`slime.data.columns`)."""

    columns: Mapping[str, Values]
    """By name, of the declared type; those that the run does not have are not there."""
    steps: list[OptimizerStep] = field(default_factory=list)

    tokens = ColumnByName[Ragged]()
    loss_mask = ColumnByName[Ragged]()
    rewards = ColumnByName[np.ndarray]()
    raw_rewards = ColumnByName[np.ndarray]()
    truncated = ColumnByName[np.ndarray]()
    sample_indices = ColumnByName[np.ndarray]()
    rollout_ids = ColumnByName[np.ndarray]()
    group_indices = ColumnByName[np.ndarray]()
    rollout_mask_sums = ColumnByName[np.ndarray]()
    rollout_log_probs = ColumnByName[Ragged | None]()
    weight_versions = ColumnByName[Ragged | None]()
    metadata = ColumnByName[np.ndarray | None]()

    def __len__(self) -> int:
        return len(self.columns[TOKENS])

    def get(self, name: str) -> Values | None:
        """A column; None where the batch has none of that name."""
        return self.columns.get(name)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [rows], tokens of each sample, prompt and response."""
        return self._ragged(TOKENS).lengths

    @property
    def response_lengths(self) -> np.ndarray:
        """int64 [rows]"""
        return self._ragged(LOSS_MASK).lengths

    def name_of(self, row: int) -> str:
        """What messages call the sample of a row."""
        return f"sample {int(self.columns[SAMPLE_INDICES][row])}"

    def _ragged(self, name: str) -> Ragged:
        values = self.columns[name]
        assert isinstance(values, Ragged)
        return values

    def take(self, rows: np.ndarray, steps: list[OptimizerStep]) -> TrainBatch:
        """The chosen rows, in that order, copied, to be trained on in other steps."""
        columns = {
            name: values.take(rows) if isinstance(values, Ragged) else values[rows]
            for name, values in self.columns.items()
        }
        return TrainBatch(columns, steps)

    def changed(self, **columns: Any) -> TrainBatch:
        """With other columns under these names; None takes one out."""
        kept = {name: values for name, values in (dict(self.columns) | columns).items() if values is not None}
        return TrainBatch(kept, self.steps)


def text_batch(tokens: Sequence[int]) -> TrainBatch:
    """A batch of one text, to be passed through a model and not to be trained on: all its tokens but the first one are
    those of a response. Its one step has it as its one micro-batch."""
    count = len(tokens) - 1
    step = OptimizerStep([np.zeros(1, np.int64)], num_rollouts=1, num_tokens=count, num_trained_rollouts=1)
    columns: dict[str, Values] = {
        TOKENS: Ragged.from_rows([tokens], np.int32),
        LOSS_MASK: Ragged.from_rows([np.ones(count)], np.uint8),
        SAMPLE_INDICES: np.zeros(1, np.int64),
        ROLLOUT_MASK_SUMS: np.array([count]),
    }
    return TrainBatch(columns, [step])
