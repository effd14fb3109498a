"""What a process logs, in a file of its own: ``logs/<role>.log`` of the run's directory."""

from __future__ import annotations

import argparse
import logging
import os
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slime.observability.lines import LineFile
from slime.utils.redaction import is_secret, redacted_line

logger = logging.getLogger(__name__)

FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"
_SHORTEST = 8
"""Characters of what is struck out wherever it stands: a shorter one would be so in words and numbers too."""
_secrets: set[str] = set()
_SHOWN = 4
"""Messages of one kind that have a line each where they differ; then only `should_log` decides."""
_COUNTED = 8
"""Failures of one kind that are told of by their number."""


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
