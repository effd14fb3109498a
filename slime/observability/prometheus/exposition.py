"""A run's state and newest figures as text that Prometheus reads."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_OTHER = re.compile(r"[^a-zA-Z0-9_]")
_NUMBERED = re.compile(r"( of (weight )?version| on rollout)? [^ ]*\d.*")
"""What makes a phase another one every time; as a label it would be a new series."""
_QUEUES = {"rollout/prompts_buffered": "buffered", "rollout/prompts_in_flight": "in_flight"}


@dataclass(frozen=True)
class State:
    """What a run is at."""

    phase: str = "start"
    """As messages say it, such as ``"push weights of version 3"``."""
    seconds: float = 0.0
    """Since the phase began."""
    silent: float = 0.0
    """Seconds since the driver last looked at its actors, which it does once a second."""
    version: str = "none yet"
    """Of the engines' weights."""
    engines: Sequence[Mapping[str, str]] = ()
    """Of each the ``url``, once it has one, and the ``state``."""
    verdict: str = ""
    """Whether it learns, in a word."""


def metric_name(key: str) -> str:
    """What Prometheus calls a metric: ``rollout/raw_reward`` is ``slime_rollout_raw_reward``."""
    return f"slime_{_OTHER.sub('_', key)}"


def exposition(state: State, newest: Mapping[str, float]) -> str:
    """The text: first the state, then ``newest``, the latest value of every metric that was logged."""
    lines: list[str] = []
    for name, samples in _families(state, newest):
        lines.append(f"# TYPE {name} gauge")
        lines += [f"{name}{labels} {_number(value)}" for labels, value in samples.items()]
    return "\n".join([*lines, ""])


def _families(state: State, newest: Mapping[str, float]) -> Iterator[tuple[str, dict[str, float]]]:
    own: dict[str, dict[str, float]] = {
        "slime_phase": {_labels(phase=_NUMBERED.sub("", state.phase)): 1.0},
        "slime_phase_seconds": {"": state.seconds},
        "slime_driver_silent_seconds": {"": state.silent},
        "slime_engines": {
            _labels(state=what): float(n) for what, n in Counter(engine["state"] for engine in state.engines).items()
        },
        "slime_engines_alive": {"": float(len(state.engines))},
        "slime_queue_length": {_labels(queue=q): newest[key] for key, q in _QUEUES.items() if key in newest},
    }
    if state.version.isdecimal():
        own["slime_weight_version"] = {"": float(state.version)}
    if state.verdict:
        own["slime_verdict"] = {_labels(verdict=state.verdict): 1.0}
    yield from ((name, samples) for name, samples in own.items() if samples)
    # By name: two keys may have one, and a family must not be there twice.
    others = {metric_name(key): {"": value} for key, value in newest.items()}
    yield from ((name, samples) for name, samples in others.items() if name not in own)


def _labels(**labels: str) -> str:
    escaped = {name: _escaped(value) for name, value in labels.items()}
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(float(value)) if math.isfinite(value) else ("+Inf" if value > 0 else "-Inf")
