"""Keys and values of all context-parallel ranks: gathered for a layer's attention, and again for its gradient.

Between the two a rank keeps its own: what is kept for the gradients of all layers falls with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_At = tuple[int, torch.Size, tuple[int, ...]]


def attend_in_context(
    attend: Callable[[Tensor, Tensor], Tensor],
    key: Tensor,
    value: Tensor,
    index: Tensor,
    group: dist.ProcessGroup,
    *,
    again: bool = True,
) -> Tensor:
    """What ``attend`` gives for the keys and values that this rank's queries may see.

    Where it keeps these for the gradient as they are handed to it, as kernels do that compute on packed sequences,
    they are not kept, but gathered again: the same bytes.

    Args:
        attend: of keys [seen, heads, channels] and values [seen, heads, value channels].
        key: [tokens, heads, channels] of this rank.
        value: [tokens, heads, value channels] of this rank.
        index: int64 [seen], positions in the stream of all ranks' tokens, rank after rank.
        group: the context-parallel ranks, each with as many tokens.
        again: False keeps them.
    """
    own, widths = torch.cat((key, value), dim=-1), (key.size(-1), value.size(-1))

    def seen(gathered: Tensor) -> list[Tensor]:
        return [part.index_select(0, index) for part in gathered.split(widths, dim=-1)]

    detached = own.detach()
    inputs = seen(_Gather.apply(own, group))
    if not again:
        return attend(*inputs)
    kept = _GatheredAgain(inputs, lambda: seen(_gathered(detached, group)))
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
        return attend(*inputs)


class _GatheredAgain:
    """Stands for some tensors among those that are kept for a gradient, until that is computed."""

    def __init__(self, tensors: list[Tensor], make: Callable[[], list[Tensor]]) -> None:
        """``make`` makes the tensors again; they themselves are not held."""
        self._places = [_place(tensor) for tensor in tensors]
        self._make = make
        self._packed = self._given = 0
        self._made: list[Tensor] = []

    def pack(self, tensor: Tensor) -> Tensor | int:
        """Which of them ``tensor`` is; another one stays as it is."""
        if (place := _place(tensor)) not in self._places:
            return tensor
        self._packed += 1
        return self._places.index(place)

    def unpack(self, packed: Tensor | int) -> Tensor:
        """Made for the first that is asked for, all at once, and let go with the last."""
        if isinstance(packed, Tensor):
            return packed
        self._made = self._made or self._make()
        tensor = self._made[packed]
        self._given += 1
        if self._given % self._packed == 0:
            self._made = []
        return tensor


def _place(tensor: Tensor) -> _At:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    gathered = x.new_empty(group.size() * x.size(0), *x.shape[1:])
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
    return gathered


class _Gather(torch.autograd.Function):
    """[t, ...] of every context rank -> [n * t, ...] on all; backward sums the ranks' gradients of the own part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        own = grad.new_empty(grad.size(0) // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None
