"""Device memory of tensors, given back while others use the device, and restored; every view of them stays valid."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from itertools import accumulate

import torch
from torch import Tensor

from slime.utils import device

_ALIGNMENT = 512


class SleepingTensors:
    """Tensors whose device memory is given back, and taken again, at the same time.

    Not the tensors but the storages beneath are emptied: parameters, the buffers that they are views of, optimizer
    state and whoever else refers to them need not know. An allocator that pauses (torch_memory_saver) would do it too,
    for all of a process's memory alike; here gradients cost no copy, and weights can stay when the rest goes.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], *, keep: bool) -> None:
        """
        Args:
            tensors: what sleeps, read anew each time; several may share a storage.
            keep: whether their values are to be there again; otherwise they are undefined after `wake`.
        """
        self._tensors = tensors
        self._keep = keep
        self._host = torch.empty(0, dtype=torch.uint8)
        self._asleep: list[tuple[torch.UntypedStorage, int]] = []
        self._awake = 0

    def sleep(self, budget: int = 0) -> int:
        """Give the memory back to torch, but for what fits into ``budget`` bytes, storages in their order; how many
        those are. `device.release_unused` hands on what is given back. What sleeps already stays so."""
        if self._asleep:
            return self._awake
        staying, sleeping = _divided(self._storages(), budget)
        self._awake = sum(storage.nbytes() for storage in staying)
        self._asleep = [(storage, storage.nbytes()) for storage in sleeping]
        if self._keep and self._asleep:
            self._make_room()
            device.wait_side_stream()
            self._copy(lambda host, own: host.copy_(own, non_blocking=True))
            device.synchronize()
        for storage, _ in self._asleep:
            storage.resize_(0)
        return self._awake

    def fitting(self, budget: int) -> int:
        """How many bytes of them would stay awake in a `sleep`; they are awake now."""
        return sum(storage.nbytes() for storage in _divided(self._storages(), budget)[0])

    def _storages(self) -> list[torch.UntypedStorage]:
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in self._tensors()}
        return [storage for storage in storages.values() if storage.nbytes()]

    def wake(self, *, on_side_stream: bool = False) -> None:
        """Take the memory again, with the values where they are kept.

        With ``on_side_stream`` they come while other work goes on: who needs them calls `device.wait_side_stream`.
        """
        for storage, nbytes in self._asleep:
            storage.resize_(nbytes)
        if self._keep and self._asleep:
            with device.side_stream() if on_side_stream else contextlib.nullcontext():
                self._copy(lambda host, own: own.copy_(host, non_blocking=True))
            if not on_side_stream:
                device.synchronize()
        self._asleep = []

    def _make_room(self) -> None:
        *_, size = places(nbytes for _, nbytes in self._asleep)
        if self._host.numel() < size:
            # Gone before there is more, as together they might not fit, and not while values still come from it.
            device.synchronize()
            self._host = self._host.new_empty(0)
            self._host = device.pinned(size)

    def _copy(self, copy: Callable[[Tensor, Tensor], Tensor]) -> None:
        """``copy(host, own)`` for each storage, as bytes."""
        starts = places(nbytes for _, nbytes in self._asleep)
        for (storage, nbytes), start in zip(self._asleep, starts, strict=False):
            own = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            copy(self._host[start : start + nbytes], own)


def _divided(
    storages: list[torch.UntypedStorage], budget: int
) -> tuple[list[torch.UntypedStorage], list[torch.UntypedStorage]]:
    """Those that fit into so many bytes, in their order, and the others; a storage fits as a whole or not."""
    staying: list[torch.UntypedStorage] = []
    for storage in storages:
        if storage.nbytes() <= budget:
            budget -= storage.nbytes()
            staying.append(storage)
    kept = {storage._cdata for storage in staying}
    return staying, [storage for storage in storages if storage._cdata not in kept]


def places(sizes: Iterable[int]) -> list[int]:
    """Where each of so many bytes begins in a buffer of them all, and last where that ends."""
    return list(accumulate((-(-nbytes // _ALIGNMENT) * _ALIGNMENT for nbytes in sizes), initial=0))
