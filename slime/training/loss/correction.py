"""Train-inference mismatch of log-probs, corrected by importance weights (TIS) and rejection sampling (RS)."""

from __future__ import annotations

from argparse import Namespace

from torch import Tensor

from slime.algorithms import importance
from slime.training.loss import hooks
from slime.training.micro_batch import MicroBatch


def corrected(
    args: Namespace, batch: MicroBatch, pg_loss: Tensor, train_log_probs: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss times what ``--use-tis`` and ``--use-rs`` make of it, and metrics to report as means.

    ``pg_loss`` is [T], with gradient; ``train_log_probs`` [T], by the trainer, before the rollout's first step.
    ValueError of samples without the engine's log-probs.
    """
    if not (args.use_tis or args.use_rs):
        return pg_loss, {}
    means: dict[str, Tensor] = {}
    both = (train_log_probs, engine_log_probs(batch, "--use-tis" if args.use_tis else "--use-rs"))
    if args.custom_tis_function_path is not None:
        pg_loss, means = hooks.custom_tis(args, batch, pg_loss, train_log_probs)
    elif args.use_tis:
        weight, clipped = importance.correction(
            *both,
            batch.mask,
            batch.row_mean,
            batch.row_sum,
            level=args.tis_level,
            mode=args.tis_mode,
            low=args.tis_clip_low,
            high=args.tis_clip,
        )
        pg_loss = pg_loss * weight
        means = {"train/tis": weight, "train/tis_clipfrac": clipped.float(), "train/tis_abs": (weight - 1).abs()}
    if args.use_rs:
        keep = importance.rejection_keep(
            *both,
            batch.mask,
            batch.row_mean,
            batch.row_sum,
            batch.row_min,
            level=args.rs_level,
            low=args.rs_lower_bound,
            high=args.rs_upper_bound,
            veto=args.rs_veto_threshold,
        )
        pg_loss = pg_loss * keep
        means["train/rs_dropfrac"] = 1 - keep
    return pg_loss, means


def engine_log_probs(batch: MicroBatch, flag: str) -> Tensor:
    """The engine's log-probs, [T], which ``flag`` needs; ValueError of samples without."""
    if batch.rollout_log_probs is None:
        raise ValueError(f"{flag} needs the engine's log-probs, and the samples have no rollout_log_probs")
    return batch.rollout_log_probs
