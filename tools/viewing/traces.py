"""The spans of a run that goes on: which part of the files a range of rollouts is in, and what all of them tell."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from slime.utils.errors import BadInputError
from tools.tracing.lanes import lay
from tools.tracing.lines import Recording, Span, find_parents, is_span, span_of
from tools.viewing.curves import Curve
from tools.viewing.tail import Tail, object_of

_BLOCK = 500
"""Lines that are found again, and read, together."""
_MOST_SPANS, _MOST_ROWS = 6000, 24
_MANAGER = "rollout_manager"
_WAITS = {"rollout/request": "requests", "rollout/rewarding": "rewards", "rollout/rewarding_its_group": "rewards"}
Interval = tuple[float, float]


@dataclass
class _Block:
    """Lines of a file that follow each other, and when the first of their spans began and the last one ended."""

    file: IO[bytes]
    at: int
    bytes: int = 0
    lines: int = 0
    start: float = float("inf")
    end: float = float("-inf")


@dataclass
class _Waits:
    """What a rollout that is being made waits for, and when."""

    requests: list[Interval] = field(default_factory=list)
    rewards: list[Interval] = field(default_factory=list)
    generating: list[Interval] = field(default_factory=list)


class Traces:
    """An index of ``trace/*.jsonl``, which grows with them: times of rollouts, memory, and waits of the rollout."""

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir / "trace"
        self._tails: dict[Path, Tail] = {}
        self._files: set[tuple[int, int]] = set()
        self._blocks: list[_Block] = []
        self._waits: dict[int, _Waits] = {}
        self.broken = 0
        self.start = float("inf")
        """Of the run's first span, in seconds since the epoch."""
        self.rollouts: dict[int, Interval] = {}
        """From the first to the last span of each, in seconds since the epoch."""
        self.memory: dict[tuple[str, str], Curve] = {}
        """By role and kind (``host``, ``used``, ...): GiB over seconds since the epoch."""
        self.idle: dict[int, dict[str, float]] = {}
        """By rollout: seconds, ``made``, in which samples were made, and those of them in which no request was at an
        engine, and ``rewards`` or ``tools`` were waited for; nothing of one without spans of requests."""

    def refresh(self) -> None:
        """Read what is new."""
        for path in sorted(self._directory.glob("*.jsonl.1")) + sorted(self._directory.glob("*.jsonl")):
            self._tails.setdefault(path, Tail(path, read=self._files))
        for tail in self._tails.values():
            block = None
            for file, at, line in tail.new():
                if block is None or block.lines == _BLOCK or block.file is not file:
                    block = _Block(file, at)
                    self._blocks.append(block)
                block.bytes, block.lines = block.bytes + len(line), block.lines + 1
                self._note(block, object_of(line))

    def _note(self, block: _Block, line: dict[str, Any] | None) -> None:
        if line is None or not is_span(line):
            self.broken += 1
            return
        start, end = line["start"], line["start"] + max(0.0, line["seconds"])
        block.start, block.end = min(block.start, start), max(block.end, end)
        self.start = min(self.start, start)
        rollout = line.get("rollout")
        if isinstance(rollout, int):
            was = self.rollouts.get(rollout, (start, end))
            self.rollouts[rollout] = min(was[0], start), max(was[1], end)
            if line["role"] == _MANAGER:
                self._note_wait(line["name"], rollout, (start, end))
        memory = line.get("memory_gib")
        if isinstance(memory, dict):
            for kind, gib in memory.items():
                self.memory.setdefault((line["role"], kind), Curve("time")).add(end, float(gib))

    def _note_wait(self, name: str, rollout: int, when: Interval) -> None:
        waits = self._waits.setdefault(rollout, _Waits())
        if name == "rollout/samples":
            self.idle[rollout] = _idle(waits, when) if waits.requests else {}
            del self._waits[rollout]
        elif name in ("rollout/generating", "rollout/warming_up"):
            waits.generating.append(when)
        elif kind := _WAITS.get(name):
            getattr(waits, kind).append(when)

    def recording(self, first: int, last: int) -> Recording:
        """All spans that were under way between the first and the last one of these rollouts.

        Raises:
            BadInputError: there is none of them.
        """
        chosen = [when for rollout, when in self.rollouts.items() if first <= rollout <= last]
        if not chosen:
            known = f"{min(self.rollouts)} to {max(self.rollouts)}" if self.rollouts else "none"
            raise BadInputError(f"there are no spans of rollouts {first} to {last}; there are those of {known}")
        start, end = min(when[0] for when in chosen), max(when[1] for when in chosen)
        lines = [line for block in self._blocks if block.start <= end and block.end >= start for line in _read(block)]
        within = [line for line in lines if line["start"] <= end and line["start"] + line["seconds"] >= start]
        spans = [span_of(line, start) for line in within]
        find_parents(spans)
        return Recording(start, spans, [], 0)


def _read(block: _Block) -> Iterator[dict[str, Any]]:
    block.file.seek(block.at)
    for line in block.file.read(block.bytes).splitlines():
        value = object_of(line)
        if value is not None and is_span(value):
            yield value


def _idle(waits: _Waits, when: Interval) -> dict[str, float]:
    """Seconds of a rollout without requests in which rewards, and else responses, were waited for."""
    free = _without([when], _union(waits.requests))
    rewarding, generating = _union(waits.rewards), _union(waits.generating)
    without_rewards = _without(free, rewarding)
    return {
        "made": when[1] - when[0],
        "rewards": _length(free) - _length(without_rewards),
        "tools": _length(without_rewards) - _length(_without(without_rewards, generating)),
    }


def _union(intervals: list[Interval]) -> list[Interval]:
    """The same times, apart from each other and in order."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return result


def _without(those: list[Interval], others: list[Interval]) -> list[Interval]:
    """What is left of ``those``; both apart and in order."""
    left = []
    ends = [end for _, end in others]
    for start, end in those:
        for begins, ends_at in others[bisect_right(ends, start) :]:
            if begins >= end:
                break
            if begins > start:
                left.append((start, begins))
            start = ends_at
        if start < end:
            left.append((start, end))
    return left


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def lanes(recording: Recording) -> dict[str, Any]:
    """The lanes of each process, for a screen.

    Returns:
        ``names`` of spans; ``roles`` with their ``spans``, each [row, name's place, start, milliseconds, what else is
        known], ``rows``, and how many rows are left out, ``hidden``; ``left_out``, the shortest spans of too many;
        ``seconds``, of all.
    """
    names: dict[str, int] = {}
    kept = sorted(recording.spans, key=lambda span: span.start - span.end)[:_MOST_SPANS]
    roles = []
    shown = {id(span) for span in kept}
    for role in recording.roles:
        rows, hidden, spans = 0, 0, []
        for lane in lay(span for span in recording.spans if span.role == role and id(span) in shown):
            depths = list(_depths(lane))
            deep = max(depths) + 1
            if hidden or rows + deep > _MOST_ROWS:
                hidden += deep
                continue
            for span, depth in zip(lane, depths, strict=True):
                name = names.setdefault(span.name, len(names))
                spans.append([rows + depth, name, *_milliseconds(span), _known(span)])
            rows += deep
        roles.append({"role": role, "spans": spans, "rows": rows, "hidden": hidden})
    seconds = max((span.end for span in recording.spans), default=0) / 1e9
    left_out = len(recording.spans) - len(kept)
    return {"names": list(names), "roles": roles, "left_out": left_out, "seconds": seconds, "start": recording.start}


def _depths(lane: list[Span]) -> Iterator[int]:
    """Of each span of a lane, how many it lies within."""
    stack: list[Span] = []
    for span in lane:
        while stack and stack[-1].end <= span.start and stack[-1] is not span.parent:
            stack.pop()
        yield len(stack)
        stack.append(span)


def _milliseconds(span: Span) -> tuple[float, float]:
    return round(span.start / 1e6, 3), round((span.end - span.start) / 1e6, 3)


def _known(span: Span) -> str:
    """Its fields that are a word or a number, as text."""
    fields = {name: value for name, value in span.fields.items() if isinstance(value, (str, int, float))}
    return " · ".join(f"{name} {value}"[:80] for name, value in fields.items())


def memory(traces: Traces) -> dict[str, Curve]:
    """GiB over seconds since the run's start, by ``<kind>/<role>``."""
    curves = {}
    for (role, kind), curve in sorted(traces.memory.items()):
        curves[f"{kind}/{role}"] = Curve("time", array("d", (at - traces.start for at in curve.x)), curve.y)
    return curves
