"""Where the time of a step went, of its metrics: the one table of phases, of the step's line and of the page of a run.

Imports the standard library only: the page does without slime's packages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Seconds = Mapping[str, float]
"""Of one step: by phase, by `STEP` the whole, and what else whoever reads them adds."""
STEP, OTHER = "step", "other"
ENDS = "perf/step_time"


@dataclass(frozen=True)
class Phase:
    """A part of a step as its driver sees it: the metrics that add up to it, of which the first known one of each
    tuple counts."""

    name: str
    keys: tuple[tuple[str, ...], ...]


PHASES = (
    # Generated in the background, a rollout takes the step only as long as it is waited for.
    Phase("rollout", (("perf/wait_for_rollout_time", "perf/rollout_time"),)),
    Phase("training", (("perf/train_time",), ("perf/transfer_time",))),
    Phase("push", (("perf/update_weights_time",),)),
    Phase(
        "sleep and wake",
        (
            *(("perf/sleep_trainers_time",), ("perf/wake_trainers_time",)),
            *(("perf/release_engines_time",), ("perf/resume_engines_time",)),
        ),
    ),
    Phase("evaluation", (("perf/wait_for_eval_time", "perf/eval_time"),)),
    Phase("saving", (("perf/save_model_time",),)),
)
NAMES = (*(phase.name for phase in PHASES), OTHER)


def times_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those of ``metrics`` that are known."""
    return {
        key: float(value)
        for key, value in metrics.items()
        if key.startswith("perf/") and isinstance(value, (int, float))
    }


def seconds_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The phases of a step, of all metrics that were logged during it.

    What no phase accounts for is `OTHER`; where phases overlap, and add up to more than the step, it is 0.
    """
    known = times_of(metrics)
    seconds = {phase.name: sum(_first(known, keys) for keys in phase.keys) for phase in PHASES}
    total = sum(seconds.values())
    step = known.get(ENDS, total)
    return {**seconds, OTHER: max(0.0, step - total), STEP: step}


def longest(seconds: Seconds) -> str:
    """The name of the phase that took the most, or `OTHER`."""
    return max(NAMES, key=lambda name: seconds.get(name, 0.0))


def _first(known: Mapping[str, float], keys: tuple[str, ...]) -> float:
    return next((known[key] for key in keys if key in known), 0.0)
