"""RMSNorm of torch as a Megatron module, layers with more of them, and kernels of our own for norms of heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from slime.utils import device

_NARROW = 256
"""Channels up to which torch's kernels, a block of threads a row, take several times what their traffic needs."""


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm that works under sequence parallelism, which Megatron's own wrapper of torch's refuses.

    Marking the weight is all it takes: Megatron then sums its gradient over the tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device.current_device())
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, ..., channels] normalised over the channels."""
        if device.is_cuda() and x.size(-1) <= _NARROW and x.dim() > 2:
            return normalise(x, self.weight, cast(float, self.eps))
        if device.is_cuda() and x.dtype == self.weight.dtype != torch.float64:
            return cast(Tensor, _Wide.apply(x, self.weight, self.eps))
        return super().forward(x)


class _Wide(torch.autograd.Function):
    """torch's norm, whose own gradient takes three times what its traffic needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scale = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return cast(Tensor, out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        from slime.backends.megatron.layers import gpu_kernels

        return *gpu_kernels.norm_grad(grad, *ctx.saved_tensors), None


class SandwichLayer(TransformerLayer):
    """A layer that normalises what attention and MLP add to its input, too, as GLM-4's does.

    The norms follow the two modules as hooks: within what selective recomputation of the MLP repeats, and after the sum
    over tensor-parallel ranks, of which each then has all tokens, or with sequence parallelism its own.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        *args: Any,
        post_self_attn_layernorm: bool,
        post_mlp_layernorm: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        if post_self_attn_layernorm:
            self.post_self_attn_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
            self.self_attention.register_forward_hook(partial(_normalized, self.post_self_attn_layernorm))
        if post_mlp_layernorm:
            self.post_mlp_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
            self.mlp.register_forward_hook(partial(_normalized, self.post_mlp_layernorm))


def _normalized(
    norm: torch.nn.Module, module: torch.nn.Module, args: Any, output: tuple[Tensor, None]
) -> tuple[Tensor, None]:
    """For the output of attention or MLP and its bias, which these models do not have."""
    hidden, bias = output
    return norm(hidden), bias


def normalise(x: Tensor, weight: Tensor, eps: float, kernel: Callable[..., Tensor] | None = None) -> Tensor:
    """What `torch.nn.functional.rms_norm` gives, and its gradients, by kernels compiled for this number of channels: x
    [tokens, ..., channels], of three dimensions or more, and weight [channels]. A ``kernel`` of one's own computes the
    same, without gradients."""
    return cast(Tensor, _Normalise.apply(x, weight, eps, kernel))


class _Normalise(torch.autograd.Function):
    """Each row's root mean square is worked out again for the gradient, from what has to be read anyway."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, kernel: Callable[..., Tensor] | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return (kernel or device.fused(_normalised))(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = device.fused(_input_grad)(grad, x, weight, ctx.eps)
        if ctx.needs_input_grad[1]:
            # First over each token's heads: one compiled sum over all rows would keep few of the GPU's processors busy.
            weight_grad = device.fused(_token_weight_grads)(grad, x, ctx.eps).sum(0).to(weight.dtype)
        return x_grad, weight_grad, None, None


def _units(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Rows of root mean square 1, and what they were multiplied by for it; at least float32."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * scale, scale


def _normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    units, _ = _units(x, eps)
    return (units * weight.to(units.dtype)).to(x.dtype)


def _input_grad(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    units, scale = _units(x, eps)
    grad = grad.to(units.dtype) * weight.to(units.dtype)
    return (scale * (grad - units * (grad * units).mean(-1, keepdim=True))).to(x.dtype)


def _token_weight_grads(grad: Tensor, x: Tensor, eps: float) -> Tensor:
    """[tokens, channels]"""
    units, _ = _units(x, eps)
    return (grad.to(units.dtype) * units).flatten(1, -2).sum(1)
