"""Attention of one query at a time: the bits of its result depend on its own keys and values, and on nothing else.

torch's SDPA on a CPU gives a query other bits beside others than alone. An engine decodes one query at a time: with
`--true-on-policy-mode` trainers attend so, too, and so do engines to prompts (`slime.backends.sglang.cpu_stand_ins`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.backends.megatron.layers.attention import AttentionPlan


def attend_one_by_one(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """As `attention.packed_attention`, without context parallelism."""
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
