"""What the tests of layouts compare by: nothing that is wrong is small."""

from __future__ import annotations

import math

import pytest
import torch

from tests.parallel.outcome import Outcome, compare

NUM_GPUS = 0
RATES = {"train/grad_norm": 1.0, "train/lr-pg_0": 1e-3}


def outcome(*, metric: float = 1.0, gradient: float = 1.0, weight: float = 1.0, name: str = "train/loss") -> Outcome:
    """A step on two tensors, the second of which has the given numbers."""
    gradients, weights = ({"a": torch.ones(2), "b": torch.tensor([1.0, number])} for number in (gradient, weight))
    return Outcome([RATES | {"train/other": 1.0, name: metric}], [gradients], weights)


def test_equal_runs() -> None:
    difference = compare(outcome(), outcome())
    assert [error for error, _ in (difference.metric, difference.gradient, difference.weight, difference.update)] == [
        0
    ] * 4
    assert (difference.left_out, difference.weights) == (0, 4)


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("what", ["metric", "gradient", "weight"])
@pytest.mark.parametrize("in_both", [True, False])
def test_what_is_not_finite_is_infinitely_wrong(what: str, number: float, in_both: bool) -> None:
    bad = outcome(**{what: number})
    for got, wanted in [(bad, bad)] if in_both else [(bad, outcome()), (outcome(), bad)]:
        difference = compare(got, wanted)
        assert getattr(difference, what)[0] == math.inf
        if what == "weight":
            assert difference.update[0] == math.inf


@pytest.mark.parametrize(
    ("name", "wanted", "got"),
    [("train/kl_loss", 5e-5, 5.09e-5), ("train/train_rollout_kl", 1e-4, 1.01e-4), ("train/ppo_kl", 1e-3, 1.001e-3),
     ("train/train_rollout_logprob_abs_diff_max", 0.2, 0.20001)],
)  # fmt: skip
def test_small_metrics_count_too(name: str, wanted: float, got: float) -> None:
    difference = compare(outcome(name=name, metric=got), outcome(name=name, metric=wanted))
    assert difference.metric[0] > 1e-5
    assert difference.metric[1] == f"{name} of step 0: {got}, not {wanted}"
