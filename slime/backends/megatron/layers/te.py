"""Transformer Engine's linear layers and attention, for ``--transformer-impl transformer_engine``.

Only for processes in which that package is installed. Norms, rotary embeddings, experts and the head stay slime's own.
"""

from __future__ import annotations

import functools
from typing import Any, cast

from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor
from transformer_engine.pytorch import DotProductAttention
from transformer_engine.pytorch.cpp_extensions import gemm
from transformer_engine.pytorch.module import base

from slime.backends.megatron import releases
from slime.backends.megatron.layers.attention import AttentionPlan


class _Linear:
    """What both layers have in common: the product that makes a weight's gradient adds it to ``main_grad`` itself.

    Transformer Engine's extra state is of its float8 training. Here it is None, as that of Megatron's own layers is:
    either can then resume the other's checkpoints.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fuse_wgrad_accumulation = True

    def get_extra_state(self) -> None:
        """Nothing."""

    def set_extra_state(self, state: None) -> None:
        """Nothing to set."""


class ColumnLinear(_Linear, TEColumnParallelLinear):
    """Megatron's ColumnParallelLinear, by Transformer Engine."""


class RowLinear(_Linear, TERowParallelLinear):
    """Megatron's RowParallelLinear, by Transformer Engine."""


def use_linear_layers(layer: TransformerLayerSubmodules) -> None:
    """Put `ColumnLinear` and `RowLinear` into a layer's specification: in attention, MLP and shared experts."""
    attention, (kind, mlp) = layer.self_attention.submodules, releases.of_module(layer.mlp)
    attention.linear_qkv, attention.linear_proj = ColumnLinear, RowLinear
    if kind is MoELayer:
        mlp = releases.of_module(mlp.shared_experts)[1] if mlp.shared_experts is not None else None
    if mlp is not None:
        mlp.linear_fc1, mlp.linear_fc2 = ColumnLinear, RowLinear


def release_unused() -> None:
    """Let go of GPU memory that would be kept between steps: stand-ins for gradients, a workspace."""
    base._dummy_wgrads.clear()
    gemm.get_cublas_workspace.cache_clear()


def packed_attention(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """What `kernels.packed_attention` computes, by cuDNN's kernels in 16 bits."""
    (_, heads, channels), groups = query.shape, key.size(1)
    out = _kernel(heads, groups, channels, scale)(
        query,
        key,
        value,
        cu_seqlens_q=plan.query_offsets,
        cu_seqlens_kv=plan.key_offsets,
        max_seqlen_q=max(plan.queries),
        max_seqlen_kv=max(plan.keys),
        attn_mask_type="padding_causal" if plan.key_index is None else "padding_causal_bottom_right",
    )
    return cast(Tensor, out.unflatten(-1, (heads, channels)))


@functools.cache
def _kernel(heads: int, groups: int, channels: int, scale: float) -> DotProductAttention:
    """Of all layers alike, and of none's modules: it has no parameters, and its extra state does not belong in
    checkpoints."""
    return DotProductAttention(heads, channels, groups, qkv_format="thd", softmax_scale=scale)
