"""Importance weights and rejection for ``--custom-tis-function-path``, with the settings and metrics of upstream.

The trainer's log-probs of a rollout are compared with those of the engine that sampled it, response by response, at the
levels and in the modes of `slime.algorithms.importance`. To these come a trust region for whole responses, weights that
are divided by their mean, and the metrics ``train/mis_*``.

Functions get whole responses on every context-parallel rank, and slime cuts what they return: nothing is gathered here.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections import defaultdict
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from slime.algorithms import importance

Metrics = dict[str, list[Tensor]]
"""Of each name one tensor a response, [response tokens]."""


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    """Upstream's settings that slime has no flag of; slime adds them because ``--custom-tis-function-path`` names
    this module."""
    parser.add_argument("--tis-upper-bound", type=float, help="Upper bound of the weight; default: --tis-clip.")
    parser.add_argument("--tis-lower-bound", type=float, help="Lower bound of the weight; default: 1 / upper bound.")
    parser.add_argument(
        "--tis-batch-normalize",
        action="store_true",
        help="Divide weights by their mean over the micro-batch, so that the loss depends on how samples are packed.",
    )
    parser.add_argument(
        "--rs-trust-region",
        choices=["max", "avg"],
        help="With --use-rs, leave out responses whose largest squared half log ratio (max) or whose mean KL (avg, k3) "
        "is above --rs-tr-threshold.",
    )
    parser.add_argument("--rs-tr-threshold", type=float, default=0.5, help="Bound of --rs-trust-region.")


@dataclass(frozen=True)
class _Response:
    """Vectors of one response, [n] each, without gradient."""

    train: Tensor
    rollout: Tensor
    mask: Tensor

    @property
    def log_ratio(self) -> Tensor:
        return torch.where(self.mask.bool(), self.train - self.rollout, 0.0)

    def total(self, values: Tensor) -> Tensor:
        return torch.where(self.mask.bool(), values, 0.0).sum().expand_as(values)

    def mean(self, values: Tensor) -> Tensor:
        return self.total(values) / self.mask.sum().clamp(min=1)

    def least(self, values: Tensor) -> Tensor:
        """The smallest trained value; 0 where none is trained."""
        trained = values[self.mask.bool()]
        return (trained.min() if len(trained) else values.new_zeros(())).expand_as(values)

    def greatest(self, values: Tensor) -> Tensor:
        return -self.least(-values)


def compute_mis_weights_with_cp(
    args: Namespace,
    *,
    pg_loss: Tensor,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    **kwargs: Any,
) -> tuple[Tensor, list[Tensor], dict[str, list[Tensor]]]:
    """The policy loss times the weights, masks without what was rejected, and metrics ``mis_*``.

    Args:
        pg_loss: [N], of all response tokens, response after response, with gradient.
        train_log_probs, rollout_log_probs, loss_masks: one tensor a response, whole under every layout.
    """
    weights, masks, metrics = compute_mis_weights(
        args, train_log_probs=train_log_probs, rollout_log_probs=rollout_log_probs, loss_masks=loss_masks
    )
    if weights is not None:
        pg_loss = pg_loss * torch.cat(weights)
    return pg_loss, masks, {f"mis_{name}": values for name, values in metrics.items()}


def compute_mis_weights(
    args: Namespace, *, train_log_probs: list[Tensor], rollout_log_probs: list[Tensor], loss_masks: list[Tensor]
) -> tuple[list[Tensor] | None, list[Tensor], Metrics]:
    """Weights (None without ``--use-tis``, where there are metrics alone), masks and metrics of each response.

    A weight is 0 where the loss mask is. A rejected token keeps its weight, and has mask 0.

    Raises:
        ValueError: lists or tensors of different lengths, or bounds that leave nothing between them.
    """
    responses = [
        _Response(train.detach(), rollout.detach(), mask.float())
        for train, rollout, mask in zip(train_log_probs, rollout_log_probs, loss_masks, strict=True)
    ]
    metrics: Metrics = defaultdict(list)
    for number, response in enumerate(responses):
        if not len(response.train) == len(response.rollout) == len(response.mask):
            raise ValueError(f"response {number}: log-probs and loss mask have different lengths")
        for name, values in _mismatch(response).items():
            metrics[name].append(values)
    if not args.use_tis:
        return None, loss_masks, metrics
    weights = [_weight(args, response, metrics) for response in responses]
    masks = [_kept(args, response, metrics) for response in responses]
    if args.tis_batch_normalize:
        weights = _normalized(args, weights, responses, metrics)
    for weight, response in zip(weights, responses, strict=True):
        for name, of in (("mean", response.mean), ("min", response.least), ("max", response.greatest)):
            metrics[f"is_ratio_{name}_final"].append(of(weight))
    return weights, masks, metrics


def _bounds(args: Namespace) -> tuple[float, float]:
    high = args.tis_clip if args.tis_upper_bound is None else args.tis_upper_bound
    low = args.tis_clip_low or 1 / high if args.tis_lower_bound is None else args.tis_lower_bound
    if args.tis_mode != "truncate" and low > high:
        raise ValueError(f"--tis-lower-bound {low} is above --tis-upper-bound {high}")
    return low, high


def _weighed(
    of: _Response, level: importance.Level, mode: importance.Mode = "truncate", low: float = 0.0, high: float = inf
) -> Tensor:
    """The trainer's over the engine's probability at a level, within bounds; 1 where nothing is trained."""
    weight, _ = importance.correction(
        of.train, of.rollout, of.mask, of.mean, of.total, level=level, mode=mode, low=low, high=high
    )
    return weight


def _weight(args: Namespace, response: _Response, metrics: Metrics) -> Tensor:
    low, high = _bounds(args)
    ratio = _weighed(response, args.tis_level)
    weight = _weighed(response, args.tis_level, args.tis_mode, low, high) * response.mask
    metrics["tis_weight_before_bound"].append(ratio)
    if args.tis_mode == "truncate":
        metrics["tis_truncate_fraction"].append((ratio > high).float())
    else:
        metrics[f"tis_{args.tis_mode}_fraction_low"].append((ratio < low).float())
        metrics[f"tis_{args.tis_mode}_fraction_high"].append((ratio > high).float())
    metrics["tis_weight_after_bound"].append(weight)
    return weight


def _kept(args: Namespace, response: _Response, metrics: Metrics) -> Tensor:
    """The loss mask without what ``--use-rs`` leaves out."""
    if not args.use_rs:
        return response.mask
    keep = importance.rejection_keep(
        response.train,
        response.rollout,
        response.mask,
        response.mean,
        response.total,
        response.least,
        level=args.rs_level,
        low=args.rs_lower_bound,
        high=args.rs_upper_bound,
        veto=args.rs_veto_threshold,
    )
    ratio = _weighed(response, args.rs_level)
    metrics["rs_mask_fraction_low"].append((ratio < args.rs_lower_bound).float())
    metrics["rs_mask_fraction_high"].append((ratio > args.rs_upper_bound).float())
    if args.rs_trust_region is not None:
        far = _distance(response, args.rs_trust_region)
        inside = (far <= args.rs_tr_threshold).float()
        metrics["rs_trust_region_metric"].append(far)
        metrics["rs_trust_region_reject_fraction"].append(1 - inside)
        keep = keep * inside
    return response.mask * keep


def _distance(response: _Response, kind: str) -> Tensor:
    """How far the two policies are apart over a response: the largest k2 of a token, or the mean k3."""
    d = response.log_ratio
    return response.greatest(d.square() / 2) if kind == "max" else response.mean(torch.expm1(-d) + d)


def _normalized(args: Namespace, weights: list[Tensor], responses: list[_Response], metrics: Metrics) -> list[Tensor]:
    """Weights whose mean is 1: over tokens at level ``token``, else over responses, each with its own mean."""
    pairs = [(w, r) for w, r in zip(weights, responses, strict=True) if r.mask.any()]
    values = [w[r.mask.bool()] if args.tis_level == "token" else r.mean(w)[:1] for w, r in pairs]
    mean = torch.cat(values).mean() if values else torch.tensor(1.0)
    factor = mean if mean > 0 else torch.ones_like(mean)
    metrics["batch_norm_factor"] += [factor.expand_as(weight) for weight in weights]
    return [weight / factor for weight in weights]


def _mismatch(response: _Response) -> dict[str, Tensor]:
    """Perplexities of both policies, and how far they are apart."""
    train, rollout, d = response.mean(response.train), response.mean(response.rollout), response.log_ratio
    return {
        "training_log_ppl": -train,
        "training_ppl": (-train).exp(),
        "rollout_log_ppl": -rollout,
        "rollout_ppl": (-rollout).exp(),
        "kl": -d,
        "k3_kl": torch.expm1(d) - d,
        "log_ppl_diff": rollout - train,
        "log_ppl_abs_diff": (rollout - train).abs(),
        "ppl_ratio": (rollout - train).exp(),
        "chi2_token": response.mean(_weighed(response, "token").square()) - 1,
        "chi2_seq": _weighed(response, "sequence").square() - 1,
    }
