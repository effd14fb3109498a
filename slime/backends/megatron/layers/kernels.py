"""The kernels that compute attention over packed sequences, behind one function that chooses.

What each can do is a table of the options (`slime.options.checks.attention`). Which one it is depends on the model, the
device and the options alone, never on a micro-batch, so that passes with and without gradients have the same bits.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from slime.backends.megatron.layers.attention import AttentionPlan, Kernel
from slime.options.checks import attention as table
from slime.utils import device

logger = logging.getLogger(__name__)

_LONGER_THAN_A_BLOCK = 256
"""Longest that FlashAttention 4 is told at least: it compiles further kernels for what fits into one block."""


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float, *, backend: str = table.AUTO
) -> Tensor:
    """Causal attention within each sequence of ``plan``.

    Args:
        query: [tokens, heads, channels].
        key: [key tokens, query groups, channels].
        value: [key tokens, query groups, value channels].
        scale: of the scores before softmax.
        backend: a kernel's name, or ``auto``.

    Returns:
        [tokens, heads, value channels].

    Raises:
        OptionError: the kernel asked for cannot do it.
    """
    dtype = str(query.dtype).removeprefix("torch.")
    deterministic = torch.are_deterministic_algorithms_enabled()
    name = _chosen(backend, dtype, key.size(-1), value.size(-1), query.device.type, deterministic)
    return _FUNCTIONS[name](query, key, value, plan, scale)


@functools.cache
def _chosen(backend: str, dtype: str, key_width: int, value_width: int, where: str, deterministic: bool) -> str:
    needs = table.Needs(dtype, key_width, value_width, where, device.capability(), deterministic)
    return choose(backend, needs)[0]


def choose(backend: str, needs: table.Needs) -> tuple[str, str]:
    """A kernel that can be imported, and, where ``auto`` would have had another one, why that cannot.

    Nothing is imported but what is chosen: flash-attn-4 takes seconds.

    Raises:
        OptionError: as `slime.options.checks.attention.choose` has it.
    """
    name = table.choose(backend, needs)
    if reason := why_absent(name):
        return table.choose(backend, needs, {name: reason}), reason
    return name, ""


def kernel_of(args: Namespace, config: TransformerConfig) -> Kernel:
    """`packed_attention` as ``--attention-backend`` has it: one kernel for all passes of a run. ``auto``'s is logged.

    Raises:
        OptionError: before anything is computed, as no kernel, or not the one asked for, is for this model and GPU.
    """
    variants = {"sinks": config.softmax_type != "vanilla", "sliding windows": config.window_size is not None}
    needs = replace(
        table.needs_of(args, "cuda" if device.is_cuda() else "cpu"),
        capability=device.capability(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        variants=tuple(variant for variant, is_needed in variants.items() if is_needed),
    )
    backend = table.named_kernel(args)
    if backend == table.AUTO:
        name, reason = choose(backend, table.with_lengths(needs, args))
        _tell(name, reason)
    else:
        name, _ = choose(backend, needs)
    return functools.partial(packed_attention, backend=name)


@functools.cache
def _tell(name: str, reason: str) -> None:
    what = next(kernel.what for kernel in table.KERNELS if kernel.name == name)
    logger.info("attention: %s (%s %s)%s", what, table.FLAG, table.AUTO, f"; {reason}" if reason else "")


@functools.cache
def why_absent(name: str) -> str:
    """Why a kernel cannot be imported; empty where it can."""
    kernel = next(kernel for kernel in table.KERNELS if kernel.name == name)
    if not kernel.package:
        return ""
    try:
        importlib.import_module(kernel.module)
    except ModuleNotFoundError as error:
        return f"the package {kernel.package} is not installed ({error})"
    except Exception as error:  # of its compiler, in many ways
        return f"the package {kernel.package} cannot be imported ({error!r})"
    return ""


def fa4(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """FlashAttention 4, of the package flash-attn-4; compiles its kernels when they are first used."""
    longest = [max(_LONGER_THAN_A_BLOCK, most) for most in plan.longest]
    return _fa4_function()(
        query,
        key,
        value,
        cu_seqlens_q=plan.query_offsets,
        cu_seqlens_k=plan.key_offsets,
        max_seqlen_q=longest[0],
        max_seqlen_k=longest[1],
        softmax_scale=scale,
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        return_lse=True,  # without it, passes without gradients would run another kernel than those with
    )[0]


@functools.cache
def _fa4_function() -> Callable[..., tuple[Tensor, ...]]:
    from flash_attn.cute import flash_attn_varlen_func

    return cast(Callable[..., tuple[Tensor, ...]], flash_attn_varlen_func)


def flash(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """Torch's FlashAttention 2."""
    channels, value_channels = key.size(-1), value.size(-1)
    if value_channels < channels:  # the kernel has one width for all three
        value = F.pad(value, (0, channels - value_channels))
    offsets = (plan.query_offsets, plan.key_offsets)
    return _varlen()(query, key, value, *offsets, *plan.longest, scale)[..., :value_channels]


@functools.cache
def _varlen() -> Callable[..., Tensor]:
    """Torch's causal kernel: of query, key, value, the offsets of queries and keys, their longest, and the scale."""
    from torch.nn.attention.varlen import varlen_attn

    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        return lambda *inputs: cast(
            Tensor, varlen_attn(*inputs[:-1], scale=inputs[-1], window_size=(-1, 0), enable_gqa=True)
        )
    # torch 2.11's takes as many keys as queries only; the operator beneath has grouped queries and a gradient.
    operator = torch.ops.aten._flash_attention_forward
    return lambda *inputs: operator(*inputs[:-1], 0.0, True, False, scale=inputs[-1])[0]


class _Spread(torch.autograd.Function):
    """Rows of x to distinct rows of a zeroed tensor; index_select's own gradient would add, row by row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(rows)
        return x.new_zeros(num_rows, *x.shape[1:]).index_copy_(0, rows, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return grad.index_select(0, rows), None, None


class _Collect(torch.autograd.Function):
    """The inverse of `_Spread`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.num_rows = x.size(0)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return grad.new_zeros(ctx.num_rows, *grad.shape[1:]).index_copy_(0, rows, grad), None


def unfused(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """Torch's SDPA over sequences of similar length, padded to one."""
    groups, query_slots, key_slots = plan.padded
    queries = _spread(query, query_slots, [group.query_rows for group in groups])
    keys, values = (_spread(x, key_slots, [group.key_rows for group in groups]) for x in (key, value))
    outputs = []
    for group, *qkv in zip(groups, queries, keys, values, strict=True):
        q, k, v = (x.unflatten(0, (group.batch, -1)).transpose(1, 2) for x in qkv)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=group.mask, is_causal=group.mask is None, scale=scale, enable_gqa=q.size(1) != k.size(1)
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return _Collect.apply(torch.cat(outputs), query_slots)


def _spread(x: Tensor, slots: Tensor, rows: list[int]) -> tuple[Tensor, ...]:
    """The padded rows of each group. Split, not sliced: a slice's gradient would be as large as all rows."""
    return _Spread.apply(x, slots, sum(rows)).split(rows)


_FUNCTIONS: dict[str, Kernel] = {"fa4": fa4, "flash": flash, "unfused": unfused}
"""Of the table's rows, by name."""
