"""Rows of unequal length, as they cross the object store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Ragged:
    """Rows of unequal length in one flat array: row i is ``values[offsets[i]:offsets[i + 1]]``.

    Two flat arrays cross Ray's object store without a copy; a list of lists does not. An entry of a row may be an array
    of its own: ``values`` is [sum of lengths, *trailing].
    """

    values: np.ndarray
    offsets: np.ndarray

    @classmethod
    def from_rows(
        cls, rows: Iterable[Sequence[Any] | np.ndarray], dtype: Any, trailing: tuple[int, ...] = ()
    ) -> Ragged:
        """Join rows, of entries of shape ``trailing``; ``offsets`` is int64 and has one entry more than there are
        rows."""
        arrays = [np.asarray(row, dtype=dtype).reshape(-1, *trailing) for row in rows]
        offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
        np.cumsum([len(a) for a in arrays], out=offsets[1:])
        return cls(np.concatenate(arrays) if arrays else np.empty((0, *trailing), dtype=dtype), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """int64 [rows]"""
        return np.diff(self.offsets)

    def take(self, rows: Sequence[int] | np.ndarray) -> Ragged:
        """The chosen rows, in that order, copied."""
        return Ragged.from_rows([self[int(r)] for r in rows], self.values.dtype, self.values.shape[1:])
