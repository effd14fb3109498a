"""examples/train_infer_mismatch_helper: weights, masks and metrics against float64 loops, and in the policy loss."""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from examples.train_infer_mismatch_helper import mis
from slime.training.loss.token_loss import policy_loss, reduce_tokens
from tests.algorithm_options import algorithm_options
from tests.micro_batches import engine_rows, fresh_rows, near, numbers, packed, put, same, take

NUM_GPUS = 0
EXAMPLE = Path(mis.__file__).parent
MODULE = "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
Row = dict[str, Any]


def options(**changes: Any) -> Namespace:
    """What a run with the example's functions has, ``changes`` over its defaults."""
    parser = ArgumentParser()
    mis.add_arguments(parser)  # type: ignore[arg-type]
    own = vars(parser.parse_args([]))
    return algorithm_options(**{**own, "use_tis": True, "custom_tis_function_path": MODULE, **changes})


# ---- by plain loops


def at_level(level: str, ratios: list[float]) -> list[float]:
    """The trained tokens' ratios of the trainer's to the engine's probabilities, at a level."""
    if level == "token":
        return ratios
    product = math.prod(ratios)
    return [product if level == "sequence" else product ** (1 / len(ratios))] * len(ratios)


def plain(args: Namespace, rows: list[Row]) -> list[dict[str, list[float]]]:
    """Of each response's trained tokens the weight, what is kept, and every metric."""
    high = args.tis_upper_bound or args.tis_clip
    low = args.tis_lower_bound or 1 / high
    found = []
    for row in rows:
        pairs = [(t, e) for t, e, m in zip(row["train"], row["engine"], row["mask"], strict=True) if m]
        ratios = [math.exp(t - e) for t, e in pairs]
        n = len(pairs)
        if not n:
            found.append({"weight": [], "kept": []})
            continue
        at = at_level(args.tis_level, ratios)
        weight = [{"truncate": min(r, high), "clip": min(max(r, low), high),
                   "mask": r if low <= r <= high else 0.0}[args.tis_mode] for r in at]  # fmt: skip
        kept = [1.0] * n
        of: dict[str, list[float]] = {"tis_weight_before_bound": at, "tis_weight_after_bound": weight}
        above, below = [float(r > high) for r in at], [float(r < low) for r in at]
        if args.tis_mode == "truncate":
            of["tis_truncate_fraction"] = above
        else:
            of |= {f"tis_{args.tis_mode}_fraction_low": below, f"tis_{args.tis_mode}_fraction_high": above}
        if args.use_rs:
            judged = at_level(args.rs_level, ratios)
            kept = [float(args.rs_lower_bound <= r <= args.rs_upper_bound) for r in judged]
            of["rs_mask_fraction_low"] = [float(r < args.rs_lower_bound) for r in judged]
            of["rs_mask_fraction_high"] = [float(r > args.rs_upper_bound) for r in judged]
            if args.rs_veto_threshold and min(ratios) < args.rs_veto_threshold:
                kept = [0.0] * n
            if args.rs_trust_region:
                far = max(math.log(r) ** 2 / 2 for r in ratios)
                if args.rs_trust_region == "avg":
                    far = sum(1 / r - 1 + math.log(r) for r in ratios) / n
                out = float(far > args.rs_tr_threshold)
                of |= {"rs_trust_region_metric": [far] * n, "rs_trust_region_reject_fraction": [out] * n}
                kept = [k * (1 - out) for k in kept]
        means = [sum(pair[i] for pair in pairs) / n for i in (0, 1)]
        per_row = {
            "training_log_ppl": -means[0], "training_ppl": math.exp(-means[0]),
            "rollout_log_ppl": -means[1], "rollout_ppl": math.exp(-means[1]),
            "log_ppl_diff": means[1] - means[0], "log_ppl_abs_diff": abs(means[1] - means[0]),
            "ppl_ratio": math.exp(-means[0]) / math.exp(-means[1]),
            "chi2_token": sum(r * r for r in ratios) / n - 1, "chi2_seq": math.prod(ratios) ** 2 - 1,
        }  # fmt: skip
        of |= {name: [value] * n for name, value in per_row.items()}
        of |= {"kl": [e - t for t, e in pairs], "k3_kl": [r - 1 - math.log(r) for r in ratios]}
        found.append({"weight": weight, "kept": kept} | of)
    factor = 1.0
    if args.tis_batch_normalize:
        every = [row["weight"] if args.tis_level == "token" else row["weight"][:1] for row in found]
        factor = float(np.mean(np.concatenate(every)))
    for of in found:
        of["weight"] = [w / factor for w in of["weight"]]
        if n := len(of["weight"]):
            of |= {f"is_ratio_{name}_final": [f(of["weight"])] * n for name, f in (("min", min), ("max", max))}
            of["is_ratio_mean_final"] = [sum(of["weight"]) / n] * n
            if args.tis_batch_normalize:
                of["batch_norm_factor"] = [factor] * n
    return found


def random_rows(seed: int) -> list[Row]:
    """Responses of unequal length, some to one side; the second has no trained token."""
    rng = np.random.default_rng(seed)
    rows = []
    for number, n in enumerate((7, 3, 1, 12, 5)):
        engine = rng.uniform(-3, -0.1, n)
        mask = (rng.random(n) < 0.7) | (np.arange(n) == 0) if number != 1 else np.zeros(n, bool)
        train = engine + rng.uniform(-0.6, 0.6, n) + rng.choice([-0.4, 0.0, 0.4])
        rows.append({"train": train, "engine": engine, "mask": mask})
    return rows


SETTINGS: list[dict[str, Any]] = [
    {"tis_mode": "truncate", "tis_upper_bound": 1.3},
    {"tis_mode": "clip", "tis_upper_bound": 1.25},
    {"tis_mode": "mask", "tis_upper_bound": 1.5, "tis_lower_bound": 0.8, "tis_level": "geometric"},
    {"tis_mode": "clip", "tis_clip": 1.4, "tis_level": "sequence", "tis_batch_normalize": True},
    {"tis_mode": "truncate", "tis_batch_normalize": True, "use_rs": True, "rs_level": "token"},
    {"tis_mode": "clip", "tis_level": "geometric", "tis_batch_normalize": True},
    {"use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.8, "rs_upper_bound": 1.3, "rs_veto_threshold": 0.45},
    {"use_rs": True, "rs_level": "sequence", "rs_lower_bound": 0.2, "rs_upper_bound": 9.0, "rs_trust_region": "max",
     "rs_tr_threshold": 0.2},
    {"use_rs": True, "rs_level": "token", "rs_trust_region": "avg", "rs_tr_threshold": 0.06},
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: " ".join(f"{v}" for v in s.values()))
@pytest.mark.parametrize("seed", range(3))
def test_against_plain_loops(settings: dict[str, Any], seed: int) -> None:
    args, rows = options(**settings), random_rows(seed)
    tensors = {name: [torch.tensor(row[name]) for row in rows] for name in ("train", "engine", "mask")}
    weights, masks, metrics = mis.compute_mis_weights(
        args, train_log_probs=tensors["train"], rollout_log_probs=tensors["engine"], loss_masks=tensors["mask"]
    )
    assert weights is not None
    names = set()
    for number, (row, want) in enumerate(zip(rows, plain(args, rows), strict=True)):
        got = {"weight": weights[number], "kept": masks[number]} | {k: v[number] for k, v in metrics.items()}
        trained = torch.tensor(row["mask"])
        for name, values in want.items():
            assert got[name][trained].tolist() == pytest.approx(values, rel=1e-9, abs=1e-12), (number, name)
        assert not weights[number][~trained].any()
        assert not masks[number][~trained].any()
        names |= want.keys() - {"weight", "kept"}
    assert names == metrics.keys()


def test_metrics_alone_without_tis() -> None:
    args, row = options(use_tis=False, custom_tis_function_path=None), random_rows(0)[0]
    lists = {name: [torch.tensor(row[key])] for name, key in
             (("train_log_probs", "train"), ("rollout_log_probs", "engine"), ("loss_masks", "mask"))}  # fmt: skip
    weights, masks, metrics = mis.compute_mis_weights(args, **lists)
    assert (weights, masks) == (None, lists["loss_masks"])
    assert {"training_ppl", "kl", "chi2_seq"} < metrics.keys()
    loss = torch.ones(7, requires_grad=True)
    lengths = {"total_lengths": [9], "response_lengths": [7]}
    assert mis.compute_mis_weights_with_cp(args, pg_loss=loss, **lists, **lengths)[0] is loss


def test_what_says_nothing_is_refused() -> None:
    lists = {name: [torch.zeros(2)] for name in ("train_log_probs", "rollout_log_probs", "loss_masks")}
    with pytest.raises(ValueError, match=r"--tis-lower-bound 3\.0 is above --tis-upper-bound 2\.0"):
        mis.compute_mis_weights(options(tis_lower_bound=3.0), **lists)
    with pytest.raises(ValueError, match="response 0: log-probs and loss mask have different lengths"):
        mis.compute_mis_weights(options(), **{**lists, "loss_masks": [torch.zeros(3)]})


# ---- in the policy loss


@pytest.mark.parametrize("reduction", [{}, {"calculate_per_token_loss": True}], ids=["per rollout", "per token"])
@pytest.mark.parametrize(
    "settings",
    [
        {"tis_level": "token", "tis_clip": 1.3, "tis_clip_low": 0.7},
        {"tis_level": "geometric", "tis_mode": "mask", "tis_clip": 1.2, "tis_clip_low": 0.9},
        {"tis_mode": "truncate", "use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.8, "rs_upper_bound": 1.2},
    ],
)
def test_the_loss_is_that_of_slimes_own_correction(settings: dict[str, Any], reduction: dict[str, Any]) -> None:
    """Rejected here, and by --use-rs again: once or twice is the same, and denominators do not change."""
    batch = fresh_rows()
    old = near(engine_rows(batch), 0.4)
    present, advantages = near(old, 0.3), numbers(batch, -2, 2)
    micro_batches = packed(batch, per_token_loss=bool(reduction))
    results = []
    for args in (algorithm_options(use_tis=True, **settings, **reduction), options(**settings, **reduction)):
        losses, gradients = [], []
        for micro_batch in micro_batches:
            micro_batch.old_log_probs, micro_batch.advantages = (
                put(batch, micro_batch, old),
                put(batch, micro_batch, advantages),
            )
            leaf = put(batch, micro_batch, present).requires_grad_()
            total, report = reduce_tokens(policy_loss(args, micro_batch, leaf, leaf.exp()), micro_batch)
            total.backward()
            losses.append(total.item())
            gradients.append(leaf.grad)
        results.append((sum(losses), take(batch, micro_batches, gradients), report))
    (want, gradients, _), (got, custom, report) = results
    assert got == pytest.approx(want, rel=1e-5)
    same(custom, gradients)
    assert want != 0
    assert {"train/mis_training_ppl", "train/mis_is_ratio_mean_final"} < report.keys()


def test_the_yaml_has_a_flag_for_each_of_its_names() -> None:
    known = vars(options())
    assert yaml.safe_load((EXAMPLE / "mis.yaml").read_text()).keys() <= known.keys()
