"""Experts of a layer that travel as one tensor, in words that both a server's processes and whoever pushes know.

What a model calls ``M.experts.3.down_proj.weight``, ``M.experts.4.down_proj.weight`` and so on, one after the other in
memory, are the rows of a matrix: one name and one tensor in the place of hundreds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # who only makes names does without
    from torch import Tensor

_MARK = "experts, stacked: "
"""How the name of a stack begins, and no weight's."""


@dataclass(frozen=True)
class Stack:
    """``count`` experts of ``module``, from number ``first`` on; each has ``parts``, ends of names with shapes."""

    module: str
    first: int
    count: int
    parts: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def name(self) -> str:
        """By which it travels."""
        return _MARK + json.dumps([self.module, self.first, self.count, self.parts])

    @classmethod
    def of_name(cls, name: str) -> Stack | None:
        """The inverse; None for the name of a weight."""
        if not name.startswith(_MARK):
            return None
        module, first, count, parts = json.loads(name.removeprefix(_MARK))
        return cls(module, first, count, tuple((end, tuple(shape)) for end, shape in parts))

    @property
    def numel(self) -> int:
        """Elements of one expert."""
        return sum(prod(shape) for _, shape in self.parts)

    def columns(self, rows: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Of ``rows`` [count, numel] each part of all experts: the end of its name, and a view [count, *shape]."""
        start = 0
        for end, shape in self.parts:
            yield end, rows[:, start : start + prod(shape)].unflatten(1, shape)
            start += prod(shape)

    def tensors(self, rows: Tensor) -> Iterator[tuple[str, Tensor]]:
        """All of them, as views, by the names that they have apart."""
        columns = list(self.columns(rows))
        for i in range(self.count):
            for end, column in columns:
                yield f"{self.module}.{self.first + i}.{end}", column[i]
