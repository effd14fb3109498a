"""Where the time of each step went, and the sentence that says what bounds it."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slime.observability import phases
from slime.observability.phases import ENDS, NAMES, OTHER, STEP, Seconds, longest, times_of

_DETAILS = {"ahead": "perf/rollout_ahead_time", "mended": "perf/recovery_time", "actor": "perf/actor_train_time"}
_BEGINS = "perf/wait_for_rollout_time"
_MOSTLY = 0.5


@dataclass(frozen=True)
class Rule:
    """What bounds a step, where ``holds`` does, and the sentence that says so."""

    bound_by: str
    holds: Callable[[Seconds], bool]
    sentence: str


def _longest(name: str) -> Callable[[Seconds], bool]:
    return lambda seconds: name == longest(seconds)


def _idle(what: str) -> Callable[[Seconds], bool]:
    """For most of the time in which samples were made no request was at an engine, and this was waited for."""
    is_longest = _longest("rollout")
    return lambda seconds: is_longest(seconds) and seconds.get(what, 0.0) > _MOSTLY * seconds.get("made", 0.0)


RULES = (
    Rule(
        "rewards",
        _idle("rewards"),
        "rewards: for {rewards:.1f} of the {made:.1f} s in which samples were made, engines had nothing to do and"
        " rewards were waited for.",
    ),
    Rule(
        "tools",
        _idle("tools"),
        "tools: for {tools:.1f} of the {made:.1f} s in which samples were made, engines had nothing to do and tools or"
        " your generate function were waited for.",
    ),
    Rule(
        "rollout",
        lambda seconds: _longest("rollout")(seconds) and seconds.get("ahead", 0.0) > 1.0,
        "the rollout: trainers waited {rollout:.1f} of {step:.1f} s for samples, though these were begun {ahead:.1f} s"
        " before.",
    ),
    Rule("rollout", _longest("rollout"), "the rollout: trainers waited {rollout:.1f} of {step:.1f} s for samples."),
    Rule("training", _longest("training"), "training: it took {training:.1f} of {step:.1f} s."),
    Rule("push", _longest("push"), "the push of weights: it took {push:.1f} of {step:.1f} s."),
    Rule(
        "sleep and wake",
        _longest("sleep and wake"),
        "trainers and engines that take turns in the memory: {sleep and wake:.1f} of {step:.1f} s.",
    ),
    Rule("evaluation", _longest("evaluation"), "the evaluation: it was waited for {evaluation:.1f} of {step:.1f} s."),
    Rule("saving", _longest("saving"), "saving: checkpoint and exports took {saving:.1f} of {step:.1f} s."),
    Rule(OTHER, lambda seconds: True, "what no phase accounts for: {other:.1f} of {step:.1f} s."),
)
"""The first that holds says it."""


def seconds_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The phases of a step, of all metrics that were logged during it, and what sentences name besides."""
    known = times_of(metrics)
    details = {name: known[key] for name, key in _DETAILS.items() if key in known}
    return {**phases.seconds_of(metrics), **details}


def bound_by(seconds: Seconds) -> tuple[str, str]:
    """The name of what bounds a step, and the sentence."""
    rule = next(rule for rule in RULES if rule.holds(seconds))
    sentence = f"Bound by {rule.sentence.format_map(dict(seconds))}"
    if mended := seconds.get("mended"):
        sentence += f" A fault was mended within {mended:.1f} s."
    return rule.bound_by, sentence


class Steps:
    """Of each complete step of a run its phases. Steps that a run does again replace those that it did first."""

    def __init__(self) -> None:
        self.x: list[int] = []
        self._seconds: list[dict[str, float]] = []
        self._under_way: dict[str, Any] = {}

    def add(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl."""
        if _BEGINS in line:  # what was before is of the run's start, or of a step that did not end
            self._under_way = {}
        self._under_way.update(line)
        step = line.get("rollout/step")
        if ENDS not in line or not isinstance(step, int):
            return
        while self.x and self.x[-1] >= step:
            self.x.pop()
            self._seconds.pop()
        self.x.append(step)
        self._seconds.append(seconds_of(self._under_way))
        self._under_way = {}

    def seconds(self, step: int) -> dict[str, float] | None:
        """Of one step; None where there is none."""
        place = bisect_left(self.x, step)
        return dict(self._seconds[place]) if place < len(self.x) and self.x[place] == step else None

    def bands(self, buckets: int, first: float, last: float, idle: Mapping[int, Seconds]) -> dict[str, Any]:
        """At most so many steps between two, each the mean of those that it stands for; ``idle`` as of
        `tools.viewing.traces.Traces`.

        Returns:
            ``x``, the first step of each, ``seconds`` by phase, ``longest`` step of each, and of how many steps
            ``bound_by`` is the name.
        """
        begin, end = bisect_left(self.x, first), bisect_right(self.x, last)
        x, count = [], min(buckets, end - begin)
        bands = {name: array("d") for name in (*NAMES, "longest")}
        for bucket in range(count):
            low = begin + (end - begin) * bucket // count
            those = self._seconds[low : begin + (end - begin) * (bucket + 1) // count]
            x.append(self.x[low])
            for name in NAMES:
                bands[name].append(sum(seconds[name] for seconds in those) / len(those))
            bands["longest"].append(max(seconds[STEP] for seconds in those))
        longest = bands.pop("longest")
        return {
            "x": x,
            "end": self.x[end - 1] + 1 if end > begin else 0,
            "seconds": {name: [round(value, 4) for value in band] for name, band in bands.items()},
            "longest": [round(value, 4) for value in longest],
            **self._bounds(begin, end, idle),
        }

    def _bounds(self, begin: int, end: int, idle: Mapping[int, Seconds]) -> dict[str, Any]:
        those = [
            {**seconds, **idle.get(step, {})}
            for step, seconds in zip(self.x[begin:end], self._seconds[begin:end], strict=True)
        ]
        if not those:
            return {"bound_by": {}, "sentence": ""}
        names = {name for seconds in those for name in seconds} - {"mended"}
        mean = {name: sum(seconds.get(name, 0.0) for seconds in those) / len(those) for name in names}
        sentence = f"Mean of {len(those)} steps: {bound_by(mean)[1]}"
        return {"bound_by": Counter(bound_by(seconds)[0] for seconds in those), "sentence": sentence}
