"""Weights in float8 with a scale for every block, as DeepSeek publishes them, dequantised as they are read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

SCALE_END = "_scale_inv"
"""The scales of a tensor have its name and this."""


def num_blocks(shape: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """How many blocks a tensor has along each dimension; those at the edges may be smaller."""
    return tuple(-(-extent // size) for extent, size in zip(shape, sizes, strict=True))


def block_sizes(directory: Path) -> tuple[int, ...] | None:
    """Rows and columns of a block of a Hugging Face directory's quantized tensors; None where there are none.

    Raises:
        ValueError: tensors that are quantized in another way.
    """
    config = json.loads((directory / "config.json").read_text())
    quantization: dict[str, Any] | None = config.get("quantization_config")
    if not quantization:
        return None
    method, sizes = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method != "fp8" or not sizes:
        raise ValueError(
            f"{directory / 'config.json'}: quantization_config with quant_method {method!r} and weight_block_size "
            f"{sizes} is not supported; supported is fp8 with blocks, or convert the weights to bfloat16"
        )
    return tuple(sizes)


class BlockScaled:
    """A float8 tensor times the scales of its blocks, in float32; indexing reads and computes that part only.

    Args:
        values: float8 [rows, columns].
        scales: [rows / block rows, columns / block columns], rounded up.
        sizes: rows and columns of a block.
    """

    def __init__(self, values: Any, scales: Any, sizes: Sequence[int]) -> None:
        self._values, self._scales, self._sizes = values, scales, sizes
        self.shape: Sequence[int] = values.shape
        if tuple(scales.shape) != num_blocks(self.shape, sizes):
            raise ValueError(f"{list(scales.shape)} scales for {list(self.shape)} values in blocks of {list(sizes)}")

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        full = (*index, *[slice(None)] * (len(self.shape) - len(index)))
        ranges = [part.indices(extent)[:2] for part, extent in zip(full, self.shape, strict=True)]
        covering = tuple(
            slice(start // size, -(-stop // size)) for (start, stop), size in zip(ranges, self._sizes, strict=True)
        )
        scales: Tensor = self._scales[covering].float()
        for dim, ((start, stop), size) in enumerate(zip(ranges, self._sizes, strict=True)):
            scales = scales.repeat_interleave(size, dim).narrow(dim, start % size, stop - start)
        values: Tensor = self._values[full].float()
        return values.mul_(scales)
