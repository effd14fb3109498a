"""Losses of one token: tensors of any shape in, the same shape out; masks and reductions are weights of tokens.

The loss of a step is the sum of weight x token loss over all tokens of all ranks (`token_weights`).

A *log ratio* is ``log_probs - old_log_probs``, policy over behaviour policy. ``row_mean`` is the caller's function that
gives, at every token, the mean over the whole response's tokens with loss mask 1 (0 where it has none), differentiable,
and across ranks where a response is cut over several.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# exp() of more overflows float32 long before a ratio of e^20 means anything, and inf * 0 at a masked token is NaN.
MAX_LOG_RATIO = 20.0
LOW_VAR_KL_LIMIT = 10.0


def policy_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate loss of every token, to be minimised.

    With ``rho = exp(log_ratio)``: ``max(-rho * A, -clip(rho, 1 - eps_clip, 1 + eps_clip_high) * A)`` (PPO,
    arXiv:1707.06347, eq. 7; an upper range above the lower one is DAPO's clip-higher, arXiv:2503.14476, section 3.1).
    Where A < 0, ``eps_clip_c`` bounds the loss from above: ``min(-eps_clip_c * A, ...)`` (dual clip,
    arXiv:1912.09729). Of the response's mean log ratio at each token it is GSPO's (arXiv:2507.18071, section 4).

    Args:
        log_ratio: float, with gradient.
        advantages: same shape.
        eps_clip: lower clip range, and the upper one where ``eps_clip_high`` is None.
        eps_clip_high: upper clip range.
        eps_clip_c: dual-clip bound, above 1, else a ValueError; None turns it off.

    Returns:
        The loss, and a bool tensor: where the clipped term was the larger one.
    """
    if eps_clip_c is not None and eps_clip_c <= 1.0:
        raise ValueError(f"--eps-clip-c must be above 1, got {eps_clip_c}")
    ratio = _ratio(log_ratio)
    unclipped = -ratio * advantages
    at_bound = -_clip(ratio, eps_clip, eps_clip_high) * advantages
    loss = torch.maximum(unclipped, at_bound)
    if eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(-eps_clip_c * advantages, loss), loss)
    return loss, at_bound > unclipped


def cispo_loss(
    log_probs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
) -> tuple[Tensor, Tensor]:
    """CISPO (arXiv:2506.13585): ``-stop_gradient(clip(rho, 1 - eps_clip, 1 + eps_clip_high)) * A * log_probs``.

    The importance weight is clipped, not the update, so every token keeps a gradient.

    Args:
        log_probs: float, with gradient.
        log_ratio: its gradient is not used; the others as of `policy_loss`.

    Returns:
        The loss, and a bool tensor: where clipping changed the ratio.
    """
    ratio = _ratio(log_ratio.detach())
    weight = _clip(ratio, eps_clip, eps_clip_high)
    return -weight * advantages * log_probs, weight != ratio


def opsm_keep(log_ratio: Tensor, advantages: Tensor, row_mean: Callable[[Tensor], Tensor], delta: float) -> Tensor:
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556, section 3.1): the factor of every token's loss.

    0 where the advantage is negative and the response's mean of ``old_log_probs - log_probs`` is above ``delta``, else
    1; float, the shape and dtype of ``log_ratio``, without gradient.
    """
    drift = -row_mean(log_ratio.detach())
    return (~((advantages < 0) & (drift > delta))).to(log_ratio.dtype)


def _k3(d: Tensor) -> Tensor:
    d = d.clamp(min=-MAX_LOG_RATIO)  # of both terms: that which stays would push away from the base
    return (-d).expm1() + d  # near 0, exp(-d) - 1 in float32 is mostly rounding


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: d.square() / 2,
    "k3": _k3,
    "low_var_kl": _k3,
}


def kl_estimate(
    log_probs: Tensor, base_log_probs: Tensor, kind: str, importance_log_ratio: Tensor | None = None
) -> Tensor:
    """One-sample estimate of KL(policy || base) at every token (J. Schulman, "Approximating KL divergence", 2020).

    With ``d = log_probs - base_log_probs``: k1 ``d``; k2 ``d^2 / 2``; k3 ``exp(-d) - 1 + d`` (also GRPO,
    arXiv:2402.03300, eq. 4), with ``d`` at least -20; low_var_kl is k3 limited to [-10, 10]. As a loss, only k2 and k3
    pull the policy to the base: the expected gradient of k1 is zero.

    With ``importance_log_ratio``, log of the policy over the one that drew the tokens, the estimate is multiplied by
    its exponential, through which the gradient flows too: k1 and k3 are then unbiased off-policy, and so are their
    gradients (DeepSeek-V3.2, arXiv:2512.02556, section 3.1, for k3). The limit of low_var_kl comes after that.
    ValueError of an unknown ``kind``.
    """
    if kind not in KL_ESTIMATORS:
        raise ValueError(f"--kl-loss-type {kind!r} is not one of {', '.join(KL_ESTIMATORS)}")
    kl = KL_ESTIMATORS[kind](log_probs - base_log_probs)
    if importance_log_ratio is not None:
        kl = _ratio(importance_log_ratio) * kl
    return kl.clamp(-LOW_VAR_KL_LIMIT, LOW_VAR_KL_LIMIT) if kind == "low_var_kl" else kl


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, value_clip: float) -> tuple[Tensor, Tensor]:
    """``max((clip(V, V_old - c, V_old + c) - G)^2, (V - G)^2)`` of every token, c being ``value_clip``.

    The value clipping of OpenAI's PPO2 (arXiv:2005.12729), without its factor of 1/2.

    Returns:
        The loss, and a bool tensor: where V left the range.
    """
    limited = values.clamp(old_values - value_clip, old_values + value_clip)
    loss = torch.maximum((limited - returns).square(), (values - returns).square())
    return loss, limited != values


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
        constant_length: tokens that every rollout is divided by, at least 1.

    Returns:
        float32, the shape of ``mask``. ValueError of not exactly one of ``num_rollouts`` and ``num_tokens``, or
        ``constant_length`` with the latter.
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


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clip(ratio: Tensor, eps_clip: float, eps_clip_high: float | None) -> Tensor:
    return ratio.clamp(1.0 - eps_clip, 1.0 + (eps_clip if eps_clip_high is None else eps_clip_high))
