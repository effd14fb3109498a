"""Off-policy correction of packed micro-batches against plain float64 loops over rows."""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slime.data import TrainBatch
from slime.options.flags.schema import flag_named
from slime.training.loss.correction import corrected
from slime.training.loss.token_loss import policy_loss, reduce_tokens
from slime.training.micro_batch import MicroBatch
from tests.algorithm_options import algorithm_options
from tests.micro_batches import Rows, engine_rows, fresh_rows, near, numbers, packed, put, same, take

NUM_GPUS = 0
BOUNDS = {"tis_clip_low": 0.7, "tis_clip": 1.3, "rs_lower_bound": 0.6, "rs_upper_bound": 1.6}


def plain_factors(args: Namespace, batch: TrainBatch, trainer: Rows, engine: Rows) -> dict[str, Rows]:
    """What every trained token's loss is multiplied by, and the metrics; 0 at other tokens.

    Ratios of the trainer's to the engine's probabilities (truncated importance sampling of F. Yao et al., 2025; IcePop,
    arXiv:2510.18855): of the token, the product over the sequence, and its geometric mean.
    """
    found: dict[str, Rows] = {name: [np.zeros(len(row)) for row in trainer] for name in ("factor", *METRICS)}
    for row in range(len(batch)):
        counted = np.flatnonzero(batch.loss_mask[row]).tolist()
        ratios = {t: math.exp(trainer[row][t] - engine[row][t]) for t in counted}
        product = math.prod(ratios.values())

        def at(level: str, t: int, ratios: dict[int, float] = ratios, product: float = product) -> float:
            if level == "token":
                return ratios[t]
            ratio = product if level == "sequence" else product ** (1 / len(ratios))
            return min(max(ratio, math.exp(-20)), math.exp(20))

        for t in counted:
            weight, keep = 1.0, 1.0
            if args.use_tis:
                ratio, low, high = at(args.tis_level, t), args.tis_clip_low, args.tis_clip
                weight = {
                    "truncate": min(ratio, high),
                    "clip": max(min(ratio, high), low),
                    "mask": ratio if low <= ratio <= high else 0.0,
                }[args.tis_mode]
                found["tis_clipfrac"][row][t] = float(weight != ratio)
            if args.use_rs:
                keep = float(args.rs_lower_bound <= at(args.rs_level, t) <= args.rs_upper_bound)
                if args.rs_veto_threshold is not None and min(ratios.values()) < args.rs_veto_threshold:
                    keep = 0.0
            found["factor"][row][t] = weight * keep
            found["tis"][row][t], found["tis_abs"][row][t], found["rs_dropfrac"][row][t] = (
                weight,
                abs(weight - 1),
                1 - keep,
            )
    return found


METRICS = ("tis", "tis_clipfrac", "tis_abs", "rs_dropfrac")


def make(args: Namespace) -> tuple[TrainBatch, Rows, Rows, list[MicroBatch]]:
    """A batch, the trainer's and the engine's log-probs, and micro-batches."""
    batch = fresh_rows()
    engine = engine_rows(batch)
    # Whole rows are off to one side, so that no level has all of its ratios in bounds or out.
    shift = [np.random.choice([-0.25, 0.0, 0.0, 0.25]) for _ in engine]
    trainer = near([row + s for row, s in zip(engine, shift, strict=True)], 0.5)
    return batch, trainer, engine, packed(batch, per_token_loss=args.calculate_per_token_loss)


def run(args: Namespace, batch: TrainBatch, trainer: Rows, micro_batches: list[MicroBatch]) -> tuple[Rows, Rows, Any]:
    """The corrected loss, its gradient and the metrics of every token; what is not trained is 0."""
    losses, gradients, metrics = [], [], []
    for micro_batch in micro_batches:
        pg_loss = torch.ones(micro_batch.mask.shape, requires_grad=True)
        log_probs = put(batch, micro_batch, trainer).requires_grad_()
        loss, means = corrected(args, micro_batch, 3 * pg_loss, log_probs)
        (loss * micro_batch.mask).sum().backward()
        assert log_probs.grad is None
        losses.append(loss.detach() * micro_batch.mask)
        gradients.append(pg_loss.grad)
        metrics.append({name.removeprefix("train/"): value * micro_batch.mask for name, value in means.items()})
    names = metrics[0]
    columns = {name: take(batch, micro_batches, [m[name] for m in metrics]) for name in names}
    return take(batch, micro_batches, losses), take(batch, micro_batches, gradients), columns


def check(**options: Any) -> dict[str, Rows]:
    bounds = {name: bound for name, bound in BOUNDS.items() if options.get("use_" + name.split("_")[0])}
    if options.get("tis_mode") == "truncate":
        bounds.pop("tis_clip_low", None)
    args = algorithm_options(**bounds, **options)
    batch, trainer, engine, micro_batches = make(args)
    loss, gradient, metrics = run(args, batch, trainer, micro_batches)
    want = plain_factors(args, batch, trainer, engine)
    same(loss, [3 * row for row in want["factor"]])
    same(gradient, [3 * row for row in want["factor"]])
    tis, rs = ["tis", "tis_clipfrac", "tis_abs"] if args.use_tis else [], ["rs_dropfrac"] if args.use_rs else []
    assert set(metrics) == {*tis, *rs}
    for name, rows in metrics.items():
        same(rows, want[name])
    return want


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
def test_importance_weights(level: str, mode: str) -> None:
    check(use_tis=True, tis_level=level, tis_mode=mode)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("veto", [None, 0.65])
def test_rejection(level: str, veto: float | None) -> None:
    want = check(use_rs=True, rs_level=level, rs_veto_threshold=veto)
    if veto is not None:
        assert any(row.any() for row in want["rs_dropfrac"])


def test_weights_and_rejection_together() -> None:
    check(use_tis=True, tis_level="sequence", tis_mode="truncate", use_rs=True, rs_level="token", rs_veto_threshold=0.6)


def test_far_apart_rows_stay_finite() -> None:
    args = algorithm_options(use_tis=True, tis_level="sequence", tis_mode="truncate", tis_clip=1e12)
    batch, trainer, engine, micro_batches = make(args)
    far = [np.full(len(row), -80.0 if i % 2 else 0.0) for i, row in enumerate(trainer)]
    loss, _, _ = run(args, batch, far, micro_batches)
    same(loss, [3 * row for row in plain_factors(args, batch, far, engine)["factor"]])


@pytest.mark.parametrize("reduction", [{}, {"calculate_per_token_loss": True}], ids=["per rollout", "per token"])
@pytest.mark.parametrize("with_old", [True, False])
def test_the_policy_loss_alone_is_corrected_and_denominators_stay(with_old: bool, reduction: dict[str, Any]) -> None:
    """Dropped tokens are missing from the sum and not from what it is divided by; KL and entropy keep theirs."""
    terms = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "entropy_coef": 0.01, "eps_clip": 0.1}
    correction = {"use_tis": True, "tis_mode": "mask", "use_rs": True, "rs_level": "sequence"}
    args = algorithm_options(**BOUNDS, **terms, **correction, **reduction)
    without = algorithm_options(**terms, **reduction)
    batch, trainer, engine, micro_batches = make(args)
    present = near(trainer, 0.25) if with_old else trainer
    want, total = plain_factors(args, batch, trainer, engine)["factor"], 0.0
    for micro_batch in micro_batches:
        micro_batch.advantages = put(batch, micro_batch, numbers(batch, -1, 1))
        micro_batch.old_log_probs = put(batch, micro_batch, trainer) if with_old else None
        micro_batch.ref_log_probs = put(batch, micro_batch, near(trainer, 0.5))
        factor = put(batch, micro_batch, want)
        columns = []
        for options in (args, without):
            leaves = [put(batch, micro_batch, present).requires_grad_(), torch.ones_like(factor)]
            loss = policy_loss(options, micro_batch, *leaves)
            reduce_tokens(loss, micro_batch)[0].backward()
            columns.append((loss, leaves[0].grad))
        (got, gradient), (plain, _) = columns
        counted = micro_batch.mask > 0

        def assert_same(mine: Tensor, theirs: Tensor, where: Tensor = counted) -> None:
            torch.testing.assert_close(mine[where], theirs[where], rtol=1e-5, atol=1e-6)

        assert_same(got.terms["train/pg_loss"], plain.terms["train/pg_loss"] * factor)
        assert_same(got.loss - got.terms["train/pg_loss"], plain.loss - plain.terms["train/pg_loss"])
        leaf = put(batch, micro_batch, present).requires_grad_()
        again = policy_loss(without, micro_batch, leaf, torch.ones_like(leaf))
        rest = again.loss - again.terms["train/pg_loss"]
        ((again.terms["train/pg_loss"] * factor + rest) * micro_batch.weights).sum().backward()
        assert leaf.grad is not None
        assert gradient is not None
        assert_same(gradient, leaf.grad)
        total += float(micro_batch.weights.sum())
    counting = len({i for i, n in zip(batch.rollout_ids, batch.rollout_mask_sums, strict=True) if n})
    assert total == pytest.approx(1.0 if reduction else counting / len(np.unique(batch.rollout_ids)), rel=1e-5)


@pytest.mark.parametrize("flag", ["use_tis", "use_rs"])
def test_samples_without_the_engines_log_probs(flag: str) -> None:
    args = algorithm_options(**{flag: True})
    micro_batch = packed(fresh_rows(with_engine=False))[0]
    column = torch.zeros(micro_batch.mask.shape)
    with pytest.raises(ValueError, match=f"{flag_named(flag)} needs the engine's log-probs"):
        corrected(args, micro_batch, column, column)


def test_nothing_to_correct() -> None:
    micro_batch = packed(fresh_rows())[0]
    column = torch.zeros(micro_batch.mask.shape)
    assert corrected(algorithm_options(), micro_batch, column, column) == (column, {})
