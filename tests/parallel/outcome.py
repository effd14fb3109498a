"""What a training run of a case comes to, and how far two of them are apart."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
CRITIC = "critic."
"""Before the Hugging Face names of the critic's tensors."""
VALUE_HEAD = CRITIC + "value_head.weight"

CLIP = 1.0
"""Of the gradient's norm, in all runs."""
METRIC_FLOOR, MAXIMUM_FLOOR = 0.01, 0.5
"""Metrics below it count as if they were this large; the second is for those of a single token, which no mean evens
out: log-probs near -5 are rounded at 5e-7."""
FLOORS = dict.fromkeys(("train/ppo_kl", "train/tis_abs", "train/train_rollout_logprob_abs_diff"), 0.05)
"""Of means of first-order differences of log-probs."""
FLOORS |= {"rollout/advantages": 0.05, "train/loss": 0.2, "train/pg_loss": 0.2}
"""Of means of numbers near 1 and -1, of CISPO near 5 and -5, which cancel."""
LEAST_GRADIENT = 1e-7
"""AdamW's first step is the sign of a gradient: of a smaller one, that of its rounding."""


@dataclass
class Outcome:
    """Metrics, without perf/, and gradients, before they are clipped, have one entry an optimizer step.

    Tensors are on the CPU.
    """

    metrics: list[dict[str, float]] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    weights: Tensors = field(default_factory=dict)
    nearest: float = float("inf")
    """How near any ratio or value comes to a bound at which it would count as clipped; `plain` knows."""

    def save(self, path: Path) -> None:
        torch.save(vars(self), path)

    @classmethod
    def load(cls, path: Path) -> Outcome:
        return cls(**torch.load(path))


@dataclass
class Difference:
    """The largest over all steps and tensors, and where it is."""

    metric: tuple[float, str] = (0.0, "")
    """Relative."""
    gradient: tuple[float, str] = (0.0, "")
    """Of the largest entry of the tensor."""
    weight: tuple[float, str] = (0.0, "")
    """Likewise."""
    update: tuple[float, str] = (0.0, "")
    """In learning rates, of weights whose last gradient is `LEAST_GRADIENT` or more once clipped."""
    left_out: int = 0
    """Weights that ``update`` leaves out."""
    weights: int = 0


def compare(got: Outcome, wanted: Outcome) -> Difference:
    """How far ``got`` is from ``wanted``.

    Raises:
        AssertionError: other steps, metrics or tensors.
    """
    worst = Difference()
    assert len(got.metrics) == len(wanted.metrics) == len(got.gradients) == len(wanted.gradients)
    for step, (mine, others) in enumerate(zip(got.metrics, wanted.metrics, strict=True)):
        assert mine.keys() == others.keys(), mine.keys() ^ others.keys()
        for name, value in others.items():
            error = metric_error(name, mine[name], value)
            worst.metric = max(worst.metric, (error, f"{name} of step {step}: {mine[name]}, not {value}"))
    for step, (grads, other_grads) in enumerate(zip(got.gradients, wanted.gradients, strict=True)):
        worst.gradient = max(worst.gradient, _relative(grads, other_grads, f" of step {step}"))
    worst.weight = _relative(got.weights, wanted.weights, "")
    last = wanted.metrics[-1]
    for name, tensor in wanted.weights.items():
        prefix = "train/critic-" if name.startswith(CRITIC) else "train/"
        clipped = wanted.gradients[-1][name] / max(last[prefix + "grad_norm"] / CLIP, 1.0)
        counts = clipped.abs() >= LEAST_GRADIENT
        worst.left_out += int((~counts).sum())
        worst.weights += counts.numel()
        if counts.any():
            error = float((got.weights[name] - tensor)[counts].abs().max()) / last[prefix + "lr-pg_0"]
            worst.update = max(worst.update, (_finite(error), name))
    return worst


def metric_error(name: str, got: float, wanted: float) -> float:
    """Relative, of what is above its floor."""
    floor = MAXIMUM_FLOOR if name.endswith("_max") else FLOORS.get(name, METRIC_FLOOR)
    return _finite(abs(got - wanted) / max(abs(wanted), floor))


def _finite(error: float) -> float:
    """NaN is the largest error there is: to ``max`` it is no larger than any other."""
    return error if math.isfinite(error) else math.inf


def _relative(got: Tensors, wanted: Tensors, where: str) -> tuple[float, str]:
    assert got.keys() == wanted.keys(), got.keys() ^ wanted.keys()
    worst = (0.0, "")
    for name, tensor in wanted.items():
        error, largest = float((got[name] - tensor).abs().max()), float(tensor.abs().max())
        # A tensor of zeros (an expert that no token took) has to be exactly that.
        worst = max(worst, (_finite(error / largest) if largest else error and math.inf, name + where))
    return worst
