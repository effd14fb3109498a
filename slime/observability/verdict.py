"""Whether a run learns: one word and plain sentences, after every rollout, in ``verdict.json`` of its directory."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from slime.files.atomic_io import unfinished
from slime.observability import history as h
from slime.observability.history import History, Trend, history_of
from slime.observability.verdict_rules import HINTS, RECENT, SIGMAS, STOPS, Facts, Sentence

NEEDED = 8
"""Rollouts before there is a trend."""
_SHOWN = {
    h.VARIED: "groups with rewards that differ",
    h.ENTROPY: "entropy",
    h.KL: "KL to the reference",
    h.CLIPPED: "clipped tokens",
    h.GRAD_NORM: "gradient norm",
    h.MISMATCH: "trainer and engine apart by",
    h.PROBE: "probe of the pushes",
}
_GOALS = ((h.TEACHER, -1, "distance to the teacher"), (h.REWARD, 1, "reward"), (h.LOSS, -1, "loss"))
"""What is to become better, the first that there is: its key, where to, and what it is called."""


@dataclass(frozen=True)
class Verdict:
    """One word, the same with its reason for the step's line (empty while there is none), and sentences."""

    word: str
    short: str
    sentences: tuple[Sentence, ...]

    def as_dict(self) -> dict[str, object]:
        """As it is in ``verdict.json``."""
        told = [{"sentence": each.text, "keys": list(each.keys)} for each in self.sentences]
        return {"verdict": self.word, "sentences": told}


NO_VERDICT = Verdict("", "", ())


def judge(history: History, facts: Facts) -> Verdict:
    """Of what was logged so far; an empty one of a run that trains nothing."""
    if not history.trains or not history.rollouts:
        return NO_VERDICT
    found = {name: sentence for name, find in STOPS.items() if (sentence := find(history, facts))}
    hints = [sentence for find in HINTS if (sentence := find(history, facts))]
    word, short, trend = _by_trend(history, facts)
    if found:
        word, short = "not learning", f"NOT LEARNING: {next(iter(found))}"
    told = [*found.values(), *hints, trend, _evaluations(history), _figures(history, facts)]
    return Verdict(word, short, tuple(filter(None, told)))


def _by_trend(history: History, facts: Facts) -> tuple[str, str, Sentence | None]:
    key, sign, what = next((goal for goal in _GOALS if history.column(goal[0], RECENT)), _GOALS[-1])
    what = facts.reward if key == h.REWARD else what
    count, trend = len(history.column(key)), history.trend(key, sign=sign)
    if trend is None or count < NEEDED:
        text = f"Too early to tell: {count} rollouts of the {NEEDED} that a trend of the {what} needs."
        return "too early", "", Sentence(text, (key,))
    word = {1: "learning", -1: "getting worse", 0: "no trend"}[trend.beyond_noise(SIGMAS)]
    if word == "no trend" and trend.changed(SIGMAS) > 0:
        word = "learnt, now level"
    change = f"{what} {trend.slope:+.2g} ± {trend.error:.1g} a rollout"
    return word, f"{word} ({change})", Sentence(_told(trend, what, word), (key,))


def _told(trend: Trend, what: str, word: str) -> str:
    over = f"over the last {trend.count} rollouts (slope and its standard error)"
    level = f"it was {trend.first:.3f} at first and is {trend.now:.3f} now"
    change = f"{trend.slope:+.2g} ± {trend.error:.1g} a rollout {over}"
    if word == "no trend":
        return (
            f"The {what} has no trend beyond its noise: {change}; single rollouts are {trend.noise:.2g} off; {level}."
        )
    return f"The {what} changes by {change}; {level}."


def _evaluations(history: History) -> Sentence | None:
    versions = sorted(history.evaluations)
    if len(versions) < 2:
        return None
    first, last = history.evaluations[versions[0]], history.evaluations[versions[-1]]
    told = [f"{key} from {first[key].value:.3f} to {last[key].value:.3f}" for key in first if key in last]
    if not told:
        return None
    text = f"Evaluations of version {versions[0]} and {versions[-1]}: {', '.join(told)}."
    return Sentence(text, tuple(key for key in first if key in last))


def _figures(history: History, facts: Facts) -> Sentence | None:
    columns = {key: column for key in _SHOWN if (column := history.column(key))}
    if not columns:
        return None
    names = _SHOWN | {h.VARIED: f"kept {_SHOWN[h.VARIED]}"} if facts.filters else _SHOWN
    told = [
        f"{names[key]} {fmean(column[-RECENT:]):.3g} ({fmean(column[:RECENT]):.3g})" for key, column in columns.items()
    ]
    text = f"In the mean of the last {RECENT} rollouts (and of the first {RECENT}): {', '.join(told)}."
    return Sentence(text, tuple(columns))


class VerdictFile:
    """Takes every line of metrics of a run, and writes what they say; a sink of `slime.observability.metrics`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._path = Path(args.run_dir, "verdict.json")
        self._facts, self._run_dir = Facts.of(args), args.run_dir
        self._history: History | None = None
        self.place = "--run-dir", str(self._path)
        self.verdict = NO_VERDICT
        """The latest one; empty of a run that trains nothing."""

    def write(self, metrics: dict[str, float], step_key: str, step: int) -> None:
        """Add a line; at the end of a step, and of what is logged after it, judge anew."""
        if self._history is None:
            self._history = history_of(self._run_dir)  # of the run that this one resumes
        self._history.add(metrics, step_key, step)
        if "perf/step_time" in metrics or step_key == h.EVAL or set(metrics) == {h.PROBE}:
            self.verdict = judge(self._history, self._facts)
            if self.verdict.word:
                # Not flushed to the disk, which takes milliseconds: the next step writes another.
                staged = unfinished(self._path)
                staged.write_text(json.dumps(self.verdict.as_dict(), indent=1) + "\n")
                staged.replace(self._path)

    def close(self) -> None:
        """Nothing is left to do."""


def verdict_lines(verdict: Verdict) -> list[str]:
    """What is said at a run's end."""
    if not verdict.word:
        return []
    return [f"is it learning? {verdict.word}", *(f"  {sentence.text}" for sentence in verdict.sentences)]
