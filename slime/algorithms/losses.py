"""Losses of one token: tensors of any shape in, the same shape out; masks and reductions are `weights`' matter."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# exp() of more overflows float32 long before a ratio of e^20 means anything, and inf * 0 at a masked token is NaN.
MAX_LOG_RATIO = 20.0
LOW_VAR_KL_LIMIT = 10.0


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate loss of every token, to be minimised.

    With ``rho = exp(log_probs - old_log_probs)``:
    ``max(-rho * A, -clip(rho, 1 - eps_clip, 1 + eps_clip_high) * A)`` (PPO, arXiv:1707.06347, eq. 7; an upper range
    above the lower one is DAPO's clip-higher, arXiv:2503.14476, section 3.1). Where A < 0, ``eps_clip_c`` bounds the
    loss from above: ``min(-eps_clip_c * A, ...)`` (dual clip, arXiv:1912.09729).

    Args:
        log_probs: float, with gradient.
        old_log_probs: same shape, log-probs under the behaviour policy; no gradient is wanted from it.
        advantages: same shape.
        eps_clip: lower clip range, and the upper one where ``eps_clip_high`` is None.
        eps_clip_high: upper clip range.
        eps_clip_c: dual-clip bound, above 1; None turns it off.

    Returns:
        The loss, and a bool tensor: where the clipped term was the larger one.

    Raises:
        ValueError: ``eps_clip_c`` not above 1.
    """
    if eps_clip_c is not None and eps_clip_c <= 1.0:
        raise ValueError(f"--eps-clip-c must be above 1, got {eps_clip_c}")
    upper = 1.0 + (eps_clip if eps_clip_high is None else eps_clip_high)
    ratio = (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped = -ratio * advantages
    at_bound = -ratio.clamp(1.0 - eps_clip, upper) * advantages
    loss = torch.maximum(unclipped, at_bound)
    if eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(-eps_clip_c * advantages, loss), loss)
    return loss, at_bound > unclipped


def _k1(d: Tensor) -> Tensor:
    return d


def _k2(d: Tensor) -> Tensor:
    return d.square() / 2


def _k3(d: Tensor) -> Tensor:
    return (-d).clamp(max=MAX_LOG_RATIO).exp() - 1 + d


def _low_var_kl(d: Tensor) -> Tensor:
    return _k3(d).clamp(-LOW_VAR_KL_LIMIT, LOW_VAR_KL_LIMIT)


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3, "low_var_kl": _low_var_kl}


def kl_estimate(log_probs: Tensor, base_log_probs: Tensor, kind: str) -> Tensor:
    """One-sample estimate of KL(policy || base) at every token (J. Schulman, "Approximating KL divergence", 2020).

    With ``d = log_probs - base_log_probs``: k1 ``d``; k2 ``d^2 / 2``; k3 ``exp(-d) - 1 + d`` (also GRPO,
    arXiv:2402.03300, eq. 4); low_var_kl is k3 limited to [-10, 10]. As a loss, only k2 and k3 pull the policy to the
    base: the expected gradient of k1 is zero.

    Raises:
        ValueError: an unknown ``kind``.
    """
    if kind not in KL_ESTIMATORS:
        raise ValueError(f"--kl-loss-type {kind!r} is none of {', '.join(KL_ESTIMATORS)}")
    return KL_ESTIMATORS[kind](log_probs - base_log_probs)
