"""Log-probabilities and entropy of the labels, from hidden states; no [tokens, vocabulary] tensor is kept.

The stream is walked over in chunks of tokens: a chunk's logits are computed, reduced to a few numbers a token, and
dropped; the backward pass computes them again. The vocabulary may be split over tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.training.loss.weight_gradient import WeightGradient, add_product
from slime.utils import device


def token_terms(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    chunk_size: int | None = None,
    wants_entropy_gradient: bool = False,
    as_engines: bool = False,
) -> tuple[Tensor, Tensor]:
    """Of ``softmax(hidden @ weight.T / temperature)``: log-probability of each label, and entropy, in float32.

    Training, log-prob, reference and supervised passes all use this one function, with the same chunks, so that equal
    inputs give equal bits, with gradient or without.

    Args:
        hidden: [T, h], the same on every rank; computed with in the weight's type. Its gradient is this rank's *part*,
            of its own columns: whoever made ``hidden`` sums the parts (`LanguageHead`).
        weight: [V / tp, h], this rank's rows: rank r of ``group`` holds r * V / tp to (r + 1) * V / tp.
        labels: int64 [T], global ids below ``vocab_size``, the same on every rank.
        vocab_size: rows that exist; those from here to V only pad the vocabulary and have probability 0.
        temperature: what the logits are divided by, above 0.
        group: the tensor-parallel group; None where the vocabulary is not split. Two small collectives a call.
        chunk_size: tokens whose logits are held at a time, else a ValueError at least 1; None for all at once.
        wants_entropy_gradient: without, the entropy is a metric, and its backward term is left out.
        as_engines: log-probabilities are torch's log-softmax of whole rows of logits in the weight's type, whose bits
            are those of a deterministic engine; without a ``group``.

    Returns:
        Two float32 [T], the same on every rank.
    """
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}: it is a number of tokens, or None for all at once")
    first = group.rank() * weight.size(0) if group is not None else 0
    columns = min(max(vocab_size - first, 0), weight.size(0))
    own = (labels >= first) & (labels < first + columns)
    log_probs, entropy = _TokenTerms.apply(
        hidden.to(weight.dtype),
        weight,
        torch.where(own, labels - first, -1),
        columns,
        temperature,
        group,
        chunk_size,
        as_engines,
    )
    return log_probs, entropy if wants_entropy_gradient else entropy.detach()


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """All logits of this rank's columns, float32 [T, V / tp], for losses that want them; the temperature is theirs.
    ``hidden`` is [T, h], ``weight`` [V / tp, h], this rank's rows."""
    return torch.nn.functional.linear(hidden.to(weight.dtype), weight).float()


class _TokenTerms(torch.autograd.Function):
    """With p the softmax, x the logits less their maximum (so p = exp(x) / total), m the mean of x under p, and g, h
    the gradients of log-prob and entropy, the gradient of the logits is
    ``(g onehot - p (g + h (x - m))) / temperature``; three numbers a token are kept for it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        column: Tensor,
        columns: int,
        temperature: float,
        group: dist.ProcessGroup | None,
        chunk_size: int | None,
        as_engines: bool,
    ) -> tuple[Tensor, Tensor]:
        whole = torch.empty(len(hidden), device=hidden.device)
        sums = torch.empty(4, len(hidden), dtype=torch.float32, device=hidden.device)
        for part in chunks(len(hidden), chunk_size):
            logits = _logits(hidden[part], weight[:columns], as_engines)
            sums[:, part] = device.fused(_local_sums)(logits, column[part], temperature)
            if as_engines:
                # By a tensor, as engines do: a GPU multiplies by the inverse of a number.
                divisor = torch.tensor(temperature, device=logits.device)
                every = torch.log_softmax(logits / divisor, dim=-1)
                whole[part] = every.gather(1, column[part].clamp(min=0)[:, None])[:, 0]
            del logits  # before the next chunk's
        if group is not None and group.size() > 1:
            _add_up(sums, column >= 0, group)
        highest, total, weighted, at_label = sums
        mean, log_total = weighted / total, total.log()
        ctx.set_materialize_grads(False)  # None then says that nothing depends on the entropy
        ctx.save_for_backward(hidden, weight, column, highest, total, mean)
        ctx.columns, ctx.temperature, ctx.chunk_size, ctx.as_engines = columns, temperature, chunk_size, as_engines
        return whole if as_engines else at_label - log_total, log_total - mean

    @staticmethod
    def backward(ctx: Any, of_log_prob: Tensor | None, of_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, column, highest, total, mean = ctx.saved_tensors
        if of_log_prob is None:
            of_log_prob = torch.zeros_like(total)
        parts = list(chunks(len(hidden), ctx.chunk_size))
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        hidden_grad = torch.empty_like(hidden) if wants_hidden else None
        weight_grad = WeightGradient(weight, of_many=len(parts) > 1) if wants_weight else None
        rows = weight[: ctx.columns]
        for part in parts:
            grad = device.fused(_logits_grad)(
                _logits(hidden[part], rows, ctx.as_engines),
                column[part],
                *(of_token[part] for of_token in (highest, total, mean, of_log_prob)),
                None if of_entropy is None else of_entropy[part],
                ctx.temperature,
                weight.dtype,
            )
            if hidden_grad is not None:
                hidden_grad[part] = grad @ rows
            if weight_grad is not None:
                add_product(weight_grad.total[: ctx.columns], grad.t(), hidden[part])
            del grad  # before the next chunk's logits
        return hidden_grad, None if weight_grad is None else weight_grad.for_autograd(), *[None] * 6


def chunks(tokens: int, chunk_size: int | None) -> Iterator[slice]:
    """The stream in parts of ``chunk_size`` tokens; of None, all at once."""
    for start in range(0, tokens, chunk_size or max(tokens, 1)):
        yield slice(start, min(start + chunk_size, tokens) if chunk_size else tokens)


def _logits(hidden: Tensor, rows: Tensor, rounded: bool = False) -> Tensor:
    """float32; of a 16-bit product the sums as they are, where the device can give them without rounding and none is
    asked for."""
    if hidden.is_cuda and hidden.dtype != torch.float32 and not rounded:
        return torch.mm(hidden, rows.t(), out_dtype=torch.float32)
    return (hidden @ rows.t()).float()


def scaled_logits(hidden: Tensor, rows: Tensor, temperature: float) -> Tensor:
    """float32 [tokens, rows], divided by the temperature."""
    return _logits(hidden, rows).div_(temperature)


def _local_sums(logits: Tensor, column: Tensor, temperature: float) -> Tensor:
    """[4, tokens] of this rank's columns, with x the scaled logits less their maximum: the maximum, the sums of exp(x)
    and of exp(x) x, and x at the label; 0 where another rank has it."""
    if logits.size(1) == 0:
        nothing = torch.zeros(4, len(logits), dtype=torch.float32, device=logits.device)
        nothing[0] = torch.finfo(torch.float32).min  # finite: it is multiplied by 0
        return nothing
    highest = logits.amax(-1) / temperature
    x = (logits / temperature).sub_(highest[:, None])
    at_label = torch.where(column < 0, 0.0, x.gather(1, column.clamp(min=0)[:, None])[:, 0])
    e = x.exp()
    return torch.stack([highest, e.sum(-1), x.mul_(e).sum(-1), at_label])


def _add_up(sums: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    """Make every rank's `_local_sums` those of all columns; ``own``: whether this rank has the token's label."""
    highest = sums[0].clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    shift = sums[0] - highest
    _, total, weighted, at_label = sums
    parts = torch.stack([total, weighted + shift * total, torch.where(own, at_label + shift, 0.0)])
    parts[:2] *= shift.exp()
    dist.all_reduce(parts, group=group)
    sums[0], sums[1:] = highest, parts


def _logits_grad(
    logits: Tensor,
    column: Tensor,
    highest: Tensor,
    total: Tensor,
    mean: Tensor,
    g: Tensor,
    h: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """``(g onehot - p (g + h (x - mean))) / temperature`` of this rank's columns, with x as in `_local_sums`; only the
    result is of ``dtype``."""
    x = (logits / temperature).sub_(highest[:, None])
    if h is None:
        grad = x.exp_().mul_((-g / total)[:, None])
    else:
        minus_p = x.exp().div_(-total[:, None])
        grad = x.sub_(mean[:, None]).mul_(h[:, None]).add_(g[:, None]).mul_(minus_p)
    at_label = column[:, None] == torch.arange(logits.size(1), device=logits.device)
    return grad.add_(torch.where(at_label, g[:, None], 0.0)).div_(temperature).to(dtype)
