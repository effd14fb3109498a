"""Reductions as token weights: the loss of a step is the sum of weight x token loss over all tokens of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor


def token_weights(
    mask: Tensor,
    row_of_token: Tensor,
    rollout_mask_sums: Tensor,
    *,
    num_rollouts: int | None = None,
    num_tokens: int | None = None,
    constant_length: int | None = None,
) -> Tensor:
    """The weight of every token in the loss of one optimizer step.

    With ``num_rollouts``, the mean over rollouts of each rollout's token mean (GRPO, arXiv:2402.03300, eq. 3):
    ``mask / rollout_mask_sums[row] / num_rollouts``; with ``constant_length`` besides, a rollout's token *sum* by that
    constant instead, so that a long answer is not held to less (Dr. GRPO, arXiv:2503.20783):
    ``mask / constant_length / num_rollouts``. With ``num_tokens``, the mean over all tokens of the step (DAPO,
    arXiv:2503.14476, eq. 8): ``mask / num_tokens``. Denominators are those of the whole step over all ranks, so that
    weights need no scaling by ranks or micro-batches. Over all of them they add up to the share of the counted
    rollouts that have a trained token: to 1 where ``num_rollouts`` counts these alone, as for metrics, and in a mean
    over tokens; under ``constant_length`` to anything.

    Args:
        mask: [tokens], 1 where a token counts. Any shape that matches ``row_of_token``.
        row_of_token: int64, row of each token in ``rollout_mask_sums``; any valid index where the mask is 0.
        rollout_mask_sums: int64 [rows], loss tokens of each row's whole rollout; 0 for a fully masked one, which then
            adds nothing and still counts in ``num_rollouts``.
        num_rollouts: rollouts of the step, for the per-rollout mean: all of them for a loss, those with a trained token
            for a metric. 0 is as 1: there is nothing to divide.
        num_tokens: loss tokens of the step, for the per-token mean.
        constant_length: tokens that every rollout is divided by, at least 1; goes with ``num_rollouts``.

    Returns:
        float32, the shape of ``mask``.

    Raises:
        ValueError: not exactly one of ``num_rollouts`` and ``num_tokens``, or ``constant_length`` with the latter.
    """
    if (num_rollouts is None) == (num_tokens is None):
        raise ValueError(f"give num_rollouts or num_tokens, not {num_rollouts=} and {num_tokens=}")
    if constant_length is not None and num_tokens is not None:
        raise ValueError(f"a mean over tokens has no constant length: {num_tokens=} and {constant_length=}")
    weights = mask.to(torch.float32)
    if num_tokens is not None:
        return weights / max(num_tokens, 1)
    assert num_rollouts is not None
    num_rollouts = max(num_rollouts, 1)
    if constant_length is not None:
        return weights / constant_length / num_rollouts
    return weights / rollout_mask_sums.clamp(min=1)[row_of_token] / num_rollouts
