"""Which weights a run's adapters belong to: a fingerprint of the frozen base, for checkpoints that lack the base."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from slime.backends.megatron.weights.gather import Gatherer
from slime.backends.megatron.weights.weights_io import global_weights
from slime.models import Family, Shape

_ROWS = 1024
"""How many rows of a matrix are made wider at once."""
_BUCKET_BYTES = 64 * 2**20


def record(chunks: Sequence[torch.nn.Module], family: Family, shape: Shape, source: str) -> None:
    """Keep with the model what a checkpoint of its adapters says of the base that it now holds, which is from
    ``source``; collective."""
    chunks[0].base = {"source": source, "sha256": fingerprint(chunks, family, shape)}  # type: ignore[assignment]


def recorded(chunks: Sequence[torch.nn.Module]) -> dict[str, str] | None:
    """What `record` has kept, the same on every rank; None of a model without adapters."""
    return cast("dict[str, str] | None", getattr(chunks[0], "base", None))


@torch.no_grad()
def fingerprint(chunks: Sequence[torch.nn.Module], family: Family, shape: Shape) -> str:
    """SHA-256 of the values of a model without MTP heads, less what adapters add; collective.

    The same on every rank, and for the same float32 values under every parallel layout and from files of any kind. It
    is taken of Hugging Face names and, for each row of a matrix, the sum of its values' bits read as whole numbers. So
    every weight counts; what does not show are changes within a row that make up for each other to the bit, as where
    its columns change places. Not seen is what the tables of `slime.models` leave out: padding of the vocabulary, an
    output layer that is the embedding, layers that a family only carries along.

    Ranks sum before they gather: it takes a pass over the weights, and little traffic and memory.
    """
    sums = {name: _row_sums(tensor) for name, tensor in global_weights(chunks)}
    found = {}
    for bucket in Gatherer(sums, family, shape).buckets(_BUCKET_BYTES, sums.__getitem__):
        for name, tensor in bucket:
            # Of a matrix that is cut along its rows, each rank gives a column of partial sums.
            rows = tensor.sum(1) if tensor.dim() > 1 else tensor
            found[name] = hashlib.sha256(rows.cpu().numpy().tobytes()).hexdigest()
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


def _row_sums(tensor: Tensor) -> Tensor:
    """int64: [rows, 1] of a matrix, and of a vector each entry."""
    if tensor.dim() < 2:
        return _bits(tensor)
    return torch.cat([_bits(rows).sum(1, keepdim=True) for rows in tensor.split(_ROWS)])


def _bits(tensor: Tensor) -> Tensor:
    """Float32 as a whole number: the same of a narrower type that is made wider."""
    return tensor.float().view(torch.int32).long()
