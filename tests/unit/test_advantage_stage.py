"""From micro-batches to advantages and back, against plain float64 loops over rows."""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch

from slime.data import TrainBatch
from slime.options.learning.algorithm import WHITENED, AlgorithmOptions
from slime.training.loss.advantages import ESTIMATORS, set_advantages
from slime.training.micro_batch import MicroBatch
from tests.algorithm_options import algorithm_options
from tests.micro_batches import Rows, engine_rows, fresh_rows, near, numbers, packed, put, same, take

NUM_GPUS = 0
HOOKS = Path(__file__).parents[1] / "user_hooks.py"


def plain_kl(kind: str, old: float, ref: float) -> float:
    """J. Schulman, "Approximating KL divergence"."""
    d = old - ref
    k3 = math.exp(-d) - 1 + d
    return {"k1": d, "k2": d * d / 2, "k3": k3, "low_var_kl": min(max(k3, -10.0), 10.0)}[kind]


def plain_row(args: Namespace, reward: float, rewards: list[float], values: list[float]) -> tuple[Any, Any]:
    """Advantages and returns of a response whose trained tokens have these rewards, its own left out.

    REINFORCE++ (arXiv:2501.03262): discounted returns; PPO: generalised advantage estimation (arXiv:1506.02438, eq. 16)
    by its backward recursion; others: the response's reward and the token's penalty.
    """
    estimator = args.advantage_estimator
    if estimator not in ("ppo", "reinforce_plus_plus"):
        return [reward + r for r in rewards], None
    advantages, following, ahead = [0.0] * len(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        own = rewards[t] + (reward if t == len(rewards) - 1 else 0.0)
        if estimator == "ppo":
            ahead = own + args.gamma * following - values[t] + args.gamma * args.lambd * ahead
            following = values[t]
        else:
            ahead = own + args.gamma * ahead
        advantages[t] = ahead
    returns = [a + v for a, v in zip(advantages, values, strict=True)] if estimator == "ppo" else None
    return advantages, returns


def whitened(rows: Rows, batch: TrainBatch) -> Rows:
    chosen = [float(row[t]) for i, row in enumerate(rows) for t in np.flatnonzero(batch.loss_mask[i])]
    mean = sum(chosen) / len(chosen)
    variance = sum((x - mean) ** 2 for x in chosen) / (len(chosen) - 1)
    return [(row - mean) / math.sqrt(variance + 1e-8) * batch.loss_mask[i] for i, row in enumerate(rows)]


def make(args: Namespace) -> tuple[TrainBatch, dict[str, Rows], list[MicroBatch]]:
    """A batch, its columns, and micro-batches that have them."""
    batch = fresh_rows()
    old = numbers(batch, -4, 0)
    columns = {"old_log_probs": old, "ref_log_probs": near(old, 3.0), "values": numbers(batch, -1, 1)}
    micro_batches = packed(batch)
    for micro_batch in micro_batches:
        for name, rows in columns.items():
            setattr(micro_batch, name, put(batch, micro_batch, rows))
    return batch, columns, micro_batches


def plain_stage(args: Namespace, batch: TrainBatch, columns: dict[str, Rows]) -> tuple[Rows, Rows]:
    advantages, returns = ([np.zeros(int(n)) for n in batch.loss_mask.lengths] for _ in range(2))
    for row in range(len(batch)):
        counted = np.flatnonzero(batch.loss_mask[row])
        pairs = [(columns["old_log_probs"][row][t], columns["ref_log_probs"][row][t]) for t in counted]
        penalties = [-args.kl_coef * plain_kl(args.kl_loss_type, *pair) for pair in pairs]
        of_row = plain_row(args, float(batch.rewards[row]), penalties, columns["values"][row][counted].tolist())
        advantages[row][counted] = of_row[0]
        returns[row][counted] = 0.0 if of_row[1] is None else of_row[1]
    return (whitened(advantages, batch) if args.normalize_advantages else advantages), returns


@pytest.mark.parametrize("penalty", [{}, *({"kl_coef": 0.3, "kl_loss_type": k} for k in ("k1", "k2", "low_var_kl"))])
@pytest.mark.parametrize(
    ("estimator", "whitens"), [(e, w) for e in ESTIMATORS for w in (True, False) if w or e not in WHITENED]
)
def test_every_estimator(estimator: str, whitens: bool, penalty: dict[str, Any]) -> None:
    args = algorithm_options(
        advantage_estimator=estimator, normalize_advantages=whitens, gamma=0.97, lambd=0.9, **penalty
    )
    batch, columns, micro_batches = make(args)
    set_advantages(args, batch, micro_batches, None)
    advantages, returns = plain_stage(args, batch, columns)
    same(take(batch, micro_batches, [m.advantages for m in micro_batches]), advantages)
    if estimator == "ppo":
        same(take(batch, micro_batches, [m.returns for m in micro_batches]), returns)
    for micro_batch in micro_batches:
        assert (micro_batch.returns is None) == (estimator != "ppo")
        for column in (micro_batch.advantages, micro_batch.returns):
            assert column is None or not column[micro_batch.mask == 0].any()


@pytest.mark.parametrize("of_engine", [False, True])
@pytest.mark.parametrize("options", [{}, {"normalize_advantages": True}, {"kl_coef": 0.3}, {"opd_kl_coef": 0.0}])
def test_a_teacher_weighs_in_before_advantages_are_whitened(options: dict[str, Any], of_engine: bool) -> None:
    distils = {"use_opd": True, "opd_type": "megatron", "opd_kl_coef": 0.7, "use_rollout_logprobs": of_engine}
    args = algorithm_options(**distils | options)
    batch, columns, micro_batches = make(args)
    teacher = near(columns["old_log_probs"], 2.0)
    for micro_batch in micro_batches:
        micro_batch.teacher_log_probs = put(batch, micro_batch, teacher)
    set_advantages(args, batch, micro_batches, None)
    student = engine_rows(batch) if of_engine else columns["old_log_probs"]
    args.normalize_advantages, whitens = False, args.normalize_advantages
    plain, _ = plain_stage(args, batch, columns)
    difference = [s - t for s, t in zip(student, teacher, strict=True)]
    wanted = [
        (a - args.opd_kl_coef * d) * batch.loss_mask[i] for i, (a, d) in enumerate(zip(plain, difference, strict=True))
    ]
    same(
        take(batch, micro_batches, [m.advantages for m in micro_batches]),
        whitened(wanted, batch) if whitens else wanted,
    )
    same(take(batch, micro_batches, [m.opd_reverse_kl for m in micro_batches]), difference)


def test_every_estimator_of_the_options_has_a_function() -> None:
    assert set(ESTIMATORS) == set(get_args(get_type_hints(AlgorithmOptions)["advantage_estimator"]))


def test_nothing_to_whiten() -> None:
    args = algorithm_options(normalize_advantages=True)
    batch, _, _ = make(args)
    batch.loss_mask.values[:] = 0
    with pytest.raises(ValueError, match="every token of the step is masked"):
        set_advantages(args, batch, packed(batch), None)


# ---- a user's function


def custom(name: str, **options: Any) -> Namespace:
    return algorithm_options(custom_advantage_function_path=f"{HOOKS}:{name}", **options)


@pytest.mark.parametrize("options", [{}, {"normalize_advantages": True}, {"advantage_estimator": "ppo"}])
def test_custom_function(options: dict[str, Any]) -> None:
    args = custom("growing_rewards", **options)
    batch, columns, micro_batches = make(args)
    set_advantages(args, batch, micro_batches, None)
    want = [
        float(batch.rewards[row]) * (np.arange(n) + 1) * batch.loss_mask[row]
        for row, n in enumerate(batch.loss_mask.lengths.tolist())
    ]
    got = take(batch, micro_batches, [m.advantages for m in micro_batches])
    same(got, whitened(want, batch) if args.normalize_advantages else want)
    if args.use_critic:
        returns = take(batch, micro_batches, [m.returns for m in micro_batches])
        same(returns, [a + v for a, v in zip(want, columns["values"], strict=True)])


def test_what_a_custom_function_sees() -> None:
    args = custom("growing_rewards")
    batch, columns, micro_batches = make(args)
    set_advantages(args, batch, micro_batches, None)
    order = np.concatenate([m.rows for m in micro_batches]).tolist()
    seen = args.seen
    rows_of = {
        "tokens": [batch.tokens[row] for row in order],
        "loss_masks": [batch.loss_mask[row] for row in order],
        "log_probs": [columns["old_log_probs"][row] for row in order],
        "ref_log_probs": [columns["ref_log_probs"][row] for row in order],
        "values": [columns["values"][row] for row in order],
        "rollout_log_probs": [engine_rows(batch)[row] for row in order],
    }
    for name, rows in rows_of.items():
        assert all(isinstance(row, torch.Tensor) for row in seen[name])
        same([row.double().numpy() for row in seen[name]], rows)
    scalars = {
        "total_lengths": [len(batch.tokens[row]) for row in order],
        "response_lengths": [len(batch.loss_mask[row]) for row in order],
        "rewards": batch.rewards[order].tolist(),
        "raw_reward": batch.raw_rewards[order].tolist(),
        "rollout_ids": batch.rollout_ids[order].tolist(),
        "group_indices": batch.group_indices[order].tolist(),
        "sample_indices": batch.sample_indices[order].tolist(),
        "truncated": batch.truncated[order].tolist(),
        "rollout_mask_sums": batch.rollout_mask_sums[order].tolist(),
    }
    assert {name: seen[name] for name in scalars} == scalars
    assert set(seen) == {*rows_of, *scalars}


@pytest.mark.parametrize(
    ("name", "key", "got"),
    [
        ("sets_nothing", "advantages", "it has nothing"),
        ("sets_too_few", "advantages", "it has shapes [("),
        ("sets_numbers", "advantages", "it has shapes [(), ()"),
        ("sets_no_returns", "returns", "it has nothing"),
    ],
)
def test_mistakes_of_a_custom_function(name: str, key: str, got: str) -> None:
    args = custom(name, advantage_estimator="ppo")
    batch, _, micro_batches = make(args)
    with pytest.raises(ValueError, match="--custom-advantage-function-path") as error:
        set_advantages(args, batch, micro_batches, None)
    message = str(error.value)
    lengths = [len(batch.loss_mask[row]) for m in micro_batches for row in m.rows.tolist()]
    assert message.startswith(f"--custom-advantage-function-path {HOOKS}:{name}: rollout_data['{key}'] must be a list")
    assert str(lengths[:8])[1:-1] in message
    assert got in message


def test_a_custom_function_may_set_lists() -> None:
    args = custom("sets_lists")
    batch, _, micro_batches = make(args)
    set_advantages(args, batch, micro_batches, None)
    got = take(batch, micro_batches, [m.advantages for m in micro_batches])
    same(got, [np.full(len(row), 2.0) for row in got])


def test_a_function_that_is_not_there() -> None:
    args = custom("growing_reward")
    batch, _, micro_batches = make(args)
    with pytest.raises(ValueError, match=r"--custom-advantage-function-path .*did you mean growing_rewards"):
        set_advantages(args, batch, micro_batches, None)
