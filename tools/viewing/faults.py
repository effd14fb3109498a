"""What went wrong in a run: the lines of events.jsonl, and warnings and errors of its logs."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path
from typing import Any

from slime.observability.events import FILE, KINDS
from tools.viewing.tail import Tail, object_of

_MOST, _MOST_DETAILS, _LONGEST = 200, 30, 2000
_LAST = 4 << 20
"""Bytes of each log that are looked through when it is first read."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LINE = re.compile(r"\[?(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)")
"""The time with which a line of our own begins, of an engine's and of a router's; others go on from the one before."""
_LEVEL = re.compile(r"\b(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b")
_TOLD = {"WARNING": "WARNING", "WARN": "WARNING", "ERROR": "ERROR", "CRITICAL": "CRITICAL", "FATAL": "CRITICAL"}


class Faults:
    """The last events and warnings, which grow with the files."""

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir / "logs"
        self._events = Tail(run_dir / FILE)
        self._logs: dict[Path, _Log] = {}
        self.events: deque[dict[str, Any]] = deque(maxlen=_MOST)
        self.count = 0
        """Of all events."""

    def refresh(self) -> None:
        """Read what is new."""
        for _, _, line in self._events.new():
            event = object_of(line)
            if event is not None and isinstance(event.get("time"), (int, float)):
                self.events.append(event | {"what": KINDS.get(str(event.get("kind")), "")})
                self.count += 1
        for path in self._directory.glob("*.log"):
            self._logs.setdefault(path, _Log(path)).refresh()

    @property
    def warnings(self) -> list[dict[str, Any]]:
        """The last ones of all logs, in the order of their time; equal ones that follow each other in a log are one."""
        return sorted((each for log in self._logs.values() for each in log.warnings), key=_when)[-_MOST:]


def _when(warning: dict[str, Any]) -> str:
    return str(warning["time"])


class _Log:
    """The last warnings of one log, each with the lines that go on from it, as of a traceback."""

    def __init__(self, path: Path) -> None:
        self._role, self._tail = path.stem, Tail(path, last=_LAST)
        self._goes_on = False
        self.warnings: deque[dict[str, Any]] = deque(maxlen=_MOST)

    def refresh(self) -> None:
        for _, _, raw in self._tail.new():
            line = _COLOUR.sub("", raw.decode(errors="replace")).rstrip()[:_LONGEST]
            begins = _LINE.match(line)
            if begins is None:
                if self._goes_on and line and len(self.warnings[-1]["details"]) < _MOST_DETAILS:
                    self.warnings[-1]["details"].append(line)
                continue
            level = _LEVEL.search(line)
            self._goes_on = level is not None and level[1] in _TOLD
            if level is not None and self._goes_on:
                text = line[begins.end() : level.start()].lstrip("0123456789,.Z] ") + line[level.end() :].lstrip(": ")
                self._add(begins[1].replace("T", " "), level[1], text)

    def _add(self, time: str, level: str, text: str) -> None:
        last = self.warnings[-1] if self.warnings else None
        if last is not None and (last["text"], last["details"]) == (text, []):
            last["time"], last["times"] = time, last["times"] + 1
            return
        self.warnings.append(
            {"time": time, "role": self._role, "level": _TOLD[level], "text": text, "times": 1, "details": []}
        )
