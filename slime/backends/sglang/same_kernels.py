"""What engines on GPUs compute otherwise in true on-policy mode: they round where trainers do between kernels.

SGLang's deterministic kernels give a row the same bits whatever is beside it, and trainers call the same ones
(`slime.backends.megatron.layers.same_kernels`). What lies between them, SGLang fuses, and then rounds in other places.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

_LAYERS = "sglang.srt.layers"


def round_as_trainers() -> None:
    """Has layers of dense models round to the model's precision after every sum and product, as a trainer's do, rotate
    queries and keys in float32, and take the rotary frequencies that a CPU computes."""
    norm: Any = importlib.import_module(f"{_LAYERS}.layernorm").RMSNorm
    activation: Any = importlib.import_module(f"{_LAYERS}.activation").SiluAndMul
    linear: Any = importlib.import_module(f"{_LAYERS}.quantization.unquant").UnquantizedLinearMethod
    rotary: Any = importlib.import_module(f"{_LAYERS}.rotary_embedding.base").RotaryEmbedding
    norm.forward_cuda = _adds_first(norm.forward_cuda)
    activation.forward_cuda = activation.forward_native
    linear.apply = _adds_bias_last(linear.apply)
    rotary.forward_cuda = _rotate
    rotary._compute_inv_freq = _on_cpu(rotary._compute_inv_freq)


def _adds_first(normalise: Callable[..., Any]) -> Callable[..., Any]:
    """A norm of the rounded sum: SGLang's own is of the sum before it is rounded."""

    def forward(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None, further: Any = None) -> Any:
        if residual is None:
            return normalise(self, x)
        total = x + residual if further is None else x + (residual + further)
        return normalise(self, total), total

    return forward


def _adds_bias_last(multiply: Callable[..., Any]) -> Callable[..., Any]:
    def apply(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        product = multiply(self, layer, x)
        return product if bias is None else product + bias

    return apply


def _rotate(self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, offsets: Any = None) -> Any:
    rotated = self.forward_native(positions, query.float(), key.float(), offsets)
    return tuple(x.to(query.dtype) for x in rotated)


def _on_cpu(frequencies: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def compute(self: Any, base: float) -> torch.Tensor:
        place = torch.get_default_device()
        with torch.device("cpu"):
            on_cpu = frequencies(self, base)
        return on_cpu.to(place)

    return compute
