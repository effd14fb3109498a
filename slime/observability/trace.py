"""Where the time of a run goes: spans of every process, lines of JSON in ``trace/<role>.jsonl`` of the run's directory.

A line has ``name`` (one of spans.toml beside this), ``start`` (seconds since the epoch), ``seconds``, ``role`` (the
process), ``error`` (the class, if one ended it), and the fields of the span and of those around it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
import time
from collections.abc import Mapping
from contextvars import ContextVar, Token
from pathlib import Path
from types import TracebackType
from typing import Any

from slime.observability.logs import LineFile

_EVERY_S = 1.0
"""Written earlier is what ends with the span around it all."""
_encode = json.JSONEncoder(default=str).encode
_around: ContextVar[Mapping[str, Any] | None] = ContextVar("fields_of_spans_around", default=None)


class span:
    """Times a block of synchronous or asynchronous code, and has a line written of it where the process has a trace.

    ``name`` is one of spans.toml. The fields (``rollout``, ``version``, ``sample``, ...) are those of spans within the
    block too, and more may be added there; ``seconds`` is known after it.
    """

    def __init__(self, name: str, /, **fields: Any) -> None:
        self._name, self._around = name, _around.get()
        self.fields = {**(self._around or {}), **fields}

    def __enter__(self) -> span:
        self._token: Token[Mapping[str, Any] | None] = _around.set(self.fields)
        self._start, self._began = time.time(), time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.seconds = time.perf_counter() - self._began
        with contextlib.suppress(ValueError):  # of an asynchronous generator that another task has gone on with
            _around.reset(self._token)
        if _trace is not None:
            failed = {"error": kind.__name__} if kind else {}
            line = {"name": self._name, "start": self._start, "seconds": self.seconds, **failed, **self.fields}
            _trace.add(line, is_last=self._around is None)


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
