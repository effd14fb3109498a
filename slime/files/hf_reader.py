"""Reading a Hugging Face directory: which file holds which tensor by its header, and parts of tensors on demand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slime.files.block_scaled import SCALE_END, BlockScaled, block_sizes
from slime.files.hf_writer import INDEX_NAME
from slime.files.json_file import read_object
from slime.utils.errors import BadInputError

_LARGEST_HEADER = 100_000_000
"""Bytes, as in the safetensors library."""
_POINTER = b"version https://git-lfs"
_AGAIN = "copy or download it again"


@dataclass(frozen=True)
class Header:
    """What a file's header says of a tensor."""

    dtype: str
    """As the safetensors format names it."""
    shape: tuple[int, ...]
    file: str
    """Which it is in, by its name in the directory."""


def read_headers(directory: Path) -> dict[str, Header]:
    """Tensor name -> its header, of the files that a trainer reads: those of the index, or model.safetensors.
    BadInputError where there is neither, a file is missing, damaged or not whole, or lacks a tensor that the index has
    in it."""
    index, single = directory / INDEX_NAME, directory / "model.safetensors"
    if not index.is_file():
        if not single.is_file():
            raise BadInputError(
                f"{directory}: there is no {INDEX_NAME} and no {single.name} in it: copy or download them too"
            )
        return _read(single)
    file_of = read_object(index).get("weight_map")
    if not isinstance(file_of, dict) or not file_of or not all(isinstance(file, str) for file in file_of.values()):
        raise BadInputError(f"{index} is damaged: its weight_map should say which file each tensor is in: {_AGAIN}")
    headers = {file: _read(directory / file, f", and {INDEX_NAME} names it") for file in sorted(set(file_of.values()))}
    for name, file in file_of.items():
        if name not in headers[file]:
            raise BadInputError(f"{index} has {name} in {file}, which it is not in: {_AGAIN}")
    return {name: headers[file][name] for name, file in file_of.items()}


def read_engine_headers(directory: Path) -> dict[str, Header]:
    """`read_headers` of the files that an engine reads: without an index, of all safetensors files."""
    if (directory / INDEX_NAME).is_file():
        return read_headers(directory)
    return {name: header for file in sorted(directory.glob("*.safetensors")) for name, header in _read(file).items()}


def _read(file: Path, named: str = "") -> dict[str, Header]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            text = stream.read(length) if length <= _LARGEST_HEADER else start + stream.read(len(_POINTER))
    except FileNotFoundError:
        raise BadInputError(f"{file} is not there{named}: {_AGAIN}") from None
    if text.startswith(_POINTER):
        raise BadInputError(f"{file} is a git-LFS pointer and no weights: run git lfs pull there, or download it again")
    if not size:
        raise BadInputError(f"{file} is empty: {_AGAIN}")
    try:
        entries: dict[str, Any] = json.loads(text[:length])
        entries.pop("__metadata__", None)
        headers = {name: Header(entry["dtype"], tuple(entry["shape"]), file.name) for name, entry in entries.items()}
        whole = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        begins = "it does not begin with the header of a safetensors file"
        raise BadInputError(f"{file} is damaged: {begins}: {_AGAIN}") from None
    if size != whole:
        raise BadInputError(f"{file} is not whole: it has {size:,} bytes, and by its header {whole:,}: {_AGAIN}")
    return headers


def opened(file: Path) -> Any:
    """A safetensors file, to read in a ``with`` block; BadInputError where it is damaged."""
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise BadInputError(f"{file} is damaged: {error}") from error


class FileTensor:
    """A tensor in a safetensors file; indexing reads that part only."""

    def __init__(self, handle: Any, name: str) -> None:
        self._slice = handle.get_slice(name)
        self.shape: Sequence[int] = self._slice.get_shape()
        self.is_float8: bool = self._slice.get_dtype().startswith("F8_")

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        return self._slice[index]


class HFWeights:
    """The tensors of a Hugging Face directory by name, read on demand; files are opened once and memory-mapped. Of
    tensors in float8 with scales, their products are read, and the scales are no tensors of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.file_of = {name: header.file for name, header in read_headers(directory).items()}
        self._stack = ExitStack()
        self._handles: dict[str, Any] = {}
        self._block = block_sizes(directory)

    @property
    def is_quantized(self) -> bool:
        """Whether it has tensors in float8."""
        return self._block is not None

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.file_of if self._block is None or not name.endswith(SCALE_END))

    def __enter__(self) -> HFWeights:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> FileTensor | BlockScaled:
        tensor, scales = self._in_file(name), name + SCALE_END
        if not tensor.is_float8:
            return tensor
        if self._block is None or scales not in self.file_of:
            raise ValueError(
                f"{self.directory / self.file_of[name]}: {name} is in float8 and has no {scales}, or config.json no "
                "quantization_config"
            )
        return BlockScaled(tensor, self._in_file(scales), self._block)

    def _in_file(self, name: str) -> FileTensor:
        file = self.file_of[name]
        if file not in self._handles:
            self._handles[file] = self._stack.enter_context(opened(self.directory / file))
        return FileTensor(self._handles[file], name)


@contextmanager
def tensors_that_begin(directory: Path, prefixes: tuple[str, ...]) -> Iterator[dict[str, FileTensor | BlockScaled]]:
    """Within: the tensors of a Hugging Face directory whose names begin so, sorted; of one without weights none."""
    if not prefixes or not any(directory.glob("*.safetensors")):
        yield {}
        return
    with HFWeights(directory) as weights:
        yield {name: weights[name] for name in sorted(weights) if name.startswith(prefixes)}


def kept_dtype(tensor: FileTensor | BlockScaled) -> torch.dtype:
    """The type in which a tensor goes on: its own, and bfloat16 of what was dequantised."""
    return torch.bfloat16 if isinstance(tensor, BlockScaled) else tensor[(slice(0, 0),)].dtype


def whole(tensor: FileTensor | BlockScaled) -> Tensor:
    """All of a tensor, in its `kept_dtype`."""
    return tensor[:,].to(kept_dtype(tensor))
