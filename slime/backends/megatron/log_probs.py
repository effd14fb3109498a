"""Log-probabilities and entropy of a vocabulary that is split over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def log_probs_and_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Of ``softmax(logits / temperature)``: log-probability of each label, and entropy; differentiable, in float32.

    Training, log-prob, reference and supervised passes all use this one function, so that equal logits give equal bits.

    Args:
        logits: [T, V / tp], this rank's columns: rank r of ``group`` holds r * V / tp to (r + 1) * V / tp.
        labels: int64 [T], global ids below ``vocab_size``, the same on every rank.
        vocab_size: columns that exist; those from here to V only pad the vocabulary and have probability 0.
        temperature: what the logits are divided by, above 0.
        group: the tensor-parallel group; None where the vocabulary is not split.

    Returns:
        Two float32 [T], the same on every rank.
    """
    return _LogProbsAndEntropy.apply(logits, labels, vocab_size, temperature, group)


class _LogProbsAndEntropy(torch.autograd.Function):
    """With p the softmax and g, h the gradients of log-prob and entropy H, the logits' gradient is
    ``(g (onehot - p) - h p (log p + H)) / temperature``; of the forward pass only p is kept."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, temperature: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        split = group is not None and group.size() > 1
        first = group.rank() * logits.size(-1) if group is not None else 0
        columns = min(max(vocab_size - first, 0), logits.size(-1))
        scaled = logits[:, :columns].float()
        if temperature != 1.0:
            scaled = scaled / temperature

        highest = scaled.amax(-1) if columns else scaled.new_full((len(labels),), -torch.inf)
        if split:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        scaled = scaled - highest[:, None]
        own = (labels >= first) & (labels < first + columns)
        column = torch.where(own, labels - first, 0)
        at_label = (
            scaled.gather(1, column[:, None])[:, 0].masked_fill(~own, 0.0) if columns else torch.zeros_like(highest)
        )
        p = scaled.exp()
        sums = torch.stack([p.sum(-1), scaled.mul_(p).sum(-1), at_label])
        if split:
            dist.all_reduce(sums, group=group)
        total, weighted, at_label = sums
        log_total = total.log()
        entropy = log_total - weighted / total
        p.div_(total[:, None])

        ctx.set_materialize_grads(False)  # None then says that the entropy is a metric only, which saves its term
        ctx.save_for_backward(p, column, own, entropy)
        ctx.temperature, ctx.shape, ctx.dtype = temperature, logits.shape, logits.dtype
        return at_label - log_total, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_log_prob: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, None, None, None, None]:
        p, column, own, entropy = ctx.saved_tensors
        grad = torch.zeros_like(p) if grad_log_prob is None else p * -grad_log_prob[:, None]
        if grad_log_prob is not None and p.size(1):
            grad.scatter_add_(1, column[:, None], (grad_log_prob * own)[:, None])
        if grad_entropy is not None:
            grad -= grad_entropy[:, None] * (torch.xlogy(p, p) + p * entropy[:, None])
        if ctx.temperature != 1.0:
            grad /= ctx.temperature
        if p.size(1) < ctx.shape[1]:
            grad = torch.nn.functional.pad(grad, (0, ctx.shape[1] - p.size(1)))
        return grad.to(ctx.dtype), None, None, None, None
