"""The kernels in Triton against the same in float64, by torch's own gradients, on fresh inputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slime.backends.megatron.layers.norm import RMSNorm
from slime.backends.megatron.layers.rotary import _rotated, rotate
from slime.utils import device

NUM_GPUS = 1
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not device.is_cuda(), reason="needs a CUDA device")]
if device.is_cuda():
    from slime.backends.megatron.layers import gpu_kernels
DTYPES = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
"""The largest error of an entry, as a part of the tensor's largest one."""


def made(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def in_float64(tensor: Tensor) -> Tensor:
    return tensor.detach().double().requires_grad_()


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=0, atol=DTYPES[dtype] * float(want.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 768), (1000, 1536), (33, 6144), (7, 1000), (0, 64)], ids=str)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_gradients_of_swiglu(weighted: bool, shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, channels = shape
    y, grad = made(rows, 2 * channels, dtype=dtype), made(rows, channels, dtype=dtype)
    weights = torch.rand(rows, 1, device="cuda").to(dtype) if weighted else None
    exact = [in_float64(each) for each in (y, weights) if each is not None]
    gate, up = exact[0].chunk(2, -1)
    out = F.silu(gate) * up * (exact[1] if weighted else 1)
    wanted = torch.autograd.grad(out, exact, grad.double())
    found = gpu_kernels.swiglu_grad(grad, y, weights)
    for got, want in zip(found, wanted, strict=False):
        assert got is not None
        if rows:
            assert_close(got, want, dtype)
        assert got.shape == want.shape
    assert weighted or found[1] is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(("heads", "channels", "pairs"), [(16, 128, 64), (3, 96, 48), (40, 64, 16), (1, 192, 32)])
def test_rotation_and_back(heads: int, channels: int, pairs: int, interleaved: bool, dtype: torch.dtype) -> None:
    both, angles = made(501, heads, 2 * channels, dtype=dtype), made(501, 1, pairs, dtype=torch.float32)
    for x in (both[..., channels:], both[..., :channels].contiguous()):  # a part of a larger tensor, and a whole one
        mine, exact, grad = x.detach().requires_grad_(), in_float64(x), made(*x.shape, dtype=dtype)
        out = rotate(mine, angles.cos(), angles.sin(), interleaved)
        want = _rotated(exact, angles.double().cos(), angles.double().sin(), interleaved)
        assert_close(out, want.detach(), dtype)
        out.backward(grad)
        want.backward(grad.double())
        assert mine.grad is not None
        assert exact.grad is not None
        assert_close(mine.grad, exact.grad, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "channels"), [(1, 2048), (513, 2560), (16000, 1024), (40, 5000)])
def test_gradients_of_wide_norms(rows: int, channels: int, dtype: torch.dtype) -> None:
    config: Any = SimpleNamespace(params_dtype=dtype, sequence_parallel=False)
    norm = RMSNorm(config, channels, eps=1e-6)
    norm.weight.data = made(channels, dtype=dtype)
    x, grad = made(rows, 1, channels, dtype=dtype).requires_grad_(), made(rows, 1, channels, dtype=dtype)
    out = norm(x)
    assert torch.equal(out, F.rms_norm(x, (channels,), norm.weight, 1e-6))
    exact, weight = in_float64(x), in_float64(norm.weight)
    want = F.rms_norm(exact, (channels,), weight, 1e-6)
    out.backward(grad)
    want.backward(grad.double())
    assert x.grad is not None
    assert norm.weight.grad is not None
    assert exact.grad is not None
    assert weight.grad is not None
    assert_close(x.grad, exact.grad, dtype)
    assert_close(norm.weight.grad, weight.grad, dtype)


def test_the_same_bits_again() -> None:
    x, grad = made(5000, 1, 2048, dtype=torch.bfloat16), made(5000, 1, 2048, dtype=torch.bfloat16)
    weight = made(2048, dtype=torch.bfloat16)
    _, scale = torch.ops.aten._fused_rms_norm(x, [2048], weight, 1e-6)
    first = gpu_kernels.norm_grad(grad, x, weight, scale)
    for _ in range(5):
        again = gpu_kernels.norm_grad(grad, x, weight, scale)
        assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
