"""Dry runs of many command lines, each in a process that is forked from one which has imported everything.

An import takes seconds, a dry run a fraction of one. A dry run is good if it says that the run can start, or ends with
exit status 2 and one line that says why not; a traceback, another status, a signal or no end is a fault. Of a user's
own data source the error may go on with the traceback of what that raised.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import re
import resource
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from slime.driver.process import run_driver
from slime.entry.arguments import parse_args

OK, REFUSED = "ok", "refused"
_ERROR = re.compile(r"^train(?:_async)?\.py: error: (.*)\Z", re.MULTILINE)
_OF_THEIRS = re.compile(
    r"^train(?:_async)?\.py: error: (load data: --data-source-path (?!slime\.)\S+ (?:raised|called) .*)", re.MULTILINE
)
_MEMORY = 3 * 2**30
"""Bytes that a dry run may take besides what its parent has: no value of a flag is a reason for more."""
_LONGEST_LINE = 4000
"""Characters of an error: what a user wrote is quoted, not repeated in full."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one command line.

    ``kind`` is `OK`, `REFUSED`, or the fault in a few words. ``text`` is the error's line, or all that was printed.
    """

    kind: str
    text: str

    @property
    def is_fault(self) -> bool:
        """Whether slime, and not the command line, is to blame."""
        return self.kind not in (OK, REFUSED)


def dry_run(words: Sequence[str], directory: str | Path, *, asynchronous: bool = False, deadline: int = 30) -> Outcome:
    """Check one command line as ``train.py --dry-run`` does, in a process of its own.

    Args:
        words: the command line; ``--dry-run`` is added.
        directory: the working directory.
        asynchronous: whether they are train_async.py's.
        deadline: seconds after which it hangs.
    """
    with tempfile.TemporaryFile() as printed:
        sys.stdout.flush()
        sys.stderr.flush()
        process = os.fork()
        if process == 0:
            _child(words, directory, asynchronous, deadline, printed.fileno())
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        printed.seek(0)
        text = printed.read().decode(errors="backslashreplace")
    return _judged(status, text, deadline)


def _child(words: Sequence[str], directory: str | Path, asynchronous: bool, deadline: int, output: int) -> None:
    """The forked process: never returns."""
    status = 70
    gc.disable()  # a collection would touch, and so copy, every page that is shared with the parent
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends it within C code, too
        signal.alarm(deadline)
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (_own_data() + _MEMORY, most))
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
        os.chdir(directory)
        status = _driver(["train_async.py" if asynchronous else "train.py", "--dry-run", *words], asynchronous)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status)


def _own_data() -> int:
    """Bytes of data that this process has."""
    found = re.search(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 2**40


def _driver(argv: list[str], asynchronous: bool) -> int:
    """What train.py does, and its exit status."""
    sys.argv = argv
    try:
        run_driver(lambda args: None, parse_args(asynchronous=asynchronous))
        sys.stdout.flush()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _judged(status: int, text: str, deadline: int) -> Outcome:
    if status == -signal.SIGALRM:
        return Outcome(f"no end after {deadline} s", text)
    if status == 1 and (theirs := _OF_THEIRS.search(text)):
        return Outcome(REFUSED, theirs[1])
    if "Traceback (most recent call last)" in text:
        return Outcome(f"traceback: {text.strip().splitlines()[-1][:150]}", text)
    if status == 0:
        return (
            Outcome(OK, text)
            if re.search(r"^ok: the run can start|: nothing is left ", text, re.M)
            else Outcome("status 0 without a word", text)
        )
    if status != 2:
        return Outcome(f"status {status}", text)
    error = _ERROR.search(text.rstrip("\n"))
    if error is None or "\n" in error[1]:
        return Outcome("not one line of error at the end", text)
    if len(error[1]) > _LONGEST_LINE:
        return Outcome(f"an error of {len(error[1])} characters", text)
    return Outcome(REFUSED, error[1])
