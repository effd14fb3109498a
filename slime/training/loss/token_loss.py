"""What an optimizer step minimises, token by token, and the sums that its metrics are made of.

A loss function gives one value a token; ``MicroBatch.weights`` does the whole reduction (`token_weights`):
the weighted sum over all tokens of all micro-batches and ranks is the loss, and that of anything else its mean.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from slime.algorithms import losses
from slime.training.loss import hooks
from slime.training.loss.correction import corrected, engine_log_probs
from slime.training.micro_batch import MicroBatch
from slime.training.parallel import Parallel, gathered

MAXIMUM = "largest:"
"""What the name of a maximum begins with until `step_metrics` has taken it over all ranks."""


@dataclass
class TokenLoss:
    """The loss of every token, with gradient, and what to report: float32 [T] each."""

    loss: Tensor
    terms: dict[str, Tensor] = field(default_factory=dict)
    """Parts of the loss, reported as their sum with the weights of the loss."""
    means: dict[str, Tensor] = field(default_factory=dict)
    """Reported as their mean over the step."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """Non-negative; reported, with ``_max`` after the name, as the largest over trained tokens."""
    reduced: dict[str, Tensor] = field(default_factory=dict)
    """Scalars, with gradient, in the loss of the micro-batch beside the tokens'; reported as their sum."""


def policy_loss(args: Namespace, batch: MicroBatch, log_probs: Tensor, entropy: Tensor) -> TokenLoss:
    """``policy - entropy_coef * H + kl_loss_coef * KL(policy || reference)`` of every token.

    The behaviour policy is the trainer's own before the rollout's first step, where no option says otherwise. On that
    step it is the present one: the ratio is exactly 1 and the gradient the policy gradient.
    """
    assert batch.advantages is not None
    present = log_probs.detach()
    old = present if batch.old_log_probs is None else batch.old_log_probs
    if args.use_rollout_logprobs:
        old = engine_log_probs(batch, "--use-rollout-logprobs")
    log_ratio = log_probs - old
    pg_loss, clipped = _surrogate(args, batch, log_probs, log_ratio)
    result = TokenLoss(loss=torch.zeros_like(pg_loss))
    result.means = {
        "train/pg_clipfrac": clipped.float(),
        "train/ppo_kl": old - present,
        "train/ois": log_ratio.detach().clamp(-losses.MAX_LOG_RATIO, losses.MAX_LOG_RATIO).exp(),
        "rollout/log_probs": old,
        "rollout/advantages": batch.advantages,
    }
    if args.use_opsm:
        keep = losses.opsm_keep(log_ratio, batch.advantages, batch.row_mean, args.opsm_delta)
        pg_loss = pg_loss * keep
        result.means["train/opsm_clipfrac"] = 1 - keep
    pg_loss, more = corrected(args, batch, pg_loss, old if batch.old_log_probs is not None else present)
    result.means |= more
    if args.kl_coef != 0 and batch.ref_log_probs is not None:
        trainer = present if batch.old_log_probs is None else batch.old_log_probs
        result.means["rollout/kl"] = losses.kl_estimate(trainer, batch.ref_log_probs, args.kl_loss_type)
    if args.custom_pg_loss_reducer_function_path is None:
        result.loss = result.terms["train/pg_loss"] = pg_loss
    else:
        result.reduced["train/pg_loss"] = hooks.reduce_policy_loss(args, batch, pg_loss)
    result.means["train/entropy_loss"] = entropy
    if args.entropy_coef != 0:
        result.loss = result.loss - args.entropy_coef * entropy
    if batch.ref_log_probs is not None:
        _add_reference(args, batch, log_probs, log_ratio, result)
    _add_mismatch(batch, old if not args.use_rollout_logprobs else present, result)
    return result


def _surrogate(args: Namespace, batch: MicroBatch, log_probs: Tensor, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    clips = {"eps_clip": args.eps_clip, "eps_clip_high": args.eps_clip_high}
    assert batch.advantages is not None
    if args.advantage_estimator == "cispo":
        return losses.cispo_loss(log_probs, log_ratio, batch.advantages, **clips)
    if args.advantage_estimator == "gspo":
        log_ratio = batch.row_mean(log_ratio)
    return losses.policy_loss(log_ratio, batch.advantages, eps_clip_c=args.eps_clip_c, **clips)


def _add_reference(args: Namespace, batch: MicroBatch, log_probs: Tensor, log_ratio: Tensor, result: TokenLoss) -> None:
    assert batch.ref_log_probs is not None
    result.means["rollout/ref_log_probs"] = batch.ref_log_probs
    if not args.use_kl_loss:
        return
    importance = log_ratio if args.use_unbiased_kl else None
    kl = losses.kl_estimate(log_probs, batch.ref_log_probs, args.kl_loss_type, importance)
    if args.kl_loss_coef != 0:
        result.loss = result.loss + args.kl_loss_coef * kl
    result.terms["train/kl_loss"] = kl


def add_distillation(args: Namespace, result: TokenLoss, divergence: Tensor) -> None:
    """Add the divergence from a teacher, [T] with gradient, to the loss, and report it."""
    if args.opd_kl_coef != 0:
        result.loss = result.loss + args.opd_kl_coef * divergence
    result.means["train/opd_reverse_kl"] = divergence


def _add_mismatch(batch: MicroBatch, trainer: Tensor, result: TokenLoss) -> None:
    """How far the trainer's log-probs are from the engine's, for the same tokens; and, of ``--use-opd``, from the
    teacher's."""
    if batch.opd_reverse_kl is not None:
        result.means["train/opd_reverse_kl"] = batch.opd_reverse_kl
    if batch.rollout_log_probs is None:
        return
    difference = (trainer - batch.rollout_log_probs).abs()
    result.means |= {
        "rollout/rollout_log_probs": batch.rollout_log_probs,
        "train/train_rollout_logprob_abs_diff": difference,
        "train/train_rollout_kl": losses.kl_estimate(batch.rollout_log_probs, trainer, "k3"),
    }
    result.maxima["train/train_rollout_logprob_abs_diff"] = difference


def mismatch_report(batch: MicroBatch) -> dict[str, Tensor]:
    """The micro-batch's share of the mismatch metrics, for losses that are not made here."""
    result = TokenLoss(torch.zeros_like(batch.mask))
    if batch.old_log_probs is not None:
        _add_mismatch(batch, batch.old_log_probs, result)
    _, report = reduce_tokens(result, batch)
    del report["train/loss"]
    return report


def sft_loss(args: Namespace, batch: MicroBatch, log_probs: Tensor, entropy: Tensor) -> TokenLoss:
    """Negative log-likelihood of every token."""
    return TokenLoss(-log_probs, means={"train/entropy_loss": entropy})


def value_loss(args: Namespace, batch: MicroBatch, values: Tensor) -> TokenLoss:
    """Clipped squared error of the critic's values, to the returns."""
    assert batch.values is not None
    assert batch.returns is not None
    loss, clipped = losses.value_loss(values, batch.values, batch.returns, value_clip=args.value_clip)
    means = {
        "train/critic-value_clipfrac": clipped.float(),
        "rollout/values": batch.values,
        "rollout/returns": batch.returns,
    }
    return TokenLoss(loss, means=means)


LOSSES = {"policy_loss": policy_loss, "sft_loss": sft_loss}


def reduce_tokens(loss: TokenLoss, batch: MicroBatch, name: str = "train/loss") -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's share of the loss, a scalar with gradient, and of the step's metrics, there as ``name``."""
    total = (loss.loss * batch.weights).sum() + sum(loss.reduced.values())
    report = {name: total.detach()} | {key: value.detach() for key, value in loss.reduced.items()}
    report |= {key: (value.detach() * batch.weights).sum() for key, value in loss.terms.items()}
    report |= {key: (value.detach() * batch.mean_weights).sum() for key, value in loss.means.items()}
    for key, value in loss.maxima.items():
        report[MAXIMUM + key] = torch.where(batch.mask > 0, value.detach(), 0.0).amax()
    return total, report


def step_metrics(reports: list[dict[str, Tensor]], counts: dict[str, float], parallel: Parallel) -> dict[str, float]:
    """Sums and maxima of the micro-batches over all ranks, and ``counts``, likewise summed.

    Args:
        reports: of `reduce_tokens`, one a micro-batch; none before the last stage.
        counts: of this rank's rows, under names that no report has.
    """
    metrics = _reduce(reports, counts, parallel) if parallel.is_last_stage else {}
    if parallel.pp.size > 1:
        box = [metrics]
        dist.broadcast_object_list(box, group_src=parallel.pp.size - 1, group=parallel.pp.group)
        metrics = box[0]
    return metrics


def _reduce(reports: list[dict[str, Tensor]], counts: dict[str, float], parallel: Parallel) -> dict[str, float]:
    group = parallel.dp_cp.group
    # Of all ranks, in the same order on each: a user's loss may report what only some micro-batches have.
    own = dict.fromkeys(name for report in reports for name in report)
    names = list(dict.fromkeys(name for each in gathered(own, group) for name in each))
    zero = torch.zeros_like(next(iter(reports[0].values())))
    table = torch.stack([torch.stack([report.get(name, zero) for name in names]) for report in reports])
    is_maximum = torch.tensor([name.startswith(MAXIMUM) for name in names], device=table.device)
    maxima = table.amax(0)
    of_rows = [count * parallel.counts_rows for count in counts.values()]
    sums = torch.cat([table.double().sum(0), torch.tensor(of_rows, dtype=torch.float64, device=table.device)])
    if parallel.dp_cp.size > 1:
        dist.all_reduce(sums, group=group)
        if is_maximum.any():
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
    sums[: len(names)] = torch.where(is_maximum, maxima.double(), sums[: len(names)])
    shown = [f"{name.removeprefix(MAXIMUM)}_max" if name.startswith(MAXIMUM) else name for name in names]
    return dict(zip([*shown, *counts], sums.tolist(), strict=True))
