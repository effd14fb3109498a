"""The gradient of a weight, summed in float32 where data parallelism keeps it.

By names of Megatron's: a parameter that is trained with others has ``main_grad``, into which the gradients of a step's
micro-batches are summed. What autograd brings of it is added there as well, so that other uses of the weight, an
embedding's or a loss by the logits themselves, count too.
"""

from __future__ import annotations

import torch
from torch import Tensor


class WeightGradient:
    """What products add up to, of one weight in one backward pass."""

    def __init__(self, weight: Tensor, *, of_many: bool) -> None:
        """The sum goes to the weight's ``main_grad``; without one it is a tensor of its own, float32 if it is
        ``of_many`` products."""
        main_grad: Tensor | None = getattr(weight, "main_grad", None)
        if of_many and main_grad is not None and main_grad.dtype != torch.float32:
            main_grad = None  # each product would be rounded, where now their sum is
        self._weight, self._main_grad = weight, main_grad
        if main_grad is None:
            main_grad = torch.zeros_like(weight, dtype=torch.float32 if of_many else weight.dtype)
        self.total = main_grad

    def for_autograd(self) -> Tensor | None:
        """What backward returns for the weight."""
        if self._main_grad is None:
            return self.total.to(self._weight.dtype)
        if getattr(self._weight, "zero_out_wgrad", False):
            return None  # the embedding with this weight brings a gradient anyway
        # Not None: that a gradient has come is what overlapping reductions wait for.
        return torch.zeros_like(self._weight)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``, in place; on a CPU a 16-bit product is rounded before it is added in float32."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right
