"""What a push sends to an engine: a pickle, by names that the server's unpickler accepts.

It is made without importing SGLang, whose import takes seconds, and which on CPU works only with
`backends.sglang.cpu_stand_ins`, which a trainer must not have.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from slime.files.hf_writer import NamedTensors

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
