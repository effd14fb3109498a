"""Weights in float8 with a scale for every block, as DeepSeek publishes them: made, and dequantised as they are read.

A weight W [n, k] becomes e4m3 values Q and a float32 scale for every block of, say, 128 x 128, ``weight_scale_inv``
[ceil(n / 128), ceil(k / 128)], with W = Q * scale; blocks at the edges are smaller.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.files.json_file import read_object

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
_MANTISSA_BITS, _SMALLEST = 3, -9
"""Bits, and the exponent of the smallest number."""
_PARTS = 4
"""Of the way from a number to the middle between two. Each has as many weights, where those were never in float8."""
_EVENLY = 0.7548776662466927, 0.5698402909980532
"""Multiples of both, less their whole parts, fill a square evenly: powers of 1 / x with x^3 = x + 1 (the R2 sequence of
http://extremelearning.com.au/unreasonable-effectiveness-of-quasirandom-sequences)."""
_SHORTEST, _LONGEST = 2**-16, 1 - 2**-16
"""Nearer to a number, float32's own rounding would decide: the largest number's place and almost 1 are one more."""
_AT_ONCE = 2**22
"""Elements."""

SCALE_END = "_scale_inv"
"""The scales of a tensor have its name and this."""

_KEPT = re.compile(r"norm|embed|lm_head|router|mlp\.gate\.|shared_expert_gate|eh_proj|shared_head|visual|vision|lora_")
"""What engines keep in high precision: norms, embeddings, output layers, routers, adapters."""


def is_linear(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is, by its name, the matrix of a linear layer that engines have kernels in float8 for."""
    return name.endswith(".weight") and ".layers." in name and len(shape) == 2 and _KEPT.search(name) is None


def quantise(weight: Tensor, block: Sequence[int], *, in_the_mean: bool = False) -> tuple[Tensor, Tensor]:
    """A matrix [n, k] -> values of type e4m3 and the float32 scales of its blocks.

    The largest entry of every block becomes the largest number of the type; a block of zeros has scale 1.

    Args:
        in_the_mean: round weights that were in float8 before, and have moved little since, up and down so that their
            mean is right. To the nearest, each would be what it was until it has moved by half a step, which is a 32nd
            to a 16th of it: nothing of what a trainer learns for hundreds of steps.

    Returns:
        The same bytes on every device; with ``in_the_mean`` on every device of one kind, whose powers of two may differ
        from another's in the last bit. ValueError where an entry is not finite.
    """
    high, wide = block
    # A part at a time, whole blocks: in float32 this takes many times a weight's memory.
    rows = high * max(1, _AT_ONCE // (high * weight.size(1)))
    parts = [_quantise(part, high, wide, in_the_mean) for part in weight.split(rows)]
    return torch.cat([values for values, _ in parts]), torch.cat([scales for _, scales in parts])


def _quantise(weight: Tensor, high: int, wide: int, in_the_mean: bool) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % wide, 0, -rows % high))
    blocks = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high))  # [block row, row, block column, column]
    largest = blocks.abs().amax(dim=(1, 3))
    if not largest.isfinite().all():
        raise ValueError("a weight is not finite, and has no place in float8")
    # By a tensor: by a number, a GPU multiplies with its reciprocal, which is another last bit.
    scales = torch.where(largest > 0, largest / torch.full_like(largest, LARGEST), 1.0)
    scaled = (blocks / scales[:, None, :, None]).clamp_(-LARGEST, LARGEST).flatten(2, 3).flatten(0, 1)
    if in_the_mean:
        scaled = _rounded_in_the_mean(scaled)
    return scaled[:rows, :columns].to(FP8), scales


def _rounded_in_the_mean(scaled: Tensor) -> Tensor:
    """Numbers of the type, with the mean of these numbers; or, if they lie anywhere between such, themselves.

    A number goes up where it is beyond a threshold between its neighbours. Thresholds fill [0, 1] evenly along rows and
    columns, and are the same each time: a weight that has not moved does not change.
    """
    steps = torch.ldexp(torch.ones_like(scaled), (scaled.frexp().exponent - 1 - _MANTISSA_BITS).clamp_(min=_SMALLEST))
    places = scaled.abs() / steps
    if _are_anywhere(places):
        return scaled
    row, column = (
        (torch.arange(size, dtype=torch.float64) * ratio).frac_().float().to(scaled.device)
        for size, ratio in zip(scaled.shape, _EVENLY, strict=True)
    )
    thresholds = (row[:, None] + column).frac_().clamp_(_SHORTEST, _LONGEST)
    return places.add_(thresholds).floor_().mul_(steps).copysign_(scaled)


def _are_anywhere(places: Tensor) -> bool:
    """Whether places between whole numbers are as frequent as these; places of 0 do not count."""
    distance = (places - places.round()).abs_().mul_(2 * _PARTS).int().clamp_(max=_PARTS - 1)
    found = distance.flatten().bincount(minlength=_PARTS).tolist()
    found[0] -= places.numel() - int(places.count_nonzero())
    count = sum(found)
    # Less than the emptiest part of matrices in bfloat16 that were never in float8 had in thousands of draws.
    return min(found) * _PARTS >= 0.9 * count - 30 * count**0.5


def num_blocks(shape: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """How many blocks a tensor has along each dimension; those at the edges may be smaller."""
    return tuple(-(-extent // size) for extent, size in zip(shape, sizes, strict=True))


def block_sizes(directory: Path) -> tuple[int, ...] | None:
    """Rows and columns of a block of a Hugging Face directory's quantized tensors; None where there are none,
    ValueError where they are quantized in another way."""
    config = read_object(directory / "config.json")
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
    """A float8 tensor [rows, columns] times the scales of its blocks (of ``sizes``), in float32; indexing reads and
    computes that part only. ``scales`` are [rows / block rows, columns / block columns], rounded up."""

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
