"""What a file in Chrome's trace format must be, and how its spans lie, by rules that tools/tracing does not share."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import jsonschema

Event = dict[str, Any]


def _event(phase: str, *, required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    common = {"ph": {"const": phase}, "name": {"type": "string", "minLength": 1}}
    common |= {"pid": {"type": "integer", "minimum": 1}, "tid": {"type": "integer", "minimum": 0}}
    common |= {"cat": {"type": "string"}, "args": {"type": "object"}}
    return {
        "type": "object",
        "properties": common | properties,
        "required": ["ph", "name", "pid", "tid", *required],
        "additionalProperties": False,
    }


_TIME = {"type": "number", "minimum": 0}
_TRACK: dict[str, Any] = {"ts": _TIME, "id": {"type": "string"}, "required": ("ts", "id", "cat")}
SCHEMA = {
    "type": "object",
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object"},
        "traceEvents": {
            "type": "array",
            "items": {
                "oneOf": [
                    _event("X", ts=_TIME, dur=_TIME, required=("ts", "dur", "cat")),
                    _event("b", **_TRACK),
                    _event("e", **_TRACK),
                    _event("i", ts=_TIME, s={"enum": ["g", "p", "t"]}, required=("ts", "s")),
                    _event("C", ts=_TIME, required=("ts", "args")),
                    _event("M", name={"enum": ["process_name", "process_sort_index", "thread_name"]}),
                ]
            },
        },
    },
    "required": ["traceEvents"],
}
"""Of the kinds of events that are used, as the document "Trace Event Format" describes them."""


def read_chrome(path: Path) -> list[Event]:
    """Its events, of a file that is what the format asks for: strict JSON, and times in order."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    document = json.loads(path.read_text(), parse_constant=refuse)
    jsonschema.validate(document, SCHEMA)
    events: list[Event] = document["traceEvents"]
    times = [event["ts"] for event in events if "ts" in event]
    assert times == sorted(times)
    return events


def roles(events: list[Event]) -> dict[int, str]:
    """The processes' names by their numbers."""
    return {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}


def laid(events: list[Event]) -> dict[tuple[Any, ...], list[tuple[float, float, Event]]]:
    """Of each lane and track, the spans as a reader of the file finds them: begin, end (µs), and the event; ends are
    those of the latest begin that is open. AssertionError where spans overlap, or a begin has no end."""
    found: dict[tuple[Any, ...], list[tuple[float, float, Event]]] = defaultdict(list)
    stacks: dict[tuple[Any, ...], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found["lane", event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event))
        elif event["ph"] == "b":
            stacks["track", event["pid"], event["id"]].append(event)
        elif event["ph"] == "e":
            begun = stacks["track", event["pid"], event["id"]].pop()
            assert begun["name"] == event["name"]
            found["track", event["pid"], event["id"]].append((begun["ts"], event["ts"], begun))
    assert not any(stacks.values())
    for where, spans in found.items():
        open_ends: list[float] = []
        for begin, end, event in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= begin + 1e-3:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-3, (where, event)
            open_ends.append(end)
    return found


def assert_shows(events: list[Event], lines: list[dict[str, Any]]) -> None:
    """Whether every line is there once, as long as it says, and lies within its parent, in lines and lanes that hold
    both."""
    names, found = roles(events), laid(events)
    spans = [(names[where[1]], begin, end, event, where) for where, its in found.items() for begin, end, event in its]
    spans += [(names[e["pid"]], e["ts"], e["ts"], e, None) for e in events if e["ph"] == "i" and e["cat"] != "fault"]
    shown = {(role, event["args"].get("id")): (begin, end, where) for role, begin, end, event, where in spans}
    counts = Counter((role, event["args"]["id"]) for role, _, _, event, _ in spans if "id" in event["args"])
    assert counts == Counter((line["role"], line["id"]) for line in lines)
    by_id = {(line["role"], line["id"]): line for line in lines}
    first = min(line["start"] for line in lines)
    for key, line in by_id.items():
        begin, end, where = shown[key]
        assert abs(begin - (line["start"] - first) * 1e6) < 2, line
        assert abs(end - begin - line["seconds"] * 1e6) < 2, line
        parent = by_id.get((line["role"], line.get("parent")))
        if parent is None:
            continue
        assert parent["start"] - 1e-6 <= line["start"], (parent, line)
        assert line["start"] + line["seconds"] <= parent["start"] + parent["seconds"] + 1e-6, (parent, line)
        around = shown[line["role"], line["parent"]]
        if around[2] == where:
            assert around[0] <= begin
            assert end <= around[1] + 1e-3


def seconds_of_lanes(events: list[Event], role: str) -> dict[str, float]:
    """Of the top of a process's first lane: seconds by span, and those ``between`` them; they are its wall time."""
    (pid,) = (pid for pid, name in roles(events).items() if name == role)
    spans = sorted((span[0], span[1], span[2]["name"]) for span in laid(events)["lane", pid, 1])
    seconds: dict[str, float] = defaultdict(float)
    reached = spans[0][0]
    for begin, end, name in spans:
        if end > reached:
            seconds["between"] += max(0.0, begin - reached) / 1e6
            seconds[name] += (end - max(begin, reached)) / 1e6
            reached = end
    return dict(seconds)
