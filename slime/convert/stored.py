"""The tensors of a torch.distributed.checkpoint directory, and parts of them, read without a model."""

from __future__ import annotations

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
        """BadInputError where the directory holds no such checkpoint, or one that cannot be read."""
        if not (directory / METADATA).is_file():
            raise BadInputError(f"{directory} is not a torch.distributed checkpoint: there is no {METADATA} in it")
        self.directory = directory
        self._reader = FileSystemReader(directory)
        try:
            metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(metadata, is_coordinator=True)
            self._place_of, every = metadata.storage_data, metadata.state_dict_metadata.items()
        except Exception as error:  # a damaged pickle may raise any, or hold anything
            raise BadInputError(f"{directory / METADATA} cannot be read: {error}") from error
        self._tensors = {key: entry for key, entry in every if isinstance(entry, TensorStorageMetadata)}

    def __contains__(self, key: object) -> bool:
        return key in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def lacking_files(self) -> list[str]:
        """The files of its tensors that are not there, or end before a tensor does."""
        ends: dict[str, int] = {}
        for place in self._place_of.values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        files = {name: self.directory / name for name in sorted(ends)}
        return [name for name, file in files.items() if not file.is_file() or file.stat().st_size < ends[name]]

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
        BadInputError where files are missing or damaged, or do not hold all of it."""
        entry = self._tensors[key]
        sizes = self.shape(key) if sizes is None else sizes
        region = ChunkStorageMetadata(torch.Size(offsets or (0,) * len(sizes)), torch.Size(sizes))
        items = create_read_items_for_chunk_list(key, entry, [region])
        if sum(prod(item.lengths) for item in items) != prod(sizes):
            raise BadInputError(f"{self.directory}: the stored pieces of {key} do not make up the whole of it")
        target = torch.empty(sizes, dtype=self.dtype(key))
        for item in items:
            self._read_piece(item, target)
        return target

    def _read_piece(self, item: ReadItem, target: Tensor) -> None:
        key, place = item.storage_index.fqn, self._place_of.get(item.storage_index)
        if place is None:
            raise BadInputError(f"{self.directory / METADATA} does not say where a piece of {key} is")
        file = self.directory / place.relative_path
        try:
            self._reader.read_data(LoadPlan([item]), _Into(target)).wait()
        except Exception as error:  # of the file system, of the zip archive, or of the pickle in it
            reason = str(error).partition(". ")[0] or type(error).__name__
            if file.is_file() and file.stat().st_size < place.offset + place.length:
                reason = "the file is cut short"
            raise BadInputError(f"{file}: cannot read {key}: {reason}") from error


class _Into(DefaultLoadPlanner):
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
