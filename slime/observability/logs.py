"""What a process logs, in a file of its own: ``logs/<role>.log`` of the run's directory."""

from __future__ import annotations

import argparse
import logging
import os
import socket
from collections.abc import Iterable
from pathlib import Path

from slime.observability.lines import LineFile
from slime.utils.redaction import is_secret, redacted_line

FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"
_secrets: set[str] = set()


def begin(args: argparse.Namespace, role: str) -> None:
    """Write what this process, ``role``, logs from now on, INFO and above; standard error gets WARNING and above."""
    root = logging.root
    shown = [each for each in root.handlers if not isinstance(each, _LogFile)]
    for handler in shown:
        handler.setLevel(max(handler.level, logging.WARNING))
    root.handlers = [
        *(shown or filter(None, [logging.lastResort])),
        _LogFile(Path(args.run_dir, "logs", f"{role}.log")),
    ]
    root.setLevel(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # of users' code: a line a request
    known = os.environ | vars(args) | (getattr(args, "train_env_vars", None) or {})
    hide(str(value) for name, value in known.items() if is_secret(name, value))
    logging.getLogger(__name__).info("%s: process %d on %s", role, os.getpid(), socket.gethostname())


def hide(secrets: Iterable[str | None]) -> None:
    """Strike these out of every line from now on, beside what looks like a key."""
    _secrets.update(filter(None, secrets))


class _LogFile(logging.Handler):
    def __init__(self, path: Path) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter(FORMAT))
        self._lines = LineFile(path)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.try_to_append(lambda: f"{redacted_line(self.format(record), _secrets)}\n")
