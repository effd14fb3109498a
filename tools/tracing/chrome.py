"""Spans as events of Chrome's trace format, as https://ui.perfetto.dev opens it.

Processes are the run's. Spans are complete events (``X``) on threads, their lanes; those of a sample are asynchronous
ones (``b``, ``e``) on a track of its own, within one that is named for its rollout. Moments and faults are instants
(``i``), memory is counters (``C``). Times are microseconds since the first span of the run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from tools.tracing.lanes import lay
from tools.tracing.lines import Recording, Span

Event = dict[str, Any]


def events_of(recording: Recording) -> list[Event]:
    """All events, in the order of their time; each span has one, or one of its begin and one of its end."""
    events: list[Event] = []
    for pid, role in enumerate(recording.roles, start=1):
        spans = [span for span in recording.spans if span.role == role]
        events += _process(pid, role)
        events += _threads(pid, [span for span in spans if not span.is_instant and not _is_of_sample(span)])
        events += _samples(pid, [span for span in spans if not span.is_instant and _is_of_sample(span)])
        events += [_instant(pid, span.name, span.start, _args(span)) for span in spans if span.is_instant]
        events += [counter for span in spans if (counter := _memory(pid, span)) is not None]
        events += [_fault(pid, fault, recording.start) for fault in recording.faults if fault["role"] == role]
    return sorted(events, key=lambda event: event.get("ts", -1.0))


def _is_of_sample(span: Span) -> bool:
    return span.fields.get("sample") is not None


def _process(pid: int, role: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": role}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}


def _threads(pid: int, spans: list[Span]) -> Iterator[Event]:
    for tid, lane in enumerate(lay(spans), start=1):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": f"lane {tid}"}}
        for span in lane:
            yield {**_named(span), "ph": "X", "pid": pid, "tid": tid, **_times(span), "args": _args(span)}


def _samples(pid: int, spans: list[Span]) -> Iterator[Event]:
    """A sample's spans that overlap, as of an agent that asks for several turns at once, have tracks beside each other;
    evaluations number their samples as rollouts do."""
    tracks: dict[tuple[int, Any], list[Span]] = defaultdict(list)
    for span in spans:
        root = span.root
        tracks[0 if _is_of_sample(root) else id(root), span.fields["sample"]].append(span)
    for number, its in enumerate(tracks.values()):
        for lane_number, lane in enumerate(lay(its)):
            where = {"cat": "sample", "pid": pid, "tid": 0, "id": f"{pid}.{number}.{lane_number}"}
            about = {key: lane[0].fields.get(key) for key in ("sample", "group")}
            title = {"name": _title(lane[0]), **where}
            yield {**title, "ph": "b", "ts": lane[0].start / 1e3, "args": about}
            yield from _nested(lane, where)
            yield {**title, "ph": "e", "ts": max(span.end for span in lane) / 1e3}


def _title(span: Span) -> str:
    """Of a sample's track: Perfetto puts those of one name together."""
    root = span.root
    if root.name == "rollout/evaluate":
        return f"samples of the evaluation at version {root.fields.get('version')}"
    return f"samples of rollout {span.fields['rollout']}" if "rollout" in span.fields else "samples"


def _nested(lane: Iterable[Span], where: Event) -> Iterator[Event]:
    """Begins and ends in their order, also where several have one time."""
    stack: list[Span] = []
    for span in [*lane, None]:
        while stack and (span is None or (stack[-1].end <= span.start and not _contains(stack[-1], span))):
            ended = stack.pop()
            yield {"name": ended.name, **where, "ph": "e", "ts": ended.end / 1e3}
        if span is not None:
            stack.append(span)
            yield {"name": span.name, **where, "ph": "b", "ts": span.start / 1e3, "args": _args(span)}


def _contains(outer: Span, inner: Span) -> bool:
    return inner.parent is outer and inner.end <= outer.end


def _named(span: Span) -> Event:
    return {"name": span.name, "cat": span.name.partition("/")[0]}


def _args(span: Span) -> Event:
    ids = {"id": span.own_id, "parent": span.parent_id}
    return {**{name: value for name, value in ids.items() if value is not None}, **span.fields}


def _times(span: Span) -> dict[str, float]:
    return {"ts": span.start / 1e3, "dur": (span.end - span.start) / 1e3}


def _instant(pid: int, name: str, at: float, args: dict[str, Any]) -> Event:
    return {"ph": "i", "s": "p", "name": name, "cat": "instant", "pid": pid, "tid": 1, "ts": at / 1e3, "args": args}


def _fault(pid: int, fault: dict[str, Any], start: float) -> Event:
    return _instant(pid, f"fault: {fault['kind']}", round((fault["time"] - start) * 1e9), fault) | {"cat": "fault"}


def _memory(pid: int, span: Span) -> Event | None:
    figures = span.fields.get("memory_gib")
    if not isinstance(figures, dict):
        return None
    return {"ph": "C", "name": "memory (GiB)", "pid": pid, "tid": 0, "ts": span.end / 1e3, "args": figures}
