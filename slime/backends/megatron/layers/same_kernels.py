"""Layers whose bits depend on a token's own sequence alone, and are an engine's: for `--true-on-policy-mode`.

On GPUs they are SGLang's own kernels, FlashAttention 3 in one part and the batch-invariant ones, with gradients of this
package's; `slime.backends.sglang.same_kernels` has engines round between kernels where a trainer does. On CPUs it is
attention of one query at a time: torch's SDPA there gives a query other bits beside others than alone, and an engine
decodes one query at a time (`slime.backends.sglang.cpu.attention`).
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.backends.megatron.layers import norm
from slime.backends.megatron.layers.attention import AttentionPlan
from slime.backends.megatron.layers.kernels import flash
from slime.utils import device
from slime.utils.device import from_host


class RMSNorm(norm.RMSNorm):
    """By SGLang's batch-invariant kernel on GPUs."""

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, ..., channels] normalised over the channels."""
        if not device.is_cuda():
            return super().forward(x)
        from sglang.srt.batch_invariant_ops.batch_invariant_ops import rms_norm_batch_invariant

        return norm.normalise(x, self.weight, cast(float, self.eps), rms_norm_batch_invariant)


def multiply_batch_invariantly() -> None:
    """Have this process's GPU multiply matrices, and take log-softmax and means, by SGLang's batch-invariant kernels
    from now on; nothing without a GPU."""
    if device.is_cuda():
        from sglang.srt.batch_invariant_ops import enable_batch_invariant_mode

        enable_batch_invariant_mode(enable_bmm=False)  # engines of dense models have no batched products


def attend(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """As `kernels.packed_attention`, without context parallelism."""
    if device.is_cuda():
        return cast(Tensor, _AttendAsEngines.apply(query, key, value, plan, scale))
    return _attend_one_by_one(query, key, value, plan, scale)


class _AttendAsEngines(torch.autograd.Function):
    """The engine's kernel, with keys and values where a cache of pages of one token would have them; the gradient is
    that of `flash`, which computes the same with other roundings."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        from sglang.kernels.ops.attention.flash_attention import flash_attn_with_kvcache

        ctx.save_for_backward(query, key, value)
        ctx.plan, ctx.scale = plan, scale
        lengths = torch.tensor(plan.keys, dtype=torch.int32)
        longest = max(plan.keys)
        starts = lengths.cumsum(0, dtype=torch.int32) - lengths
        pages = (starts[:, None] + torch.arange(longest, dtype=torch.int32)).clamp_(max=len(key) - 1)
        attended = flash_attn_with_kvcache(
            query,
            key[:, None],
            value[:, None],
            cache_seqlens=from_host(lengths, query.device),
            page_table=from_host(pages, query.device),
            cu_seqlens_q=plan.query_offsets,
            max_seqlen_q=max(plan.queries),
            softmax_scale=scale,
            causal=True,
            num_splits=1,
        )
        return cast(Tensor, attended)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            attended = flash(inputs[0], inputs[1], inputs[2], ctx.plan, ctx.scale)
        return *torch.autograd.grad(attended, inputs, grad), None, None


def _attend_one_by_one(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    outputs, start = [], 0
    for length in plan.queries:
        q, k, v = (x[start : start + length].transpose(0, 1)[None] for x in (query, key, value))
        shared = q.size(1) != k.size(1)
        for end in range(1, length + 1):
            own = F.scaled_dot_product_attention(
                q[:, :, end - 1 : end], k[:, :, :end], v[:, :, :end], scale=scale, enable_gqa=shared
            )
            outputs.append(own[0, :, 0])
        start += length
    return torch.stack(outputs)
