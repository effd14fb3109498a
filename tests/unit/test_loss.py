"""Losses of packed micro-batches against plain loops over rows, with their metrics and gradients."""

from __future__ import annotations

import math
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from torch import Tensor

from slime.data import Ragged
from slime.options.learning.algorithm import AlgorithmOptions
from slime.training.loss.token_loss import (
    LOSSES,
    MAXIMUM,
    mismatch_report,
    policy_loss,
    reduce_tokens,
    sft_loss,
    value_loss,
)
from tests.algorithm_options import algorithm_options
from tests.micro_batches import fresh_rows, numbers, packed, put, same, take
from tests.parallel import rollouts
from tests.plain_loss import Inputs, inputs, plain_policy_loss, plain_weights

NUM_GPUS = 0

REDUCTIONS: list[dict[str, Any]] = [{}, {"calculate_per_token_loss": True}, {"loss_constant_length": 7}]
WHITE = {"normalize_advantages": True}

POLICIES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "clip higher, dual clip": {"eps_clip": 0.1, "eps_clip_high": 0.3, "eps_clip_c": 1.5},
    "gspo": {"advantage_estimator": "gspo", "eps_clip": 0.05, "eps_clip_high": 0.08},
    "gspo, dual clip": {"advantage_estimator": "gspo", "eps_clip": 0.01, "eps_clip_c": 1.02},
    "cispo": {"advantage_estimator": "cispo", "eps_clip": 0.3, "eps_clip_high": 0.2},
    "rloo": {"advantage_estimator": "rloo"},
    "reinforce_plus_plus": {"advantage_estimator": "reinforce_plus_plus", **WHITE},
    "reinforce_plus_plus_baseline": {"advantage_estimator": "reinforce_plus_plus_baseline", **WHITE},
    "ppo": {"advantage_estimator": "ppo"},
    "entropy": {"entropy_coef": 0.03},
    "opsm": {"use_opsm": True, "opsm_delta": 0.01},
    "opsm, gspo": {"use_opsm": True, "opsm_delta": 0.01, "advantage_estimator": "gspo", "eps_clip": 0.05},
    "k1": {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k1"},
    "k2": {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k2"},
    "k3": {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k3"},
    "low_var_kl": {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "low_var_kl"},
    "unbiased k1": {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k1", "use_unbiased_kl": True},
    "unbiased k2": {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k2", "use_unbiased_kl": True},
    "unbiased k3": {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k3", "use_unbiased_kl": True},
    "unbiased low_var_kl": {
        "use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "low_var_kl", "use_unbiased_kl": True,
    },
    "unbiased kl of gspo": {
        "use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k3", "use_unbiased_kl": True,
        "advantage_estimator": "gspo",
    },
    "kl only measured": {"use_kl_loss": True, "kl_loss_type": "k2"},
    "penalty in the rewards": {"kl_coef": 0.1},
    "rollout log-probs": {"use_rollout_logprobs": True, "use_kl_loss": True, "kl_loss_coef": 0.1, "eps_clip": 0.4},
    "everything": {
        "advantage_estimator": "gspo", "eps_clip": 0.05, "eps_clip_c": 2.0, "entropy_coef": -0.01, "use_opsm": True,
        "use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "low_var_kl", "use_unbiased_kl": True,
    },
}  # fmt: skip


def from_micro_batches(made: Inputs) -> dict[str, float]:
    """Metrics over all micro-batches, as `metrics.step_metrics` adds them up; gradients are left in the leaves."""
    reports = []
    for micro_batch, (log_probs, entropy) in zip(made.micro_batches, made.of_policy, strict=True):
        loss = policy_loss(made.args, micro_batch, log_probs, entropy)
        total, report = reduce_tokens(loss, micro_batch)
        assert torch.equal(total.detach(), report["train/loss"])
        assert not any(value.requires_grad for value in report.values())
        total.backward()
        reports.append(report)
    return joined(reports)


def joined(reports: list[dict[str, Tensor]]) -> dict[str, float]:
    return {
        name: float(max(r[name] for r in reports) if name.startswith(MAXIMUM) else sum_of(name, reports))
        for name in reports[0]
    }


def sum_of(name: str, reports: list[dict[str, Tensor]]) -> Tensor:
    return torch.stack([report[name].double() for report in reports]).sum()


def check(made: Inputs) -> dict[str, float]:
    """Values, metrics and gradients against the loops."""
    got = from_micro_batches(made)
    want, log_probs, entropies = plain_policy_loss(made)
    assert set(got) == set(want)
    for name, value in want.items():
        assert got[name] == pytest.approx(value, rel=2e-5, abs=2e-6), name
    for i, leaves in enumerate((log_probs, entropies)):
        columns = [pair[i] for pair in made.of_policy]
        gradients = [torch.zeros_like(column) if column.grad is None else column.grad for column in columns]
        same(take(made.batch, made.micro_batches, gradients), [leaf.grad for leaf in leaves])
        for gradient, micro_batch in zip(gradients, made.micro_batches, strict=True):
            assert not gradient[micro_batch.mask == 0].any()
    return got


@pytest.mark.parametrize("with_old", [True, False], ids=["old", "on policy"])
@pytest.mark.parametrize("name", list(POLICIES))
def test_policy_loss(name: str, with_old: bool) -> None:
    got = check(inputs(algorithm_options(**POLICIES[name]), with_old=with_old))
    if with_old and POLICIES[name].get("advantage_estimator") != "gspo":
        assert got["train/pg_clipfrac"] > 0


@pytest.mark.parametrize("reduction", REDUCTIONS[1:], ids=["per token", "constant length"])
@pytest.mark.parametrize("name", ["grpo", "cispo", "everything"])
def test_reductions_of_the_policy_loss(name: str, reduction: dict[str, Any]) -> None:
    check(inputs(algorithm_options(**POLICIES[name], **reduction)))


def test_policy_loss_without_an_engines_log_probs() -> None:
    got = check(inputs(algorithm_options(), with_engine=False))
    assert not any("rollout_" in name for name in got)
    made = inputs(algorithm_options(use_rollout_logprobs=True), with_engine=False)
    with pytest.raises(
        ValueError, match="--use-rollout-logprobs needs the engine's log-probs, and the samples have no"
    ):
        from_micro_batches(made)


def test_mismatch_is_reported_of_any_loss() -> None:
    """The same that the policy loss reports; of the micro-batches, as those of a user's loss."""
    made = inputs(algorithm_options(), with_old=True)
    want = from_micro_batches(made)
    got: dict[str, float] = {}
    for report in map(mismatch_report, made.micro_batches):
        for name, value in report.items():
            largest = name.startswith(MAXIMUM)
            got[name] = max(got.get(name, 0.0), float(value)) if largest else got.get(name, 0.0) + float(value)
    names = ("rollout/rollout_log_probs", "train/train_rollout_kl", "train/train_rollout_logprob_abs_diff")
    assert set(got) == {*names, MAXIMUM + names[-1]}
    for name in names:
        assert got[name] == pytest.approx(want[name], rel=1e-6)
    assert got[MAXIMUM + names[-1]] > got[names[-1]] > 0
    made = inputs(algorithm_options(), with_engine=False)
    assert mismatch_report(made.micro_batches[0]) == {}


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo", "ppo"])
@pytest.mark.parametrize("separate_pass", [True, False])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_the_first_step_is_exactly_on_policy_and_at_the_reference(
    estimator: str, separate_pass: bool, kind: str
) -> None:
    options = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": kind, "eps_clip": 0.0}
    args = algorithm_options(advantage_estimator=estimator, **options)
    made = inputs(args)
    for micro_batch, (log_probs, _) in zip(made.micro_batches, made.of_policy, strict=True):
        log_probs.data.add_(torch.rand_like(log_probs) / 3)  # off the grid
        micro_batch.old_log_probs = log_probs.detach().clone() if separate_pass else None
        micro_batch.ref_log_probs = log_probs.detach().clone()
    got = from_micro_batches(made)
    for name in ("train/ppo_kl", "train/pg_clipfrac", "train/kl_loss"):
        assert got[name] == 0.0
    for micro_batch, leaves in zip(made.micro_batches, made.of_policy, strict=True):
        ratio = policy_loss(args, micro_batch, *leaves).means["train/ois"][micro_batch.mask > 0]
        assert torch.equal(ratio, torch.ones_like(ratio))


def test_opsm_clipfrac_is_a_plain_mean() -> None:
    args = algorithm_options(use_opsm=True, opsm_delta=0.0, calculate_per_token_loss=True)
    made = inputs(args)
    made.old = [np.minimum(row + 0.25, 0.0) for row in made.log_probs]
    for micro_batch in made.micro_batches:
        micro_batch.old_log_probs = put(made.batch, micro_batch, made.old)
    dropped, counted = 0, 0
    for row, advantages in enumerate(made.advantages):
        for t in np.flatnonzero(made.batch.loss_mask[row]):
            drift = np.mean((made.old[row] - made.log_probs[row])[made.batch.loss_mask[row] == 1])
            dropped += int(advantages[t] < 0 and drift > 0)
            counted += 1
    assert 0 < dropped < counted
    assert check(made)["train/opsm_clipfrac"] == pytest.approx(dropped / counted, rel=1e-5)


def test_means_do_not_change_under_a_constant_length() -> None:
    made = inputs(algorithm_options(use_kl_loss=True, use_opsm=True))
    plain = from_micro_batches(made)
    constant = algorithm_options(use_kl_loss=True, use_opsm=True, loss_constant_length=5)
    again = packed(made.batch, constant_length=5)
    reports = []
    for micro_batch in again:
        for name in ("advantages", "old_log_probs", "ref_log_probs"):
            rows = {"advantages": made.advantages, "old_log_probs": made.old, "ref_log_probs": made.ref}[name]
            assert rows is not None
            setattr(micro_batch, name, put(made.batch, micro_batch, rows))
        columns = [put(made.batch, micro_batch, rows) for rows in (made.log_probs, made.entropy)]
        reports.append(reduce_tokens(policy_loss(constant, micro_batch, *columns), micro_batch)[1])
    got = joined(reports)
    terms = {"train/loss", "train/pg_loss", "train/kl_loss"}
    for name, value in plain.items():
        assert (got[name] == pytest.approx(value, rel=1e-5, abs=1e-6)) == (name not in terms), name


@pytest.mark.parametrize("per_token", [False, True], ids=["per rollout", "per token"])
@pytest.mark.parametrize("removed", [0, 8, 15, 16])
def test_fully_masked_rollouts_are_in_no_mean(removed: int, per_token: bool) -> None:
    """On policy, entropy 4.25, log-prob -5.5, the engine's 0.125 lower: so say the metrics, however many are masked."""
    reduction = {"calculate_per_token_loss": per_token}
    args = algorithm_options(use_tis=True, use_opsm=True, opsm_delta=9.0, tis_clip=9.0, **reduction)
    rows = rollouts.columns(1)
    masks = [np.full(n, i >= removed, np.uint8) for i, n in enumerate(rows.loss_mask.lengths.tolist())]
    sums = np.array([mask.sum() for mask in masks], dtype=np.int64)
    batch = rows.changed(loss_mask=Ragged.from_rows(masks, np.uint8), rollout_mask_sums=sums)
    reports = []
    for micro_batch in packed(batch, per_token_loss=per_token):
        log_probs = torch.full_like(micro_batch.mask, -5.5)
        micro_batch.rollout_log_probs, micro_batch.advantages = log_probs - 0.125, torch.ones_like(log_probs)
        loss = policy_loss(args, micro_batch, log_probs, torch.full_like(log_probs, 4.25))
        reports.append(reduce_tokens(loss, micro_batch)[1])
    got, share = joined(reports), float(removed < 16)
    want = {
        "train/ois": 1.0,
        "train/entropy_loss": 4.25,
        "rollout/log_probs": -5.5,
        "train/tis": math.exp(0.125),
        "train/train_rollout_logprob_abs_diff": 0.125,
        "rollout/advantages": 1.0,
    }
    assert {name: got[name] for name in want} == pytest.approx({k: v * share for k, v in want.items()}, rel=1e-6)
    of_loss = share if per_token else (16 - removed) / 16  # where they count
    assert got["train/loss"] == pytest.approx(-math.exp(0.125) * of_loss, rel=1e-6)
    assert not any(math.isnan(value) for value in got.values())


# ---- the critic and supervision


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=["per rollout", "per token", "constant length"])
def test_value_loss(reduction: dict[str, Any]) -> None:
    """OpenAI's PPO2 (arXiv:2005.12729, section 3), without the factor of 1/2."""
    args = algorithm_options(advantage_estimator="ppo", value_clip=0.3, **reduction)
    batch = fresh_rows()
    values, returns = numbers(batch, -2, 2), numbers(batch, -2, 2)
    old = [v + np.random.randint(-40, 41, len(v)) / 64 for v in values]
    leaves = [torch.tensor(row, requires_grad=True) for row in values]
    total, want = torch.zeros((), dtype=torch.float64), dict.fromkeys(("clipfrac", "values", "returns"), 0.0)
    for row in range(len(batch)):
        in_loss, in_mean = plain_weights(args, batch, row)
        for t in np.flatnonzero(batch.loss_mask[row]).tolist():
            value, low, high = leaves[row][t], old[row][t] - 0.3, old[row][t] + 0.3
            limited = low if value < low else high if value > high else value
            candidates = [(value - returns[row][t]) ** 2, torch.as_tensor((limited - returns[row][t]) ** 2)]
            total = total + in_loss * max(candidates)
            want["clipfrac"] += in_mean * float(limited is not value)
            want["values"] += in_mean * old[row][t]
            want["returns"] += in_mean * returns[row][t]
    total.backward()
    micro_batches = packed(
        batch, per_token_loss=args.calculate_per_token_loss, constant_length=args.loss_constant_length
    )
    reports, columns = [], []
    for micro_batch in micro_batches:
        micro_batch.values, micro_batch.returns = put(batch, micro_batch, old), put(batch, micro_batch, returns)
        columns.append(put(batch, micro_batch, values).requires_grad_())
        loss, report = reduce_tokens(value_loss(args, micro_batch, columns[-1]), micro_batch, "train/critic-value_loss")
        loss.backward()
        reports.append(report)
    assert joined(reports) == pytest.approx(
        {
            "train/critic-value_loss": total.item(),
            "train/critic-value_clipfrac": want["clipfrac"],
            "rollout/values": want["values"],
            "rollout/returns": want["returns"],
        },
        rel=1e-5,
        abs=1e-6,
    )
    assert 0 < want["clipfrac"] < 1
    same(take(batch, micro_batches, [column.grad for column in columns]), [leaf.grad for leaf in leaves])


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=["per rollout", "per token", "constant length"])
def test_supervised_loss_is_the_negative_log_likelihood(reduction: dict[str, Any]) -> None:
    made = inputs(algorithm_options(loss_type="sft_loss", **reduction), with_engine=False)
    reports = []
    for micro_batch, (log_probs, entropy) in zip(made.micro_batches, made.of_policy, strict=True):
        loss, report = reduce_tokens(sft_loss(made.args, micro_batch, log_probs, entropy), micro_batch)
        loss.backward()
        reports.append(report)
    want = {"train/loss": 0.0, "train/entropy_loss": 0.0}
    gradients = [np.zeros(len(row)) for row in made.log_probs]
    for row in range(len(made.batch)):
        weight, in_mean = plain_weights(made.args, made.batch, row)
        for t in np.flatnonzero(made.batch.loss_mask[row]):
            want["train/loss"] -= weight * made.log_probs[row][t]
            want["train/entropy_loss"] += in_mean * made.entropy[row][t]
            gradients[row][t] = -weight
    assert joined(reports) == pytest.approx(want, rel=1e-5)
    same(take(made.batch, made.micro_batches, [leaf.grad for leaf, _ in made.of_policy]), gradients)


def test_every_loss_type_has_a_function() -> None:
    assert {"policy_loss": policy_loss, "sft_loss": sft_loss} == LOSSES
    names = get_args(get_type_hints(AlgorithmOptions)["loss_type"])
    assert {*LOSSES, "custom_loss"} == set(names)
