"""Who a training rank's neighbours are: its place in each of the ways in which work is split, whatever the backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """Those between which one way of splitting divides the work, and which of them this one is."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    """None of a process that is alone."""

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Ranks:
        """The ranks of a process group."""
        return cls(group.rank(), group.size(), group)


@dataclass(frozen=True)
class Parallel:
    """A rank's place in the run's layout; of one process without anything."""

    dp: Ranks = Ranks()
    """Data parallel: each takes rows of its own."""
    cp: Ranks = Ranks()
    """Context parallel: each takes parts of the same rows."""
    dp_cp: Ranks = Ranks()
    """Both: together they have a step's tokens, over which losses and metrics are summed."""
    tp: Ranks = Ranks()
    """Tensor parallel: each holds a part of every matrix."""
    pp: Ranks = Ranks()
    """Pipeline stages, in order."""

    @property
    def is_last_stage(self) -> bool:
        """Whether the model's output, and so everything that is made of it, is here."""
        return self.pp.rank == self.pp.size - 1

    @property
    def counts_rows(self) -> bool:
        """Whether a sum over `dp_cp` is to have what this rank counts of its rows, which its `cp` neighbours share."""
        return self.cp.rank == 0

    def named(self) -> dict[str, int]:
        """The ranks, as debug data call them."""
        return {
            "rank": dist.get_rank(),
            "data_parallel_rank": self.dp.rank,
            "context_parallel_rank": self.cp.rank,
            "tensor_parallel_rank": self.tp.rank,
            "pipeline_parallel_rank": self.pp.rank,
        }


class _SumOverRanks(torch.autograd.Function):
    """An all-reduce whose gradient is one too: every rank's loss may depend on every rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum over a group's ranks, differentiable; None is a group of one."""
    return x if group is None or group.size() == 1 else _SumOverRanks.apply(x, group)


def gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """What each of a group's ranks gave, on all of them; None is a group of one."""
    if group is None or group.size() == 1:
        return [value]
    of_ranks = [None] * group.size()
    dist.all_gather_object(of_ranks, value, group)
    return of_ranks
