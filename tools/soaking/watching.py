"""What a run tells of itself while it goes on: its events, the phase that it is in, and which events are of a fault."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.observability import events
from tools.soaking.plan import ANY, GENERATE, KINDS, PUSH, SAVE, TRAIN, Fault

Event = dict[str, Any]
_AFTER = {
    "driver/push_weights": GENERATE,
    "driver/hand_over": TRAIN,
    "driver/train": SAVE,
    "driver/save": PUSH,
}
"""The phase that begins when such a span of the driver has ended."""
_SPAN_OF = {
    GENERATE: "driver/wait_for_rollout",
    TRAIN: "driver/train",
    SAVE: "driver/save",
    PUSH: "driver/push_weights",
}
_CLOCKS_S = 0.5
"""By which two processes' times may differ, of one host's clock."""
_LOST, _BACK = ("_died", "_hangs"), "_back"
_COME_BACK = ("engine_", "router_")
"""Kinds whose return has a line of its own."""


class Lines:
    """The lines of JSON of a file that grows, each once."""

    def __init__(self, path: Path) -> None:
        self._path, self._read, self._inode = path, 0, 0

    def new(self) -> list[dict[str, Any]]:
        """Those that were written since the last call, and are whole."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                text = file.read()
        except OSError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


@dataclass(frozen=True)
class Moment:
    """Where in a step a run is.

    Attributes:
        phase: one of the plan's; empty before the first step of a driver.
        rollout: of the span that ended last, or the version of a push.
        since: when that ended, in seconds since the epoch.
        lasted: seconds that this phase took in the step before; 0 where that is not known.
    """

    phase: str
    rollout: int
    since: float
    lasted: float


class Watcher:
    """Reads what a run writes into its directory; made before its driver begins."""

    def __init__(self, run_dir: Path) -> None:
        self._spans, self._lines = Lines(run_dir / "trace" / "driver.jsonl"), Lines(run_dir / events.FILE)
        self.events: list[Event] = []
        """All so far, in the order of writing."""
        self._lasted: dict[str, float] = {}
        self._moment = Moment("", -1, 0.0, 0.0)
        self.pushes: list[tuple[float, float]] = []
        """Begin and end of each push that was complete."""
        self._forgotten: dict[str, int] = {}
        """How many events there were when each was forgotten."""
        self.began = time.time()
        self.look()
        self._first = len(self.events)
        """Those before it are of an earlier shard, whose driver has ended."""

    def look(self) -> Moment:
        """Read what is new; where the run is now."""
        self.events += self._lines.new()
        for line in self._spans.new():
            end, name = line["start"] + line["seconds"], line["name"]
            failed = "error" in line
            for phase, span in _SPAN_OF.items():
                if span == name and not failed:
                    self._lasted[phase] = line["seconds"]
            if name == "driver/push_weights" and not failed:
                self.pushes.append((line["start"], end))
            if name in _AFTER:
                phase = "" if failed else _AFTER[name]
                where = line.get("rollout", line.get("version", -1))
                self._moment = Moment(phase, where, end, self._lasted.get(phase, 0.0))
        return self._moment

    def forget(self, subject: str) -> None:
        """That an engine that was lost is not to come back by this name."""
        self._forgotten[subject] = len(self.events)

    def lost(self) -> list[str]:
        """Engines and routers that were lost, in the life of this driver, and are not back."""
        last: dict[str, str] = {}
        for number, event in enumerate(self.events[self._first :], self._first):
            if event["kind"] == "driver_died":
                last = {}
            elif event["kind"].startswith(_COME_BACK) and number >= self._forgotten.get(event["subject"], 0):
                last[event["subject"]] = event["kind"]
        return sorted(subject for subject, kind in last.items() if kind.endswith(_LOST))

    def steps_since(self, when: float) -> list[float]:
        """When each push was complete that had begun after ``when``."""
        return [end for began, end in self.pushes if began > when]


def noticed(fault: Fault, subject: str, struck: float, told: Sequence[Event]) -> Event | None:
    """The first event by which a run tells that it has noticed a fault that was injected at ``struck``; ``subject`` is
    whom that was done to, where the plan does not know it."""
    kind = KINDS[fault.kind]
    for event in told:
        in_time = struck - _CLOCKS_S <= event["time"] <= struck + kind.within
        words = re.search(kind.cause, event["cause"]) and re.search(kind.phase, event["phase"])
        if in_time and event["kind"] in kind.told and words and is_of(event, kind.named or subject):
            return event
    return None


def is_of(event: Event, subject: str) -> bool:
    """Whether an event is about this subject: one may name several."""
    return subject == ANY or subject in event["subject"].split(", ")


def returned(fault: Fault, subject: str, first: Event, told: Sequence[Event], watcher: Watcher) -> float | None:
    """When all was well again after the event ``first`` of a fault, in seconds since the epoch; None before that."""
    kind = KINDS[fault.kind]
    if (back := kind.back) == "step":
        steps = watcher.steps_since(first["time"])
        return steps[0] if steps else None
    is_told_at_once = back not in kind.told
    for event in told:
        is_over = is_told_at_once or event["seconds"] is not None
        its = event["kind"] == back and is_of(event, kind.named or subject)
        if its and is_over and event["time"] >= first["time"]:
            return float(event["time"])
        if event["kind"] == "driver_died" and event["time"] > first["time"]:  # all of it was started anew
            steps = watcher.steps_since(event["time"])
            return steps[0] if steps else None
    return None


def wait_for(condition: Callable[[], Any], seconds: float, poll: float = 0.05) -> Any:
    """What ``condition()`` gives once that is true; None where it has not been within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            return None
        time.sleep(poll)
    return value
