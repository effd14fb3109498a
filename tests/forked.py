"""A program's main function in a process that is forked from the test's: its imports are paid for once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping

_DEADLINE_S = 300


def forked(main: Callable[[], object], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """What comes of the function with these variables alone: its status, as a program's, and what it printed."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
        sys.stdout.flush()
        sys.stderr.flush()
        process = os.fork()
        if process == 0:
            _child(main, environment, out.fileno(), error.fileno())
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        texts = []
        for printed in (out, error):
            printed.seek(0)
            texts.append(printed.read().decode(errors="backslashreplace"))
    return subprocess.CompletedProcess([], status, *texts)


def _child(main: Callable[[], object], environment: Mapping[str, str], out: int, error: int) -> None:
    """Never returns."""
    status = 70
    try:
        signal.alarm(_DEADLINE_S)
        os.dup2(out, 1)
        os.dup2(error, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))
        os.environ.clear()
        os.environ.update(environment)
        status = _status_of(main)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _status_of(main: Callable[[], object]) -> int:
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0
