"""What a push sends to an engine: a pickle, by names that the server's unpickler accepts.

It is made without importing SGLang, whose import takes seconds, and which on CPU works only with
`backends.sglang.cpu.stand_ins`, which a trainer must not have.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from slime.files.expert_stacks import Stack
from slime.files.hf_writer import NamedTensors

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
_ALIGNMENT = 16
"""Bytes; a view of the flat buffer as any dtype must start at a multiple of that dtype's size."""


@dataclass
class FlattenedTensorMetadata:
    """Where a tensor lies in the flat buffer: stands for SGLang's, which cannot be pickled without importing SGLang."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int
    """Bytes, as those before."""


def _load_from_bytes(data: bytes) -> None:
    """Stands for torch's function, which megatron-core replaces, in its own process, by one of its own."""


_MEANT = {
    FlattenedTensorMetadata.__name__: "sglang.srt.weight_sync.tensor_bucket",
    _load_from_bytes.__name__: "torch.storage",
}
"""The modules that have, by these names, what the above stands for."""
_WRITES_NAMES = 3
"""The last version of pickles that writes module and name of what it refers to out, as text."""


def flat_layout(bucket: NamedTensors) -> tuple[list[FlattenedTensorMetadata], int]:
    """Where each tensor lies in the flat buffer, and its size."""
    layout, end = [], 0
    for name, tensor in bucket:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + tensor.nbytes
        layout.append(
            FlattenedTensorMetadata(
                name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=start, end_idx=end, numel=tensor.nbytes
            )
        )
    return layout, end


def stacked(layout: list[FlattenedTensorMetadata]) -> list[FlattenedTensorMetadata]:
    """The same with one entry for experts of a layer that follow one another without a gap, alike in all but their
    numbers: a matrix with a row for each, by the name of a `Stack`. Only servers with slime's patches read it."""
    found: list[FlattenedTensorMetadata] = []
    for _, run in groupby(_runs(layout), lambda expert: expert[0]):
        experts = [members for _, members in run]
        stack = _stack(experts)
        found += [entry for members in experts for entry in members] if stack is None else [stack]
    return found


_Members = list[FlattenedTensorMetadata]


def _runs(layout: list[FlattenedTensorMetadata]) -> Iterator[tuple[int, _Members]]:
    """The tensors of one expert after another, or one that is no expert's; with a number of the run that it is of."""
    number, before = 0, None
    for expert, grouped in groupby(layout, lambda entry: (m := _EXPERT.fullmatch(entry.name)) and (m[1], int(m[2]))):
        for members in [list(grouped)] if expert else [[entry] for entry in grouped]:
            alike = [(_end(entry.name), entry.shape, entry.dtype) for entry in members]
            follows = expert and before and before == ((expert[0], expert[1] - 1), alike, members[0].start_idx)
            number += not follows
            before = (expert, alike, members[-1].end_idx)
            yield number, members


def _end(name: str) -> str:
    return name.rpartition(".experts.")[2].partition(".")[2]


def _stack(experts: list[_Members]) -> FlattenedTensorMetadata | None:
    """The entry of experts that follow one another; None of one alone, and where there are gaps within them."""
    (first, *_), last = experts[0], experts[-1][-1]
    size, dtype = last.end_idx - first.start_idx, first.dtype
    members = experts[0]
    if len(experts) < 2 or sum(entry.numel for entry in members) * len(experts) != size:
        return None
    if any(entry.dtype != dtype for entry in members):
        return None
    match = _EXPERT.fullmatch(first.name)
    assert match is not None
    parts = tuple((_end(entry.name), tuple(entry.shape)) for entry in members)
    stack = Stack(match[1], int(match[2]), len(experts), parts)
    shape = torch.Size((stack.count, stack.numel))
    return FlattenedTensorMetadata(stack.name, shape, dtype, first.start_idx, last.end_idx, size)


def serialize(payload: dict[str, Any], reduce: Callable[[object], Any]) -> str:
    """A base64 pickle that an engine reads; ``reduce`` is as `pickle.Pickler.reducer_override`."""
    stream = io.BytesIO()
    _Pickler(stream, reduce).dump(payload)
    pickled = stream.getvalue()
    for name, module in _MEANT.items():
        pickled = pickled.replace(f"c{__name__}\n{name}\n".encode(), f"c{module}\n{name}\n".encode())
    return base64.b64encode(pickled).decode()


def by_value(pickled: object) -> Any:
    """A tensor as its bytes, not as shared memory; for `serialize`."""
    if isinstance(pickled, torch.storage.TypedStorage):
        return _load_from_bytes, pickled.__reduce__()[1]
    return pickled.__reduce_ex__(_WRITES_NAMES) if isinstance(pickled, torch.Tensor) else NotImplemented


class _Pickler(ForkingPickler):
    """Not a class made for each payload: that would keep what its ``reduce`` belongs to, gibibytes of a GPU, until
    Python's garbage collector next looks for cycles."""

    def __init__(self, stream: io.BytesIO, reduce: Callable[[object], Any]) -> None:
        super().__init__(stream, _WRITES_NAMES)
        self._reduce = reduce

    def reducer_override(self, pickled: object) -> Any:
        return self._reduce(pickled)
