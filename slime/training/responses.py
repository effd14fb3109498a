"""Between a packed stream, of which a context-parallel rank holds a part, and whole responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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


@dataclass(frozen=True)
class Responses:
    """Where the response tokens of a micro-batch lie; N of them in R responses.

    A token vector has one entry for each of the T tokens that this rank holds, aligned as in `MicroBatch`; a response
    vector has one for each response token, response after response, and is the same on all context-parallel ranks. An
    entry may be a tensor of its own: [T, *trailing] and [N, *trailing].
    """

    positions: Tensor
    """int64 [N], in the whole stream, of the prediction of each response token."""
    lengths: Tensor
    """int64 [R], on the CPU."""
    local: Tensor
    """int64 [T], in the whole stream, of each token of this rank."""
    stream_length: int
    group: dist.ProcessGroup | None
    """The context-parallel ranks."""

    def gather(self, column: Tensor) -> Tensor:
        """A token vector as a response vector, differentiable; collective over the context-parallel ranks."""
        stream = column.new_zeros((self.stream_length, *column.shape[1:])).index_put((self.local,), column)
        return sum_over_ranks(stream, self.group)[self.positions]

    def scatter(self, values: Tensor) -> Tensor:
        """A response vector as a token vector, 0 outside the responses; differentiable."""
        stream = values.new_zeros((self.stream_length, *values.shape[1:])).index_put((self.positions,), values)
        return stream[self.local]

    def rows(self, column: Tensor) -> list[Tensor]:
        """A token vector as one tensor a response; collective as `gather` is."""
        return list(self.gather(column).split(self.lengths.tolist()))
