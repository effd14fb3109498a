"""RMSNorm of torch as a Megatron module."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from slime.utils import device


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm that works under sequence parallelism, which Megatron's own wrapper of torch's refuses.

    Marking the weight is all it takes: Megatron then sums its gradient over the tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device.current_device())
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
