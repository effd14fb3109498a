"""What a process logs, in a file of its own: ``logs/<role>.log`` of the run's directory."""

from __future__ import annotations

import argparse
import logging
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slime.observability.lines import LineFile
from slime.utils.redaction import is_secret, redacted_line

FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"
_SHORTEST = 8
"""Characters of what is struck out wherever it stands: a shorter one would be so in words and numbers too."""
_secrets: set[str] = set()


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
    logging.getLogger(__name__).info("%s: process %d on %s", role, os.getpid(), socket.gethostname())


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
    logger = logging.getLogger(record.name)
    while logger.level == logging.NOTSET and logger.parent is not None:
        logger = logger.parent
    return record.levelno >= (logging.WARNING if logger is logging.root else logger.level)


class _LogFile(logging.Handler):
    def __init__(self, path: Path) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter(FORMAT))
        self._lines = LineFile(path, turns=True)

    def emit(self, record: logging.LogRecord) -> None:
        longest_first = sorted(_secrets, key=len, reverse=True)  # one may begin with another
        self._lines.try_to_append(lambda: f"{redacted_line(self.format(record), longest_first)}\n")
