"""What a rollout function returns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from slime.utils.types import Sample


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


def flatten_samples(samples: Sample | Iterable[Any]) -> list[Sample]:
    """Groups, however deeply nested, as one flat list in order."""
    if isinstance(samples, Sample):
        return [samples]
    return [leaf for part in samples for leaf in flatten_samples(part)]
