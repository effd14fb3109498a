"""Where the time of a run goes: spans of every process, lines of JSON in ``trace/<role>.jsonl`` of the run's directory.

A line has ``name`` (one of spans.toml beside this), ``start`` (seconds since the epoch), ``seconds``, ``id``,
``parent`` (the id of the span around it, if there is one), ``role`` (the process), ``error`` (the class, if one ended
it), and the fields of the span and of those around it. tools/make_trace.py makes a file for Perfetto of them.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import threading
import time
from contextvars import ContextVar, Token
from pathlib import Path
from types import TracebackType
from typing import Any

from slime.observability.logs import LineFile

_EVERY_S = 1.0
"""Written earlier is what ends with the span around it all."""
_OWN = frozenset(("name", "start", "seconds", "id", "parent", "role", "error", "instant"))
_encode = json.JSONEncoder(default=str).encode
_around: ContextVar[span | None] = ContextVar("span_around", default=None)
_ids = itertools.count(time.time_ns() // 1000)
"""A process that is started again appends to the file of the one before, whose ids are smaller."""


class span:
    """Times a block of synchronous or asynchronous code, and has a line written of it where the process has a trace.

    ``name`` is one of spans.toml. The fields (``rollout``, ``version``, ``sample``, ...) are those of spans within the
    block too, and more may be added there; ``seconds`` is known after it.
    """

    def __init__(self, name: str, /, *, within: span | None = None, **fields: Any) -> None:
        """``within`` is the span around, where that is not the one of this task or thread (`around`)."""
        self._name, self._around = name, within or _around.get()
        self.fields: dict[str, Any] = {**(self._around.fields if self._around else {}), **fields}
        self._id = next(_ids)

    def __enter__(self) -> span:
        self._token: Token[span | None] = _around.set(self)
        self._start, self._began = time.time(), time.perf_counter()
        if self._around is not None:  # by one clock, so that it lies within that one also where the host's is set
            self._start = self._around._start + (self._began - self._around._began)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.seconds = time.perf_counter() - self._began
        with contextlib.suppress(ValueError):  # of an asynchronous generator that another task has gone on with
            _around.reset(self._token)
        del self._token  # which refers to the task's context, and that to spans
        if _trace is not None:
            failed = {"error": kind.__name__} if kind else {}
            _trace.add(self._line(self._start, self.seconds, **failed), is_last=self._around is None)

    def _line(self, start: float, seconds: float, **more: Any) -> dict[str, Any]:
        """Of this span; a field that is called as what a line itself says is ``field_<name>``."""
        line = {"name": self._name, "start": start, "seconds": seconds, "id": self._id}
        if self._around is not None:
            line["parent"] = self._around._id
        if _OWN.isdisjoint(self.fields):
            return line | more | self.fields
        return line | more | {f"field_{key}" if key in _OWN else key: value for key, value in self.fields.items()}


def instant(name: str, /, **fields: Any) -> None:
    """Have a line written of a moment: of a span of no seconds, which has ``instant`` true."""
    if _trace is not None:
        moment = span(name)
        moment.fields.update(fields)
        around = moment._around
        now = time.time() if around is None else around._start + (time.perf_counter() - around._began)
        _trace.add(moment._line(now, 0.0, instant=True), is_last=around is None)


def around() -> span | None:
    """The span that this task or thread is in."""
    return _around.get()


def note(**fields: Any) -> None:
    """Add to the fields of the span that this task or thread is in."""
    if (now := _around.get()) is not None:
        now.fields.update(fields)


class _Trace:
    def __init__(self, run_dir: str, role: str) -> None:
        self._role = role
        self._file = LineFile(Path(run_dir, "trace", f"{role}.jsonl"), turns=True)
        self._lines: list[dict[str, Any]] = []
        self._written = time.monotonic()
        self._writing = threading.Lock()

    def add(self, line: dict[str, Any], *, is_last: bool) -> None:
        self._lines.append(line | {"role": self._role})
        if is_last or (time.monotonic() - self._written > _EVERY_S and not self._writing.locked()):
            self.write()

    def write(self) -> None:
        with self._writing:
            self._written, lines = time.monotonic(), self._lines[:]
            del self._lines[: len(lines)]  # other threads go on adding to it
            if lines:
                self._file.try_to_append(lambda: "".join(f"{_encode(line)}\n" for line in lines))


_trace: _Trace | None = None


def begin(run_dir: str, role: str) -> None:
    """Write the spans of this process, ``role`` of the run, from now on: after those of a run that this one resumes."""
    global _trace
    flush()
    _trace = _Trace(run_dir, role)


def flush() -> None:
    """Write what has not been written yet: spans within another one, at most a second old when the last one ended."""
    if _trace is not None:
        _trace.write()


def _forget() -> None:
    global _trace
    _trace = None


atexit.register(flush)
os.register_at_fork(after_in_child=_forget)
