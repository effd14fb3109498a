"""Files of lines in the run's directory, and what a process logs, in one of its own: ``logs/<role>.log``."""

from __future__ import annotations

import argparse
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slime.files.storage import why_not_written, writing
from slime.utils.redaction import is_secret, redacted_line

logger = logging.getLogger(__name__)

FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"
_MOST_BYTES = 256 << 20
_SHORTEST = 8
"""Characters of what is struck out wherever it stands: a shorter one would be so in words and numbers too."""
_secrets: set[str] = set()
_SHOWN = 4
"""Messages of one kind that have a line each where they differ; then only `should_log` decides."""
_COUNTED = 8
"""Failures of one kind that are told of by their number."""


class LineFile:
    """A file that others read while it is written, on a disk that may be full. Lines are appended whole or not at all;
    what follows the last line feed is on its way, or lost with its host."""

    def __init__(self, path: Path, *, turns: bool = False) -> None:
        """``turns``: of 256 MiB and more it becomes ``<path>.1``, in the place of that one, and another is begun."""
        self._path, self._turns, self._opened, self._warned = path, turns, False, False
        self.place = "--run-dir", str(path)

    def open(self) -> LineFile:
        """Open or make it, which otherwise the first line does; StorageError where it cannot be."""
        with writing(*self.place):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Without a buffer: what a full disk does not take must not be kept for the file's end.
            self._file, self._opened = self._path.open("ab+", buffering=0), True
            # A host that went down may have left half a line; the next one must not be appended to it.
            if self._file.seek(0, os.SEEK_END) > 0:
                self._file.seek(-1, os.SEEK_END)
                if self._file.read(1) != b"\n":
                    self._file.write(b"\n")
        return self

    def append(self, lines: bytes) -> None:
        """Write one or more lines, each with its line feed; after an OSError or StorageError none of them is there."""
        if not self._opened:
            self.open()
        end = self._file.seek(0, os.SEEK_END)
        if self._turns and end > _MOST_BYTES:
            self.close()
            self._path.replace(f"{self._path}.1")
            return self.open().append(lines)
        try:
            written = self._file.write(lines)
            if written != len(lines):  # the disk is full now; a further try gets the error
                self._file.write(lines[written:])
        except OSError:
            self._file.truncate(end)
            raise

    def try_to_append(self, lines: Callable[[], str]) -> None:
        """The same of what ``lines`` gives; where that fails they are lost, with one warning."""
        try:
            self.append(lines().encode(errors="replace"))
        except Exception as error:
            if not self._warned:
                self._warned = True
                why = why_not_written(error, *self.place) or f"{self._path}: {error!r}"
                logger.warning("%s; the run goes on, and lines are lost there until that is mended", why)

    def close(self) -> None:
        if self._opened:
            self._file.close()


def begin(args: argparse.Namespace, role: str) -> None:
    """Write what this process, ``role``, logs from now on, INFO and above; standard error gets WARNING and above."""
    root = logging.root
    shown = [each for each in root.handlers if not isinstance(each, _LogFile)]
    for handler in shown:
        handler.addFilter(_as_before)
    root.handlers = [
        *(shown or filter(None, [logging.lastResort])),
        _LogFile(Path(args.run_dir, "logs", f"{role}.log")),
    ]
    root.setLevel(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # of users' code: a line a request
    hide(_secrets_of({**os.environ, **vars(args)}))
    logger.info("%s: process %d on %s", role, os.getpid(), socket.gethostname())


def hide(secrets: Iterable[str | None]) -> None:
    """Strike these out of every line from now on, beside what looks like a key."""
    _secrets.update(secret for secret in secrets if secret and len(secret) >= _SHORTEST)


def _secrets_of(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _secrets_of(value)
        elif is_secret(name, value):
            yield str(value)


def _as_before(record: logging.LogRecord) -> bool:
    """As where the root logger is at WARNING: a user's may have a level of its own."""
    its = logging.getLogger(record.name)
    while its.level == logging.NOTSET and its.parent is not None:
        its = its.parent
    return record.levelno >= (logging.WARNING if its is logging.root else its.level)


class _LogFile(logging.Handler):
    def __init__(self, path: Path) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter(FORMAT))
        self._lines = LineFile(path, turns=True)

    def emit(self, record: logging.LogRecord) -> None:
        longest_first = sorted(_secrets, key=len, reverse=True)  # one may begin with another
        self._lines.try_to_append(lambda: f"{redacted_line(self.format(record), longest_first)}\n")


def should_log(count: int) -> bool:
    """Whether the ``count``-th time of something is told of: at powers of two, so that it floods nothing."""
    return count & (count - 1) == 0


class FailureLog:
    """Warns of failures: the first of a kind in full, other messages in a line, and of many how many they are."""

    def __init__(self) -> None:
        self._count: Counter[tuple[str, str, str]] = Counter()
        self._heads: dict[tuple[str, str, str], set[str]] = {}

    def warn(self, what: str, reason: str, error: Exception) -> None:
        """Warn of a failed try, ``what``, or only count it. ``reason`` is that by which metrics count failures; the
        message of ``error`` is the story, the traceback of a user's function included."""
        message = str(error)
        head = message.splitlines()[0] if message else ""
        where = head.partition(" raised ")[0] if " raised " in head else ""
        kind = (reason, where, type(error.__cause__ or error).__name__)
        self._count[kind] += 1
        count = self._count[kind]
        heads = self._heads.setdefault(kind, set())
        if count == 1:
            logger.warning("%s: %s: %s", what, reason, message)
        elif head not in heads and len(heads) < _SHOWN:
            logger.warning("%s: %s: %s", what, reason, head)
        elif count >= _COUNTED and should_log(count):
            logger.warning("%s: %s by the same kind of error as above, in %d tries by now", what, reason, count)
        if len(heads) < _SHOWN:
            heads.add(head)
