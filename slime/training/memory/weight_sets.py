"""Several sets of weights for one model: host copies that take turns on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor

from slime.training.memory.sleep import places
from slime.utils import device

CURRENT = "current"
REFERENCE = "ref"
TEACHER = "teacher"


class WeightSets:
    """The model holds one set, named by ``current``; others wait in host memory, pinned where there is a GPU.

    The first one is trained; all others stay as they were kept. With ``only_trained``, as of adapters, frozen
    parameters are the same in every set, and kept in none.
    """

    def __init__(self, model_chunks: list[torch.nn.Module], current: str, *, only_trained: bool = False) -> None:
        self._chunks = model_chunks
        self._only_trained = only_trained
        self._trained = current
        self._copies: dict[str, list[Tensor]] = {}
        self._spare: list[Tensor] | None = None
        """Of a set that was dropped: to pin memory takes longer than to fill it."""
        self.current = current

    def keep(self, name: str) -> None:
        """Copy what the model holds to host memory, as ``name``."""
        if name not in self._copies:
            self._copies[name], self._spare = self._spare or _room_for(list(self._differing())), None
        for copy, tensor in zip(self._copies[name], self._differing(), strict=True):
            copy.copy_(tensor, non_blocking=True)
        device.synchronize_stream()

    def has(self, name: str) -> bool:
        """Whether there is a set of that name."""
        return name in (self.current, *self._copies)

    def keep_loaded(self, name: str, load: Callable[[], None]) -> None:
        """Keep, as ``name``, what ``load`` puts into the model, which has its own set again afterwards."""
        own = self.current
        self.keep(own)
        load()
        self.keep(name)
        self.current = name
        self.switch(own)

    def switch(self, name: str) -> None:
        """Put the kept set ``name`` into the model; the trained one is kept. KeyError where ``name`` never was."""
        if name == self.current:
            return
        if name not in self._copies:
            raise KeyError(f"no weights named {name!r} were loaded, only {sorted({self.current, *self._copies})}")
        if self.current == self._trained:
            self.keep(self.current)
        for copy, tensor in zip(self._copies[name], self._differing(), strict=True):
            tensor.copy_(copy, non_blocking=True)
        device.synchronize_stream()  # a set that is dropped takes its memory along
        self.current = name

    def drop(self, name: str) -> None:
        """Forget a kept set; the next new one gets its memory."""
        self._spare = self._copies.pop(name)

    @contextmanager
    def switched(self, name: str) -> Iterator[None]:
        """Within: the set ``name`` is in the model; after: the one before."""
        before = self.current
        self.switch(name)
        try:
            yield
        finally:
            self.switch(before)

    def on_device(self) -> Iterator[Tensor]:
        """The model's parameters and buffers."""
        # Read anew each time: data-parallel wrapping moves parameters into its own buffers.
        for tensor in self._tensors():
            yield tensor.data

    def _differing(self) -> Iterator[Tensor]:
        for tensor in self._tensors():
            if not self._only_trained or tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter):
                yield tensor.data

    def _tensors(self) -> Iterator[Tensor]:
        for module in self._chunks:
            yield from chain(module.parameters(), module.buffers())


def _room_for(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Host memory for copies of them, in one piece: torch's own pinned memory takes a power of two for each."""
    *starts, size = places(tensor.nbytes for tensor in tensors)
    room = device.pinned(max(size, 1))
    return [
        room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=True)
    ]
