"""Metrics over their steps, and as few points of them as a screen can show, spikes included."""

from __future__ import annotations

import math
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.website.registry import METRICS, Metric, metric_of

_NOT_PLOTTED = {"time"}
_STATISTIC = re.compile(r"(.+)/(mean|median|max|min)")
_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")
_FIRST = ("eval", "rollout", "train", "perf")
"""Groups in the order of the page; others follow."""
_MOST_MARKS = 200


@dataclass
class Curve:
    """One metric. Steps only grow: what a run does again, after it went back, takes the place of what it did first."""

    axis: str
    x: array[float] = field(default_factory=lambda: array("d"))
    y: array[float] = field(default_factory=lambda: array("d"))

    def add(self, x: float, y: float) -> None:
        """The value at step ``x``, NaN and infinities included."""
        while self.x and self.x[-1] >= x:
            self.x.pop()
            self.y.pop()
        self.x.append(x)
        self.y.append(y)


class Curves:
    """All metrics of a run, by key."""

    def __init__(self) -> None:
        self.by_key: dict[str, Curve] = {}

    def add(self, line: dict[str, Any]) -> bool:
        """A line of metrics.jsonl, whose first key is the axis; whether it is one."""
        axis = next(iter(line), "")
        step = line.get(axis)
        if not axis.endswith("step") or not isinstance(step, int):
            return False
        for key, value in line.items():
            number = value if type(value) is float else _number(value)
            if number is None or key == axis or key in _NOT_PLOTTED:
                continue
            if (curve := self.by_key.get(key)) is None:
                curve = self.by_key[key] = Curve(axis)
            curve.add(step, number)
        return True

    def charts(self) -> list[dict[str, Any]]:
        """What the page draws, by group, in the order of the registry, others behind: one chart a key, and one of mean,
        median, max and min of the same thing."""
        charts: dict[str, dict[str, Any]] = {}
        for key in sorted(self.by_key):
            parts = _STATISTIC.fullmatch(key)
            title = parts[1] if parts else key
            chart = charts.setdefault(title, {"title": title, "group": key.partition("/")[0], "keys": [], **about(key)})
            chart["axis"] = self.by_key[key].axis
            chart["keys"].append(key)
        return sorted(
            charts.values(), key=lambda chart: (_rank(chart["group"]), chart["group"], _row(chart["keys"][0]))
        )

    def last(self, key: str) -> float | None:
        """Its newest value; None where there is none, or one that is not finite."""
        curve = self.by_key.get(key)
        return curve.y[-1] if curve and math.isfinite(curve.y[-1]) else None


def _number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, (int, float, str)) else None
    except ValueError:
        return None


def _row(key: str) -> tuple[int, int, str]:
    found = metric_of(key)
    if found is None:
        return 2 * len(METRICS), 0, key
    row, place = METRICS.index(found[0]), found[1]
    # What the trainer was given is looked at less than what was generated.
    return row + len(METRICS) * (found[0].section == "inputs"), place, key


def _rank(group: str) -> int:
    return _FIRST.index(group) if group in _FIRST else len(_FIRST)


def about(key: str) -> dict[str, str]:
    """What the registry says of a metric, as plain text; empty where it does not know it."""
    found = metric_of(key)
    if found is None:
        return {"unit": "", "what": "", "when": ""}
    metric, place = found
    units = metric.unit.split(", ")
    unit = units[place] if len(units) == len(metric.keys) else units[0]
    return {"unit": unit, "what": _written_out(metric, "what"), "when": _written_out(metric, "when")}


def _written_out(metric: Metric, column: str) -> str:
    """A cell as plain text; where it says "the same", the one above it in the table."""
    row = METRICS.index(metric)
    while (text := getattr(METRICS[row], column)) == "the same":
        row -= 1
    return _plain(text)


def _plain(text: str) -> str:
    return _LINK.sub(r"\1", text).replace("`", "")


def points(curve: Curve, buckets: int, first: float, last: float, smoothing: float = 0.0) -> dict[str, Any]:
    """At most two points a bucket, its least and its largest, between steps ``first`` and ``last``.

    Returns:
        ``x``, ``y``, ``bad``: steps (some, if many) whose value is not finite; with ``smoothing`` also ``smooth``,
        x and y of the debiased moving average, whose weight of the past it is.
    """
    begin, end = bisect_left(curve.x, first), bisect_right(curve.x, last)
    x, y = curve.x[begin:end], curve.y[begin:end]
    bad = [step for step, value in zip(x, y, strict=True) if not math.isfinite(value)]
    result: dict[str, Any] = {"bad": bad[:: max(1, len(bad) // _MOST_MARKS)], **_as_lists(x, y, buckets)}
    if smoothing:
        smooth = array("d", smoothed(curve.y[:end], smoothing))[begin:]
        result["smooth"] = _as_lists(x, smooth, buckets)
    return result


def _as_lists(x: Sequence[float], y: Sequence[float], buckets: int) -> dict[str, list[float | None]]:
    chosen = list(downsampled(y, buckets))
    return {"x": [x[i] for i in chosen], "y": [_short(y[i]) for i in chosen]}


def _short(value: float) -> float | None:
    return float(f"{value:.7g}") if math.isfinite(value) else None


def downsampled(y: Sequence[float], buckets: int) -> Iterator[int]:
    """Places of the least and the largest finite value of each bucket, in their order, and of the first and the last
    value; of all values where they are no more than that. A bucket with none that is finite has one place."""
    if len(y) <= 2 * buckets:
        yield from range(len(y))
        return
    chosen: set[int] = {0, len(y) - 1}
    for bucket in range(buckets):
        places = range(len(y) * bucket // buckets, len(y) * (bucket + 1) // buckets)
        finite = [place for place in places if math.isfinite(y[place])] or places[:1]
        chosen |= {min(finite, key=y.__getitem__), max(finite, key=y.__getitem__)}
    yield from sorted(chosen)


def smoothed(y: Sequence[float], weight: float) -> Iterator[float]:
    """The moving average with this weight of the past, less its bias to 0; values that are not finite do not count."""
    total, share = 0.0, 0.0
    for value in y:
        if math.isfinite(value):
            total, share = weight * total + (1 - weight) * value, weight * share + (1 - weight)
        yield total / share if share else math.nan
