"""Random numbers of a policy loss, and the loss, its metrics and gradients by plain float64 loops over rows."""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from slime.data import TrainBatch
from slime.training.loss.token_loss import MAXIMUM
from slime.training.micro_batch import MicroBatch
from tests.micro_batches import Rows, engine_rows, fresh_rows, near, numbers, packed, put, step_of


@dataclass
class Inputs:
    """The same numbers as rows, for the loops, and as columns of micro-batches."""

    args: Namespace
    batch: TrainBatch
    log_probs: Rows
    entropy: Rows
    advantages: Rows
    old: Rows | None = None
    ref: Rows | None = None
    engine: Rows | None = None
    micro_batches: list[MicroBatch] = field(default_factory=list)
    of_policy: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Log-probs and entropy of every micro-batch, leaves."""


def inputs(args: Namespace, *, with_old: bool = True, with_engine: bool = True) -> Inputs:
    """Of the options' loss; micro-batches have the columns that it takes.

    Args:
        with_old: log-probs of a pass before the step, without which it is on policy.
        with_engine: those of the engine.
    """
    batch = fresh_rows(with_engine=with_engine)
    log_probs = numbers(batch, -5, 0)
    made = Inputs(args, batch, log_probs, numbers(batch, 0, 5), numbers(batch, -2, 2))
    for row in made.advantages:  # a sign a row, as rewards give it; some are 0
        row[:] = np.where(np.random.rand(len(row)) < 0.1, 0.0, np.abs(row) * np.random.choice([-1, 1]))
    made.old = near(log_probs, 0.5) if with_old else None
    made.ref = near(log_probs, 4.0) if args.needs_reference else None
    made.engine = engine_rows(batch) if with_engine else None
    if made.engine is not None and args.use_rollout_logprobs:
        made.log_probs = near(made.engine, 0.75)
    made.micro_batches = packed(
        batch, per_token_loss=args.calculate_per_token_loss, constant_length=args.loss_constant_length
    )
    for micro_batch in made.micro_batches:
        micro_batch.advantages = put(batch, micro_batch, made.advantages)
        micro_batch.old_log_probs = put(batch, micro_batch, made.old) if made.old else None
        micro_batch.ref_log_probs = put(batch, micro_batch, made.ref) if made.ref else None
        leaves = [put(batch, micro_batch, rows).requires_grad_() for rows in (made.log_probs, made.entropy)]
        made.of_policy.append((leaves[0], leaves[1]))
    return made


def plain_weights(args: Namespace, batch: TrainBatch, row: int) -> tuple[float, float]:
    """Of one trained token in the loss and in a mean."""
    step = step_of(batch)
    if args.calculate_per_token_loss:
        return 1 / step.num_tokens, 1 / step.num_tokens
    parts = np.flatnonzero(batch.rollout_ids == batch.rollout_ids[row]).tolist()
    of_rollout = [int(batch.loss_mask[part].sum()) for part in parts]
    tokens = args.loss_constant_length or max(sum(of_rollout), 1)
    return 1 / tokens / step.num_rollouts, 1 / max(sum(of_rollout), 1) / step.num_trained_rollouts


def _surrogate(
    args: Namespace, log_prob: Tensor, log_ratio: Tensor, of_sequence: Tensor, advantage: float
) -> tuple[Tensor, bool]:
    """PPO (arXiv:1707.06347, eq. 7) with DAPO's clip-higher and the dual clip of arXiv:1912.09729; GSPO
    (arXiv:2507.18071, eq. 5); CISPO (arXiv:2506.13585, eq. 4)."""
    low, high = 1 - args.eps_clip, 1 + args.eps_clip_high
    if args.advantage_estimator == "cispo":
        weight = min(max(math.exp(log_ratio.item()), low), high)
        return -weight * advantage * log_prob, weight != math.exp(log_ratio.item())
    ratio = torch.exp(of_sequence if args.advantage_estimator == "gspo" else log_ratio)
    limited = ratio if low <= ratio <= high else torch.tensor(low if ratio < low else high, dtype=torch.float64)
    plain, bounded = -ratio * advantage, -limited * advantage
    is_clipped = bool(bounded > plain)
    loss = bounded if is_clipped else plain
    if args.eps_clip_c is not None and advantage < 0 and loss > -args.eps_clip_c * advantage:
        loss = torch.tensor(-args.eps_clip_c * advantage, dtype=torch.float64)
    return loss, is_clipped


def _kl(args: Namespace, difference: Tensor, log_ratio: Tensor) -> Tensor:
    """J. Schulman, "Approximating KL divergence"; weighed as in DeepSeek-V3.2 (arXiv:2512.02556, section 3.1)."""
    kind = args.kl_loss_type
    kl = {"k1": difference, "k2": difference**2 / 2}.get(kind, torch.exp(-difference) - 1 + difference)
    if args.use_unbiased_kl:
        kl = kl * log_ratio.exp()
    return kl.clamp(-10, 10) if kind == "low_var_kl" else kl


def plain_policy_loss(made: Inputs) -> tuple[dict[str, float], list[Tensor], list[Tensor]]:
    """Metrics, and the leaves with the gradients of the loss."""
    args, batch = made.args, made.batch
    log_probs, entropies = ([torch.tensor(r, requires_grad=True) for r in x] for x in (made.log_probs, made.entropy))
    total, metrics, maximum = torch.zeros((), dtype=torch.float64), dict.fromkeys(_names(made), 0.0), 0.0
    for row in range(len(batch)):
        counted = np.flatnonzero(batch.loss_mask[row]).tolist()
        in_loss, in_mean = plain_weights(args, batch, row)
        present = made.log_probs[row]
        trainer = present if made.old is None else made.old[row]
        behaviour = trainer
        if args.use_rollout_logprobs:
            assert made.engine is not None
            trainer, behaviour = present, made.engine[row]
        log_ratios = [log_probs[row][t] - behaviour[t] for t in range(len(present))]
        of_sequence = sum((log_ratios[t] for t in counted), torch.zeros(())) / max(len(counted), 1)
        for t in counted:
            advantage = float(made.advantages[row][t])
            policy, is_clipped = _surrogate(args, log_probs[row][t], log_ratios[t], of_sequence, advantage)
            means = {
                "train/pg_clipfrac": float(is_clipped),
                "train/ppo_kl": behaviour[t] - present[t],
                "train/ois": math.exp(present[t] - behaviour[t]),
                "rollout/log_probs": behaviour[t],
                "rollout/advantages": advantage,
                "train/entropy_loss": made.entropy[row][t],
            }
            if args.use_opsm:
                is_dropped = advantage < 0 and -of_sequence.item() > args.opsm_delta
                policy = policy * (1 - is_dropped)
                means["train/opsm_clipfrac"] = float(is_dropped)
            terms = {"train/pg_loss": policy}
            loss = policy - args.entropy_coef * entropies[row][t]
            if made.ref is not None:
                means["rollout/ref_log_probs"] = made.ref[row][t]
            if made.ref is not None and args.kl_coef:
                before = present[t] if made.old is None else made.old[row][t]
                constant = Namespace(**vars(args) | {"use_unbiased_kl": False})
                means["rollout/kl"] = float(_kl(constant, torch.tensor(before - made.ref[row][t]), torch.zeros(())))
            if made.ref is not None and args.use_kl_loss:
                terms["train/kl_loss"] = _kl(args, log_probs[row][t] - made.ref[row][t], log_ratios[t])
                loss = loss + args.kl_loss_coef * terms["train/kl_loss"]
            if made.engine is not None:
                difference = trainer[t] - made.engine[row][t]
                means["rollout/rollout_log_probs"] = made.engine[row][t]
                means["train/train_rollout_logprob_abs_diff"] = abs(difference)
                means["train/train_rollout_kl"] = math.exp(difference) - 1 - difference
                maximum = max(maximum, abs(difference))
            total = total + in_loss * loss
            for name, term in terms.items():
                metrics[name] += in_loss * term.item()
            for name, value in means.items():
                metrics[name] += in_mean * value
    total.backward()
    metrics["train/loss"] = total.item()
    if made.engine is not None:
        metrics[MAXIMUM + "train/train_rollout_logprob_abs_diff"] = maximum
    return metrics, log_probs, entropies


def _names(made: Inputs) -> list[str]:
    """Of the metrics of a policy loss."""
    always = ["loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl", "ois"]
    opsm = ["train/opsm_clipfrac"] if made.args.use_opsm else []
    kl = ["train/kl_loss"] if made.args.use_kl_loss else []
    ref = ["rollout/ref_log_probs"] if made.ref is not None else []
    ref += ["rollout/kl"] if made.ref is not None and made.args.kl_coef else []
    engine = ["rollout/rollout_log_probs", "train/train_rollout_kl", "train/train_rollout_logprob_abs_diff"]
    return (
        [f"train/{name}" for name in always]
        + ["rollout/log_probs", "rollout/advantages", *opsm, *kl, *ref]
        + (engine if made.engine is not None else [])
    )
