"""The spans of a run, out of the lines of its processes, and which of them belong to a range of rollouts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.utils.errors import BadInputError

_OF_LINE = ("name", "start", "seconds", "id", "parent", "role", "instant")
_FIRST = ("driver", "rollout_manager")


@dataclass
class Span:
    """One line: ``start`` and ``end`` in nanoseconds since the first one of the run."""

    role: str
    name: str
    start: int
    end: int
    is_instant: bool
    fields: dict[str, Any]
    own_id: int | None
    parent_id: int | None
    parent: Span | None = field(default=None, repr=False)

    @property
    def root(self) -> Span:
        """The outermost span around it, itself where there is none."""
        span = self
        while span.parent is not None:
            span = span.parent
        return span


@dataclass
class Recording:
    """What a run's processes wrote.

    Attributes:
        start: seconds since the epoch, of what is nanosecond 0.
        broken: lines that are no whole span, as a host that went down leaves.
    """

    start: float
    spans: list[Span]
    faults: list[dict[str, Any]]
    broken: int = 0

    @property
    def roles(self) -> list[str]:
        """The processes: the driver, the rollout manager, then engines, trainers and what else there is."""
        found = {span.role for span in self.spans} | {str(fault["role"]) for fault in self.faults}
        return sorted(found, key=lambda role: (_FIRST.index(role) if role in _FIRST else len(_FIRST), _natural(role)))


def read_run(run_dir: Path) -> Recording:
    """All that ``trace/`` and ``events.jsonl`` of a run's directory have.

    Raises:
        BadInputError: it is not the directory of a run, or no span has ended yet.
    """
    # A file that became too long is <role>.jsonl.1 now.
    files = sorted(run_dir.glob("trace/*.jsonl.1")) + sorted(run_dir.glob("trace/*.jsonl"))
    lines: list[dict[str, Any]] = []
    broken = 0
    for line in (line for file in files for line in _lines_of(file)):
        if line is not None and is_span(line):
            lines.append(line)
        else:
            broken += 1
    if not lines:
        raise BadInputError(f"{run_dir}: no spans in {run_dir / 'trace'}: name a run's directory, --run-dir of the run")
    events = run_dir / "events.jsonl"
    faults = [fault for fault in (_lines_of(events) if events.exists() else ()) if fault and "time" in fault]
    start = min(line["start"] for line in lines)
    spans = [span_of(line, start) for line in lines]
    find_parents(spans)
    return Recording(start, spans, faults, broken)


def of_rollouts(recording: Recording, first: int, last: int) -> Recording:
    """What was under way between the first and the last span of these rollouts: also of others, and of engines.

    Raises:
        BadInputError: there is no span of them.
    """
    there = {span.fields["rollout"] for span in recording.spans if isinstance(span.fields.get("rollout"), int)}
    chosen = [span for span in recording.spans if span.fields.get("rollout") in range(first, last + 1)]
    if not chosen:
        known = f"it has {min(there)} to {max(there)}" if there else "it has none yet"
        raise BadInputError(f"--rollouts: no span of rollouts {first} to {last} in the run: {known}")
    start, end = min(span.start for span in chosen), max(span.end for span in chosen)
    spans = [span for span in recording.spans if span.start <= end and span.end >= start]
    within = [fault for fault in recording.faults if start <= (fault["time"] - recording.start) * 1e9 <= end]
    return Recording(recording.start, spans, within, recording.broken)


def _lines_of(file: Path) -> Iterator[dict[str, Any] | None]:
    """Each line that has ended; None in the place of one that is no object."""
    with file.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                return  # it is being written
            try:
                value = json.loads(line, parse_constant=str)  # JSON has no NaN
            except ValueError:
                value = None
            yield value if isinstance(value, dict) else None


def is_span(line: dict[str, Any] | None) -> bool:
    """Whether a line has what every span has."""
    return line is not None and {"name", "start", "seconds", "role"} <= line.keys()


def span_of(line: dict[str, Any], start: float) -> Span:
    """A line as a span of a run that began at ``start``, in seconds since the epoch; without its parent."""
    begun = round((line["start"] - start) * 1e9)
    ended = begun + max(0, round(line["seconds"] * 1e9))
    fields = {name: value for name, value in line.items() if name not in _OF_LINE}
    own, parent = line.get("id"), line.get("parent")
    return Span(str(line["role"]), str(line["name"]), begun, ended, bool(line.get("instant")), fields, own, parent)


def find_parents(spans: list[Span]) -> None:
    """Give each span its parent, where that is one of them."""
    by_id = {(span.role, span.own_id): span for span in spans if span.own_id is not None}
    for span in spans:
        if span.parent_id is not None:  # of one that is still under way there is no line
            span.parent = by_id.get((span.role, span.parent_id))


def _natural(role: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in role.split("_")]
