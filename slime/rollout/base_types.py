"""What a rollout function returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slime.data import Group, Sample


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
    """What a rollout function returned, with its samples as one flat list; they alone may stand for it.

    Raises:
        TypeError: as of `flatten_samples`.
    """
    output = returned if isinstance(returned, RolloutFnTrainOutput) else RolloutFnTrainOutput(samples=returned)
    return RolloutFnTrainOutput(flatten_samples(output.samples), output.metrics)


def begun_anew(group: Group) -> Group:
    """The first sample of each rollout of a group, without its response: others are parts that it was cut into."""
    first: dict[int | None, Sample] = {}
    for sample in group:
        first.setdefault(sample.rollout_id, sample)
    for sample in first.values():
        sample.reset_response()
    return list(first.values())


def flatten_samples(samples: Sample | Iterable[Any]) -> list[Sample]:
    """Groups, however deeply nested, as one flat list in order.

    Raises:
        TypeError: something else is among them.
    """
    if isinstance(samples, Sample):
        return [samples]
    if isinstance(samples, str | Mapping) or not isinstance(samples, Iterable):
        raise TypeError(f"samples, or lists of them, are expected, not {samples!r:.80}")
    return [leaf for part in samples for leaf in flatten_samples(part)]
