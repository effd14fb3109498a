"""What is in a Hugging Face directory by the headers of its safetensors files: none of a tensor's numbers is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    file_of = _weight_map(index)
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


def _weight_map(index: Path) -> dict[str, str]:
    file_of = read_object(index).get("weight_map")
    if not isinstance(file_of, dict) or not file_of or not all(isinstance(file, str) for file in file_of.values()):
        raise BadInputError(f"{index} is damaged: its weight_map should say which file each tensor is in: {_AGAIN}")
    return file_of


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
