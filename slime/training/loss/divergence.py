"""KL(student || teacher) of the next token over the teacher's k most likely ids, and all others as one.

Merging outcomes never adds to a divergence, so it is at most that of the whole vocabulary, at least 0, and equal for k
the whole vocabulary. As in `log_probs`, logits exist for a chunk of tokens at a time, and again in the backward pass;
the vocabulary may be split over tensor-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.training.loss.log_probs import chunks, scaled_logits
from slime.training.loss.weight_gradient import WeightGradient, add_product

_LEAST = 1e-4
"""What all other ids have of the probability at least, in both: of less, what 1 less the float32 others leaves is more
and more rounding, and its logarithm would be noise."""


def top_log_probs(
    hidden: Tensor,
    weight: Tensor,
    count: int,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The ``count`` most likely ids, int64 [T, count], and their log-probs, float32, likeliest first; no gradient.

    Args and ranks as in `log_probs.token_terms`; ``count`` is at most ``vocab_size``.
    """
    first, columns = _own_columns(weight, vocab_size, group)
    own, tokens = min(count, columns), len(hidden)
    values = hidden.new_full((tokens, count), -torch.inf, dtype=torch.float32)
    ids = torch.zeros(tokens, count, dtype=torch.int64, device=hidden.device)
    total = hidden.new_full((tokens,), -torch.inf, dtype=torch.float32)
    for part in chunks(tokens, chunk_size) if columns else ():
        x = scaled_logits(hidden[part], weight[:columns], temperature)
        total[part] = x.logsumexp(-1)
        values[part, :own], ids[part, :own] = x.topk(own)
        ids[part, :own] += first
        del x  # before the next chunk's
    if group is not None and group.size() > 1:
        total = torch.stack(_every(total, group)).logsumexp(0)
        values, at = torch.cat(_every(values, group), dim=1).topk(count)
        ids = torch.cat(_every(ids, group), dim=1).gather(1, at)
    return ids, values - total[:, None]


def reverse_kl(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    teacher: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """The divergence of ``softmax(hidden @ weight.T / temperature)`` from the teacher, of each token: float32 [T].

    Args:
        hidden, weight, vocab_size, temperature, group, chunk_size: as in `log_probs.token_terms`; here, too, the
            gradient of ``hidden`` is this rank's part.
        ids: int64 [T, k], different ones in a row, the same on every rank.
        teacher: float32 [T, k], its log-probs of them.
    """
    first, columns = _own_columns(weight, vocab_size, group)
    own = (ids >= first) & (ids < first + columns)
    of_chunks = (columns, temperature, group, chunk_size)
    divergence: Tensor = _ReverseKl.apply(
        hidden.to(weight.dtype), weight, torch.where(own, ids - first, -1), teacher, *of_chunks
    )
    return divergence


class _ReverseKl(torch.autograd.Function):
    """With p the student's probabilities, b the bins (an id of the teacher's each, and the others together), q their
    probabilities, c = log q - log q of the teacher, and KL = sum q c: the gradient of the logit of an id in bin b is
    ``p (c_b - KL) / temperature``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        column: Tensor,
        teacher: Tensor,
        columns: int,
        temperature: float,
        group: dist.ProcessGroup | None,
        chunk_size: int | None,
    ) -> Tensor:
        total = hidden.new_full((len(hidden),), -torch.inf, dtype=torch.float32)
        log_q = torch.zeros_like(teacher)
        for part in chunks(len(hidden), chunk_size) if columns else ():
            x = scaled_logits(hidden[part], weight[:columns], temperature)
            total[part] = x.logsumexp(-1)
            log_q[part] = torch.where(column[part] < 0, 0.0, x.gather(1, column[part].clamp(min=0)))
            del x  # before the next chunk's
        if group is not None and group.size() > 1:
            total = torch.stack(_every(total, group)).logsumexp(0)
            dist.all_reduce(log_q, group=group)
        log_q -= total[:, None]
        rest, of_teacher = ((1 - each.double().exp().sum(-1)).clamp(min=_LEAST).float() for each in (log_q, teacher))
        ratio, of_rest = log_q - teacher, rest.log() - of_teacher.log()
        divergence = (log_q.exp() * ratio).sum(-1) + rest * of_rest
        ctx.save_for_backward(hidden, weight, column, total, ratio - divergence[:, None], of_rest - divergence)
        ctx.columns, ctx.temperature, ctx.chunk_size = columns, temperature, chunk_size
        return divergence

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, column, total, of_ids, of_rest = ctx.saved_tensors
        rows, parts = weight[: ctx.columns], list(chunks(len(hidden), ctx.chunk_size))
        hidden_grad = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        weight_grad = WeightGradient(weight, of_many=len(parts) > 1) if ctx.needs_input_grad[1] else None
        for part in parts if ctx.columns else ():
            p = (scaled_logits(hidden[part], rows, ctx.temperature) - total[part, None]).exp_()
            # Ids of other ranks go to a column of their own, which is dropped.
            at = torch.where(column[part] < 0, ctx.columns, column[part])
            factors = of_rest[part, None].expand(-1, ctx.columns + 1).scatter(1, at, of_ids[part])[:, :-1]
            scale = gradient[part, None] / ctx.temperature
            grad = p.mul_(factors).mul_(scale).to(weight.dtype)
            if hidden_grad is not None:
                hidden_grad[part] = grad @ rows
            if weight_grad is not None:
                add_product(weight_grad.total[: ctx.columns], grad.t(), hidden[part])
            del p, grad, factors  # before the next chunk's logits
        return hidden_grad, None if weight_grad is None else weight_grad.for_autograd(), *[None] * 6


def _own_columns(weight: Tensor, vocab_size: int, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """The first id of this rank's rows of the weight, and how many of them are no padding."""
    first = group.rank() * weight.size(0) if group is not None else 0
    return first, min(max(vocab_size - first, 0), weight.size(0))


def _every(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts
