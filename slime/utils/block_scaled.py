"""Weights in float8 with a scale for every block, as DeepSeek publishes them: made, and dequantised as they are read.

A weight W [n, k] becomes e4m3 values Q and a float32 scale for every block of, say, 128 x 128, ``weight_scale_inv``
[ceil(n / 128), ceil(k / 128)], with W = Q * scale; blocks at the edges are smaller.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max

SCALE_END = "_scale_inv"
"""The scales of a tensor have its name and this."""

_KEPT = re.compile(r"norm|embed|lm_head|router|mlp\.gate\.|shared_expert_gate|eh_proj|shared_head|visual|vision|lora_")
"""What engines keep in high precision: norms, embeddings, output layers, routers, adapters."""


def is_linear(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is, by its name, the matrix of a linear layer that engines have kernels in float8 for."""
    return name.endswith(".weight") and ".layers." in name and len(shape) == 2 and _KEPT.search(name) is None


def quantise(weight: Tensor, block: Sequence[int]) -> tuple[Tensor, Tensor]:
    """A matrix [n, k] -> values of type e4m3 and the float32 scales of its blocks.

    The largest entry of every block becomes the largest number of the type; a block of zeros has scale 1. The bytes are
    the same on every device.
    """
    (rows, columns), (high, wide) = weight.shape, block
    padded = F.pad(weight.float(), (0, -columns % wide, 0, -rows % high))
    blocks = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high))  # [block row, row, block column, column]
    largest = blocks.abs().amax(dim=(1, 3))
    # By a tensor: by a number, a GPU multiplies with its reciprocal, which is another last bit.
    scales = torch.where(largest > 0, largest / torch.full_like(largest, LARGEST), 1.0)
    values = (blocks / scales[:, None, :, None]).clamp_(-LARGEST, LARGEST).to(FP8)
    return values.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous(), scales


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
