"""Threads that stand for the ranks of a group: as much of a process group as vocabulary parallelism uses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """A group; `run` has a thread for each rank, in which collectives of ``torch.distributed`` are the group's."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.barrier, self.local = threading.Barrier(size, timeout=60), threading.local()
        self.slots = [torch.empty(0)] * size
        monkeypatch.setattr(dist, "all_reduce", self.all_reduce)
        monkeypatch.setattr(dist, "all_gather", self.all_gather)

    def rank(self) -> int:
        return self.local.rank

    def size(self) -> int:
        return len(self.slots)

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        every = torch.stack(self._exchanged(tensor))
        tensor.copy_(every.amax(0) if op == dist.ReduceOp.MAX else every.sum(0))

    def all_gather(self, parts: list[Tensor], tensor: Tensor, group: Any = None) -> None:
        for part, other in zip(parts, self._exchanged(tensor), strict=True):
            part.copy_(other)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What ``work`` gives on each rank."""
        results: list[Any] = [None] * self.size()

        def on_rank(rank: int) -> None:
            self.local.rank = rank
            results[rank] = work(rank)

        threads = [threading.Thread(target=on_rank, args=(rank,)) for rank in range(self.size())]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results

    def _exchanged(self, tensor: Tensor) -> list[Tensor]:
        self.slots[self.rank()] = tensor.clone()
        self.barrier.wait()
        every = list(self.slots)
        self.barrier.wait()
        return every
