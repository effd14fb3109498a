"""What an optimizer step minimises, token by token, and the sums that its metrics are made of.

A loss function gives one value a token; ``MicroBatch.weights`` does the whole reduction (`slime.algorithms.weights`):
the weighted sum over all tokens of all micro-batches and ranks is the loss, and that of anything else its mean.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slime.algorithms.losses import kl_estimate, policy_loss
from slime.backends.megatron.batch import MicroBatch

MAXIMUM = "_max"


@dataclass(frozen=True)
class TokenLoss:
    """The loss of every token, with gradient, and what to report: float32 [T] each."""

    loss: Tensor
    means: dict[str, Tensor]
    """Reported as their weighted sum."""
    maxima: dict[str, Tensor]
    """Non-negative; reported, with `MAXIMUM` after the name, as the largest over tokens with a weight."""


def grpo_loss(args: argparse.Namespace, batch: MicroBatch, log_probs: Tensor, entropy: Tensor) -> TokenLoss:
    """``policy - entropy_coef * H + kl_loss_coef * KL(policy || reference)`` of every token.

    The behaviour policy is the trainer's own before the rollout's first step. On that step it is the present one: the
    ratio is exactly 1 and the gradient the policy gradient.
    """
    present = log_probs.detach()
    old = present if batch.old_log_probs is None else batch.old_log_probs
    pg_loss, clipped = policy_loss(
        log_probs,
        old,
        batch.advantages,
        eps_clip=args.eps_clip,
        eps_clip_high=args.eps_clip_high,
        eps_clip_c=args.eps_clip_c,
    )
    loss = pg_loss
    means = {
        "train/pg_loss": pg_loss,
        "train/entropy_loss": entropy,
        "train/pg_clipfrac": clipped.float(),
        "train/ppo_kl": old - present,
        "rollout/log_probs": old,
        "rollout/advantages": batch.advantages,
    }
    maxima = {}
    if args.entropy_coef != 0:
        loss = loss - args.entropy_coef * entropy
    if batch.ref_log_probs is not None:
        means["rollout/ref_log_probs"] = batch.ref_log_probs
        kl = kl_estimate(log_probs, batch.ref_log_probs, args.kl_loss_type)
        loss = loss + args.kl_loss_coef * kl
        means["train/kl_loss"] = kl
    if batch.rollout_log_probs is not None:
        difference = (old - batch.rollout_log_probs).abs()
        means["rollout/rollout_log_probs"] = batch.rollout_log_probs
        means["train/train_rollout_logprob_abs_diff"] = difference
        maxima["train/train_rollout_logprob_abs_diff"] = difference
    return TokenLoss(loss, {"train/loss": loss} | means, maxima)


def sft_loss(args: argparse.Namespace, batch: MicroBatch, log_probs: Tensor, entropy: Tensor) -> TokenLoss:
    """Negative log-likelihood of every token."""
    return TokenLoss(-log_probs, {"train/loss": -log_probs, "train/entropy_loss": entropy}, {})


LOSSES: dict[str, Callable[[argparse.Namespace, MicroBatch, Tensor, Tensor], TokenLoss]] = {
    "policy_loss": grpo_loss,
    "sft_loss": sft_loss,
}


def reduce_tokens(loss: TokenLoss, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's share of the loss, a scalar with gradient, and of the step's means and maxima, without."""
    report = {name: (value.detach() * weights).sum() for name, value in loss.means.items()}
    counts = weights > 0
    for name, value in loss.maxima.items():
        report[name + MAXIMUM] = torch.where(counts, value.detach(), 0.0).amax()
    return (loss.loss * weights).sum(), report
