"""What a rollout function returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.data.sample import flatten_samples

__all__ = ["RolloutFnEvalOutput", "RolloutFnTrainOutput", "flatten_samples", "train_output"]


@dataclass
class RolloutFnTrainOutput:
    """The samples to train on: a list of groups, nested deeper where a rollout was cut into several samples."""

    samples: list[Any]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """Scores by dataset name: ``{"rewards": [...], "truncated": [...], "samples": [...]}``, one entry a sample.

    A reward is None where none was computed; such samples are reported, never averaged.
    """

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def train_output(returned: Any) -> RolloutFnTrainOutput:
    """What a rollout function returned, or its samples alone, with these as one flat list (`flatten_samples`)."""
    output = returned if isinstance(returned, RolloutFnTrainOutput) else RolloutFnTrainOutput(samples=returned)
    return RolloutFnTrainOutput(flatten_samples(output.samples), output.metrics)
