"""Kernels in Triton, where one that torch compiles moves more memory than it has to; each has a test against float64.

Imported where there is a GPU only: Triton is not installed elsewhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDTH = 1024
"""Channels that one block of threads works on at a time."""
_NORM_BLOCKS = 512
"""Blocks of threads that share the rows, whatever the GPU: gradients of weights are sums of so many parts."""


@triton.jit
def _swiglu_grad(
    grad: tl.tensor,
    y: tl.tensor,
    weights: tl.tensor,
    y_grad: tl.tensor,
    weights_grad: tl.tensor,
    channels: tl.tensor,
    weighted: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    y += row * 2 * channels
    y_grad += row * 2 * channels
    grad += row * channels
    weight = tl.load(weights + row).to(tl.float32) if weighted else 1.0
    of_weight = tl.zeros([WIDTH], tl.float32)
    for start in range(0, channels, WIDTH):
        place = start + tl.arange(0, WIDTH)
        inside = place < channels
        gate = tl.load(y + place, inside, 0.0).to(tl.float32)
        up = tl.load(y + channels + place, inside, 0.0).to(tl.float32)
        g = tl.load(grad + place, inside, 0.0).to(tl.float32)
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        silu = gate * sigmoid
        if weighted:
            of_weight += g * silu * up
            g *= weight
        of_gate = g * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        tl.store(y_grad + place, of_gate.to(y_grad.dtype.element_ty), inside)
        tl.store(y_grad + channels + place, (g * silu).to(y_grad.dtype.element_ty), inside)
    if weighted:
        tl.store(weights_grad + row, tl.sum(of_weight, 0).to(weights_grad.dtype.element_ty))


def swiglu_grad(grad: Tensor, y: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The gradients of ``silu(gate) * up * weights``, with ``gate, up = y.chunk(2, -1)``: of ``y`` and of ``weights``.

    Args:
        grad: [..., channels]; computed with in float32, as the others.
        y: [..., 2 channels]
        weights: [..., 1], a number for each row.
    """
    grad, y = grad.contiguous(), y.contiguous()
    weights = None if weights is None else weights.contiguous()
    y_grad = torch.empty_like(y)
    weights_grad = None if weights is None else torch.empty_like(weights)
    rows = grad.numel() // grad.size(-1)
    if rows:
        _swiglu_grad[(rows,)](
            grad, y, weights, y_grad, weights_grad, grad.size(-1), weighted=weights is not None, WIDTH=_WIDTH
        )
    return y_grad, weights_grad


@triton.jit
def _rotate(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    heads: tl.tensor,
    sign: tl.tensor,
    pairs: tl.constexpr,
    channels: tl.constexpr,
    interleaved: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    inside = (head < heads) & (pair < pairs)
    c = tl.load(cos + token * pairs + pair, pair < pairs, 0.0)
    s = tl.load(sin + token * pairs + pair, pair < pairs, 0.0) * sign
    first = 2 * pair if interleaved else pair
    second = first + (1 if interleaved else pairs)
    x += token * token_stride
    out += token * heads * channels
    a = tl.load(x + head * head_stride + first, inside, 0.0).to(tl.float32)
    b = tl.load(x + head * head_stride + second, inside, 0.0).to(tl.float32)
    tl.store(out + head * channels + first, (a * c - b * s).to(out.dtype.element_ty), inside)
    tl.store(out + head * channels + second, (b * c + a * s).to(out.dtype.element_ty), inside)
    if REST:
        place = 2 * pairs + tl.arange(0, REST)[None, :]
        inside = (head < heads) & (place < channels)
        tl.store(out + head * channels + place, tl.load(x + head * head_stride + place, inside, 0.0), inside)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, back: bool = False) -> Tensor:
    """`rotary.rotate` without a gradient, or what it has for one: rotated ``back``.

    Args:
        x: [tokens, heads, channels], the channels next to each other.
        cos, sin: float32 [tokens, 1, pairs]
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    tokens, heads, channels = x.shape
    pairs = cos.size(-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = triton.next_power_of_2(pairs)
    together = min(triton.next_power_of_2(heads), max(1, _WIDTH // width))
    rest = channels - 2 * pairs
    if out.numel():
        _rotate[(tokens, triton.cdiv(heads, together))](
            x,
            cos.contiguous(),
            sin.contiguous(),
            out,
            x.stride(0),
            x.stride(1),
            heads,
            -1.0 if back else 1.0,
            pairs=pairs,
            channels=channels,
            interleaved=interleaved,
            HEADS=together,
            PAIRS=width,
            REST=triton.next_power_of_2(rest) if rest else 0,
        )
    return out


@triton.jit
def _norm_grad(
    grad: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    x_grad: tl.tensor,
    parts: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    block, blocks = tl.program_id(0), tl.num_programs(0)
    place = tl.arange(0, WIDTH)
    inside = place < channels
    w = tl.load(weight + place, inside, 0.0).to(tl.float32)
    of_weight = tl.zeros([WIDTH], tl.float32)
    start = block.to(tl.int64) * channels
    for row in range(block, rows, blocks):
        r = tl.load(scale + row)
        unit = tl.load(x + start + place, inside, 0.0).to(tl.float32) * r
        g = tl.load(grad + start + place, inside, 0.0).to(tl.float32)
        of_weight += g * unit
        g *= w
        mean = tl.sum(g * unit, 0) / channels
        tl.store(x_grad + start + place, (r * (g - unit * mean)).to(x_grad.dtype.element_ty), inside)
        start += blocks.to(tl.int64) * channels
    tl.store(parts + block * channels + place, of_weight, inside)


def norm_grad(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of ``x * scale * weight``, where ``scale`` is each row's inverse root mean square: of ``x`` and of
    ``weight``.

    Args:
        grad, x: [..., channels]
        weight: [channels]
        scale: float32, a number for each row.
    """
    grad, x = grad.contiguous(), x.contiguous()
    channels, rows = x.size(-1), x.numel() // x.size(-1)
    x_grad = torch.empty_like(x)
    blocks = max(1, min(rows, _NORM_BLOCKS))
    parts = torch.zeros(blocks, channels, dtype=torch.float32, device=x.device)
    if rows:
        width = triton.next_power_of_2(channels)
        warps = min(16, max(1, width // 256))
        _norm_grad[(blocks,)](
            grad, x, weight, scale.contiguous(), x_grad, parts, rows, channels, WIDTH=width, num_warps=warps
        )
    return x_grad, parts.sum(0).to(weight.dtype)
