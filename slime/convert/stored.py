"""The tensors of a torch.distributed.checkpoint directory, and parts of them, read without a model."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from slime.utils.errors import BadInputError

METADATA = ".metadata"
"""The file that lists the tensors; it is written last."""


class StoredTensors:
    """Tensors by key; several threads may read at once."""

    def __init__(self, directory: Path) -> None:
        """
        Raises:
            BadInputError: the directory holds no such checkpoint, or one that cannot be read.
        """
        if not (directory / METADATA).is_file():
            raise BadInputError(f"{directory} is no torch.distributed checkpoint: there is no {METADATA} in it")
        self.directory = directory
        self._reader = FileSystemReader(directory)
        try:
            metadata = self._reader.read_metadata()
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError) as error:
            raise BadInputError(f"{directory / METADATA} cannot be read: {error}") from error
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        every = metadata.state_dict_metadata.items()
        self._tensors = {key: entry for key, entry in every if isinstance(entry, TensorStorageMetadata)}

    def __contains__(self, key: object) -> bool:
        return key in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self._tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        """Of the tensor."""
        dtype = self._tensors[key].properties.dtype
        assert isinstance(dtype, torch.dtype)
        return dtype

    def cuts(self, key: str, dim: int) -> list[tuple[int, int]]:
        """The (start, stop) along a dimension of the pieces that the tensor is stored in, in order."""
        found = {(chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim]) for chunk in self._tensors[key].chunks}
        return sorted(found)

    def read(self, key: str, offsets: tuple[int, ...] | None = None, sizes: tuple[int, ...] | None = None) -> Tensor:
        """A tensor, or the part of it that begins at ``offsets``; only the stored pieces that it touches are read.

        Raises:
            BadInputError: files are missing or damaged, or do not hold all of it.
        """
        entry = self._tensors[key]
        sizes = self.shape(key) if sizes is None else sizes
        region = ChunkStorageMetadata(torch.Size(offsets or (0,) * len(sizes)), torch.Size(sizes))
        items = create_read_items_for_chunk_list(key, entry, [region])
        if sum(prod(item.lengths) for item in items) != prod(sizes):
            raise BadInputError(f"{self.directory}: the stored pieces of {key} do not make up the whole of it")
        target = torch.empty(sizes, dtype=self.dtype(key))
        try:
            self._reader.read_data(LoadPlan(items), _Into(target)).wait()
        except (OSError, EOFError, RuntimeError, AssertionError, KeyError, pickle.UnpicklingError) as error:
            raise BadInputError(f"{self.directory}: cannot read {key}: {error}") from error
        return target


class _Into(DefaultLoadPlanner):
    """Puts what is read into one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self._target
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass
