"""Hugging Face directories: what is in one; and writing one tensor by tensor, in any order and by several threads."""

from __future__ import annotations

import filecmp
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slime.files.exports import EXPORT_MARK
from slime.files.hf_reader import Header, read_headers
from slime.files.hf_writer import INDEX_NAME, complete, file_name
from slime.models import family_of, hf_config, weight_shape
from slime.models.family import check_names
from slime.utils.errors import BadInputError

logger = logging.getLogger(__name__)

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""And their names in the safetensors format."""
_DTYPE_OF = {name: dtype for dtype, name in _DTYPES.items()}
_OF_A_MODEL = (
    *("config.json", "configuration.json", "generation_config.json", "model.safetensors", INDEX_NAME),
    *("model-[0-9]*-of-[0-9]*.safetensors", "README.md", "LICENSE*", "NOTICE*", ".gitattributes", EXPORT_MARK),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "tokenizer.model", "tiktoken.model", "spiece.model", "*.tiktoken"),
    *("chat_template.json", "chat_template.jinja"),
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *("configuration_*.py", "modeling_*.py", "modular_*.py", "tokenization_*.py", "processing_*.py"),
)
"""The files of published models, and of what ``--save-hf`` writes."""


@dataclass(frozen=True)
class Spec:
    """What is known of a tensor before it is written."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class _Place(NamedTuple):
    file: str
    descriptor: int
    offset: int


class HFOutput:
    """Safetensors files of the size that their tensors will take, to be filled; a model after `finish`.

    The safetensors format is a header with the place of every tensor, then the tensors: since all shapes are known
    before the first tensor is, each is written to its place and never held together with others.
    """

    def __init__(self, directory: Path, specs: Mapping[str, Spec], shard_bytes: int) -> None:
        """``directory`` is an existing empty one, ``specs`` has every tensor that will be written, and a file
        ``shard_bytes``, which a single larger tensor may exceed."""
        self._directory, self._specs = directory, dict(specs)
        self._places: dict[str, _Place] = {}
        self._missing = set(specs)
        self._files: list[int] = []
        shards = cut_into_shards(specs, shard_bytes)
        for number, names in enumerate(shards):
            self._begin_file(file_name(number, len(shards)), names)

    def _begin_file(self, file: str, names: list[str]) -> None:
        # The order of the safetensors library: the widest types first, so that all are aligned.
        names = sorted(names, key=lambda name: (-self._specs[name].dtype.itemsize, name))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            spec = self._specs[name]
            begin, end = end, end + spec.nbytes
            header[name] = {"dtype": _DTYPES[spec.dtype], "shape": spec.shape, "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        descriptor = os.open(self._directory / file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self._files.append(descriptor)
        _write_at(descriptor, memoryview(len(text).to_bytes(8, "little") + text), 0)
        start = 8 + len(text)
        os.truncate(descriptor, start + end)
        for name in names:
            self._places[name] = _Place(file, descriptor, start + header[name]["data_offsets"][0])

    def write(self, name: str, tensor: Tensor) -> None:
        """Put a tensor into its place."""
        spec, place = self._specs[name], self._places[name]
        assert Spec.of(tensor) == spec, f"{name} is {Spec.of(tensor)}, and was announced as {spec}"
        data: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        try:
            _write_at(place.descriptor, memoryview(data), place.offset)
        except OSError as error:  # which does not say where
            raise OSError(error.errno, error.strerror, str(self._directory / place.file)) from error
        self._missing.discard(name)

    def finish(self, origin: Path, changes: Mapping[str, Any] | None = None) -> None:
        """Close the files and add what else makes a model: index, config, tokenizer, generation settings, those of
        ``origin``, a Hugging Face directory of the same architecture, with ``changes`` of config.json's entries."""
        assert not self._missing, f"never written: {sorted(self._missing)[:3]}"
        self.close()
        bytes_of: Counter[torch.dtype] = Counter()
        for spec in self._specs.values():
            bytes_of[spec.dtype] += spec.nbytes
        file_of = {name: place.file for name, place in self._places.items()}
        complete(self._directory, origin, file_of, bytes_of, changes)
        (self._directory / EXPORT_MARK).unlink(missing_ok=True)  # of the origin: this is not an export of a run

    def close(self) -> None:
        """Close the files, whole or not."""
        for descriptor in self._files:
            os.close(descriptor)
        self._files = []


def warn_of_tensors(directory: Path, names: Iterable[str]) -> None:
    """Say what a directory's tensors lack of the model of its config.json, or have besides.

    That is no error: a conversion that copies tensors also serves models that end otherwise, such as reward models. Of
    models that are in no table of `slime.models` it is not known.
    """
    try:
        config = hf_config(directory)
        family, shape = family_of(config), weight_shape(config)
    except ValueError:
        return
    try:
        check_names(family, shape, names, directory, family.untrained(config, shape))
    except ValueError as error:
        logger.warning("warning: %s; the output will be the same", error)


def other_than_a_model(directory: Path, origins: Sequence[Path] = ()) -> str:
    """The first thing in a directory that a new model in its place would take away for good; empty where there is none.

    Files with the names that models have are of the model, and so are those that lie in one of ``origins`` too, byte
    for byte: conversions copy a model's other files. Directories are not.
    """
    if not (directory / "config.json").is_file():
        return "no config.json"
    for path in sorted(directory.iterdir()):
        if path.is_dir():
            return f"{path.name}/"
        if not any(fnmatchcase(path.name, name) for name in _OF_A_MODEL) and not any(
            (origin / path.name).is_file() and filecmp.cmp(path, origin / path.name, shallow=False)
            for origin in origins
        ):
            return path.name
    return ""


def stored_specs(directory: Path, headers: Mapping[str, Header] | None = None) -> dict[str, Spec]:
    """The tensors of a Hugging Face directory, by the headers of its files, if these have been read already.
    BadInputError as of `read_headers`, or for a type that no model has."""
    headers = read_headers(directory) if headers is None else headers
    for name, header in headers.items():
        if header.dtype not in _DTYPE_OF:
            raise BadInputError(f"{directory / header.file}: {name} is of type {header.dtype}, which is not known here")
    return {name: Spec(header.shape, _DTYPE_OF[header.dtype]) for name, header in headers.items()}


def cut_into_shards(specs: Mapping[str, Spec], shard_bytes: int) -> list[list[str]]:
    """Tensors in the order of their layers, in files of at most ``shard_bytes``, or of one tensor."""
    shards: list[list[str]] = [[]]
    used = 0
    for name in sorted(specs, key=natural):
        if shards[-1] and used + specs[name].nbytes > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += specs[name].nbytes
    return shards


def natural(name: str) -> list[tuple[int, str]]:
    """Sorts names with numbers in them by the numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
