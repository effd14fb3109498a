"""RMSNorm by our own formulas: values and gradients are torch's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from slime.backends.megatron.layers.norm import normalise

NUM_GPUS = 0
EPS = 1e-3
"""Large enough to show in rows of small numbers."""


def check_norm(shape: tuple[int, ...], dtype: torch.dtype, where: torch.device, tolerance: float) -> None:
    """Value and both gradients against torch's in float64; errors as parts of the largest entry."""
    # As queries are: part of a wider tensor.
    wide = torch.randn(*shape[:-1], 2 * shape[-1], dtype=dtype, device=where)
    wide *= torch.rand(*shape[:-1], 1, dtype=dtype, device=where)
    x = wide[..., : shape[-1]]
    weight = torch.randn(shape[-1], dtype=dtype, device=where)
    grad = torch.randn(shape, dtype=dtype, device=where)
    found, wanted = [], []
    for results, norm, exact in (
        (found, normalise, dtype),
        (wanted, lambda x, w, eps: functional.rms_norm(x, w.shape, w, eps), torch.float64),
    ):
        inputs = [tensor.detach().to(exact).requires_grad_() for tensor in (x, weight)]
        out = norm(*inputs, EPS)
        results += [out.detach(), *torch.autograd.grad(out, inputs, grad.to(exact))]
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype == dtype
        assert float((mine.double() - theirs).abs().max() / theirs.abs().max()) < tolerance


@pytest.mark.parametrize("shape", [(7, 1, 3, 16), (5, 1, 32), (1, 1, 1, 8)])
def test_value_and_gradients_are_torchs(shape: tuple[int, ...]) -> None:
    check_norm(shape, torch.float64, torch.device("cpu"), 1e-12)
    check_norm(shape, torch.float32, torch.device("cpu"), 1e-6)


def test_a_frozen_weight_gets_no_gradient() -> None:
    x = torch.randn(3, 1, 2, 8, requires_grad=True)
    normalise(x, torch.ones(8), EPS).sum().backward()
    assert x.grad is not None
