"""Reading a Hugging Face directory: which file holds which tensor, and parts of tensors on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slime.files.block_scaled import SCALE_END, BlockScaled, block_sizes
from slime.files.hf_headers import read_headers
from slime.utils.errors import BadInputError


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
