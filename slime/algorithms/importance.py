"""Off-policy correction: the trainer's log-probs of a rollout against those of the engine that sampled it.

The two differ by numerics, or because the engine's weights were older. A token's log ratio, trainer over engine, is
``old_log_probs - rollout_log_probs``. It is taken at one of three *levels*: ``token``, as it is; ``sequence``, its sum
over the response; ``geometric``, its mean over the response. The ratio is the exponential, limited to e^-20 and e^20.

All tensors are token vectors of one shape. Rows are reduced by functions of the caller (across ranks, where a response
is cut over several) that give at every token the mean, sum or smallest value over the response's tokens with mask 1;
what they give for a response without any does not matter. Nothing has a gradient; tokens with mask 0 get 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from slime.algorithms.losses import MAX_LOG_RATIO

RowReduction = Callable[[Tensor], Tensor]
Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "clip", "mask"]


MODES: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "truncate": lambda ratio, low, high: ratio.clamp(max=high),
    "clip": lambda ratio, low, high: ratio.clamp(low, high),
    "mask": lambda ratio, low, high: torch.where(_inside(ratio, low, high), ratio, 0.0),
}


def correction(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    row_mean: RowReduction,
    row_sum: RowReduction,
    *,
    level: Level,
    mode: Mode,
    low: float,
    high: float,
) -> tuple[Tensor, Tensor]:
    """The importance weight of every token's loss, from the ratio at ``level``.

    ``truncate`` gives ``min(ratio, high)`` (at token level truncated importance sampling: F. Yao et al., "Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025), ``clip`` limits it to [low, high],
    ``mask`` keeps it where it lies in [low, high] and gives 0 elsewhere (at token level IcePop, arXiv:2510.18855).

    Args:
        old_log_probs, rollout_log_probs: float, the trainer's and the engine's.
        mask: 1 at tokens of the loss.
        row_mean: mean over the response; called at level ``geometric`` only.
        row_sum: sum over the response; called at level ``sequence`` only.
        level, mode: what the ratio is of, and what becomes of ratios out of bounds; ValueError of unknown ones.
        low, high: bounds; ``truncate`` has no lower one.

    Returns:
        The weight, float, and a bool tensor: where it is not the ratio itself.
    """
    if mode not in MODES:
        raise ValueError(f"importance correction mode {mode!r} is not one of {', '.join(MODES)}")
    log_ratio = _log_ratio(old_log_probs, rollout_log_probs, mask)
    ratio = _ratio(log_ratio, row_mean, row_sum, level)
    weight = MODES[mode](ratio, low, high)
    counts = mask.bool()
    return torch.where(counts, weight, 1.0), counts & (weight != ratio)


def rejection_keep(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    row_mean: RowReduction,
    row_sum: RowReduction,
    row_min: RowReduction,
    *,
    level: Level,
    low: float,
    high: float,
    veto: float | None = None,
) -> Tensor:
    """Rejection sampling: 1 where a token stays in the loss, 0 where it is dropped; denominators do not change.

    Dropped is a ratio outside [low, high]: at level ``token`` that token, at the other levels the response. A response
    with one token whose own ratio is below ``veto`` is dropped whole.

    Args:
        row_min: smallest value of the response; called with ``veto`` only. The others are as of `correction`.
        veto: smallest ratio that any token of a response may have, above 0; None for no such bound.

    Returns:
        Float, the dtype of ``old_log_probs``.
    """
    log_ratio = _log_ratio(old_log_probs, rollout_log_probs, mask)
    keep = _inside(_ratio(log_ratio, row_mean, row_sum, level), low, high)
    if veto is not None:
        keep &= row_min(log_ratio) >= math.log(veto)
    return (keep | ~mask.bool()).to(old_log_probs.dtype)


def _inside(ratio: Tensor, low: float, high: float) -> Tensor:
    return (ratio >= low) & (ratio <= high)


def _log_ratio(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.bool(), old_log_probs.detach() - rollout_log_probs.detach(), 0.0)


def _ratio(log_ratio: Tensor, row_mean: RowReduction, row_sum: RowReduction, level: str) -> Tensor:
    at_level: dict[str, RowReduction] = {"token": lambda x: x, "sequence": row_sum, "geometric": row_mean}
    if level not in at_level:
        raise ValueError(f"importance correction level {level!r} is not one of {', '.join(at_level)}")
    return at_level[level](log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
