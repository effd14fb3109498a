"""From rewards to the advantage of every response token: padded tensors [R, N], R responses of at most N tokens.

``mask`` is 1 at the tokens that the policy is trained on and 0 at all others: padding, tool output, what an environment
wrote. Tokens with mask 0 are 0 in every result and are skipped over, not stepped through: the successor of a token is
the next one with mask 1, and a terminal reward lands on the last. A response without any such token gives zeros.

The estimators take ``rewards``, float [R]; ``kl``, float [R, N], an estimate of KL(policy || reference) at each token,
of which None counts as 0; and ``kl_coef``, its weight. Results are float32, or float64 where ``rewards`` (`whiten`:
``x``) are, and carry no gradient of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor


def discounted_sums(x: Tensor, discount: float) -> Tensor:
    """``y[:, t] = x[:, t] + discount * y[:, t + 1]`` of [R, N], with nothing after the end; ``discount`` in [0, 1].

    By doubling: the sums over the next 2^k entries give those over the next 2^(k+1), so N entries take log2 N steps.
    Zeros after the end of a row do not change a bit of its result.
    """
    sums = x.clone()
    span, factor = 1, discount
    while span < x.shape[1]:
        sums[:, :-span] += factor * sums[:, span:]
        span, factor = 2 * span, factor * factor
    return sums


def group_relative(rewards: Tensor, mask: Tensor, kl: Tensor | None = None, kl_coef: float = 0.0) -> Tensor:
    """The response's reward at each of its tokens, less ``kl_coef * kl`` there.

    Rewards that `slime.algorithms.rewards.normalize_rewards` made relative to their group give the advantages of GRPO
    (arXiv:2402.03300, section 4.1.2, outcome supervision), GSPO (arXiv:2507.18071), CISPO (arXiv:2506.13585),
    RLOO (arXiv:2402.14740) and the baseline form of REINFORCE++ (arXiv:2501.03262). The KL penalty is subtracted for
    all of them alike. [R, N].
    """
    dtype = _dtype(rewards)
    advantages = rewards.to(dtype)[:, None].expand(mask.shape)
    if kl is not None:
        advantages = advantages - kl_coef * kl.to(dtype)
    return torch.where(mask.bool(), advantages, 0.0)


def distilled(advantages: Tensor, mask: Tensor, reverse_kl: Tensor, coef: float) -> Tensor:
    """Advantages less ``coef * reverse_kl`` at each token, in the advantages' type.

    ``reverse_kl``, float [R, N], is ``log student(a_t) - log teacher(a_t)`` of the sampled tokens, whose mean over the
    student's samples is KL(student || teacher) of each next token: the policy gradient of its negative is that of
    MiniLLM (arXiv:2306.08543, section 2.2) without the terms of later tokens, on-policy distillation (arXiv:2306.13649)
    by one sampled token. [R, N].
    """
    return advantages - torch.where(mask.bool(), coef * reverse_kl.to(advantages.dtype), 0.0)


def reinforce_plus_plus(
    rewards: Tensor, mask: Tensor, kl: Tensor | None = None, *, kl_coef: float, gamma: float
) -> Tensor:
    """Returns ``G_t = sum_k gamma^k rho_{t+k}`` of REINFORCE++ (arXiv:2501.03262), which are its advantages once
    whitened over the whole batch.

    ``rho_t = -kl_coef * kl_t``, and the response's reward on top at its last token; t counts tokens with mask 1, and
    ``gamma`` is the discount of each. [R, N].
    """
    order, valid = _compression(mask)
    sums = discounted_sums(_token_rewards(rewards, valid, order, kl, kl_coef), gamma)
    return _restore(sums, order, valid)


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    kl: Tensor | None = None,
    *,
    kl_coef: float,
    gamma: float,
    lambd: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates (arXiv:1506.02438, eq. 16) and the returns that a critic is trained on.

    ``delta_t = rho_t + gamma * V_{t+1} - V_t``, ``A_t = sum_k (gamma * lambd)^k delta_{t+k}``, ``G_t = A_t + V_t``;
    rho are the token rewards of `reinforce_plus_plus`, the value after the end is 0, t counts tokens with mask 1.

    Args:
        values: float [R, N], the critic's estimate before each token.
        lambd: decay a token of how far errors of the values are carried back; 1 gives Monte Carlo returns.

    Returns:
        Advantages and returns, [R, N] each.
    """
    order, valid = _compression(mask)
    present = torch.where(valid, values.to(_dtype(rewards)).gather(1, order), 0.0)
    following = torch.nn.functional.pad(present, (0, 1))[:, 1:]
    delta = _token_rewards(rewards, valid, order, kl, kl_coef) + gamma * following - present
    advantages = discounted_sums(delta, gamma * lambd)
    return _restore(advantages, order, valid), _restore(advantages + present, order, valid)


def whitening_sums(x: Tensor, mask: Tensor) -> Tensor:
    """What `whiten` needs to know of all ranks: float64 [3], count, sum and sum of squares where ``mask`` is 1.

    Adding the tensors of several ranks gives that of their tokens together.
    """
    chosen = torch.where(mask.bool(), x, 0.0).to(torch.float64)
    return torch.stack([mask.bool().sum().to(torch.float64), chosen.sum(), chosen.square().sum()])


def whiten(x: Tensor, mask: Tensor, sums: Tensor, epsilon: float = 1e-8) -> Tensor:
    """``(x - mean) / sqrt(variance + epsilon)`` where ``mask`` is 1, and 0 elsewhere.

    ``x`` is float, of any shape, ``sums`` `whitening_sums` added up over all ranks. The variance is the unbiased one,
    over n - 1, and 0 for a single token, which becomes 0; ``epsilon`` keeps equal entries finite. ValueError where no
    token has mask 1 on any rank.
    """
    count, total, squares = sums.tolist()
    if count == 0:
        raise ValueError("advantages cannot be whitened: every token of the step is masked, on every rank")
    mean = total / count
    # Rounding may take a variance of 0 below it.
    variance = max(squares / count - mean * mean, 0.0) * count / max(count - 1, 1)
    white = (x.to(torch.float64) - mean) * (variance + epsilon) ** -0.5
    return torch.where(mask.bool(), white, 0.0).to(_dtype(x))


def _dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _compression(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Positions with those of mask 1 moved to the front of their row in order, int64 [R, N], and which of the front
    positions they fill, bool [R, N]."""
    chosen = mask.bool()
    order = torch.argsort((~chosen).to(torch.uint8), dim=1, stable=True)
    return order, chosen.gather(1, order)


def _restore(compressed: Tensor, order: Tensor, valid: Tensor) -> Tensor:
    return torch.zeros_like(compressed).scatter(1, order, torch.where(valid, compressed, 0.0))


def _token_rewards(rewards: Tensor, valid: Tensor, order: Tensor, kl: Tensor | None, kl_coef: float) -> Tensor:
    """``-kl_coef * kl`` at every token, with the reward on top at the last, compressed to the front: [R, N]."""
    dtype = _dtype(rewards)
    tokens = torch.zeros(valid.shape, dtype=dtype, device=rewards.device)
    if kl is not None:
        tokens = torch.where(valid, -kl_coef * kl.to(dtype).gather(1, order), tokens)
    is_last = valid & ~torch.nn.functional.pad(valid, (0, 1))[:, 1:]
    return tokens + torch.where(is_last, rewards.to(dtype)[:, None], 0.0)
