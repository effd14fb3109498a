"""Processes of this host as the kernel shows them: by parent, session, start time, and marks in their environment.

Imports the standard library only, so that a process can be told to die with its parent before it does anything else.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

RUN_MARK = "SLIME_RUN_ID"
"""In the environment of every process that a run starts; its value belongs to one run alone."""
TITLES = {"SPT_NOENV": "1"}
"""Has a process that sets its own title leave its environment readable, marks among it (package setproctitle)."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LISTENS = "0A"
"""The state of a socket in the kernel's tables."""
_POLL_S = 0.05
_libc = ctypes.CDLL(None, use_errno=True)


class Process(NamedTuple):
    """A process that runs; zombies are none."""

    pid: int
    parent: int
    session: int
    started: int
    """In ticks since the host's start: another process that got the same id has another."""


def running() -> dict[int, Process]:
    """All processes, by id."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return {process.pid: process for process in map(with_id, pids) if process is not None}


def with_id(pid: int) -> Process | None:
    """The process of that id; None when none of that id runs."""
    try:
        # The name, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return None if fields[0] in "ZX" else Process(pid, int(fields[1]), int(fields[3]), int(fields[19]))


def below(ancestors: Iterable[int], processes: Iterable[Process]) -> list[Process]:
    """Those of ``processes`` that descend from any of ``ancestors``, parents before children."""
    children: dict[int, list[Process]] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process)
    found = [child for pid in ancestors for child in children.get(pid, [])]
    for process in found:
        found += children.get(process.pid, [])  # the list grows while it is walked: breadth first
    return found


def is_marked(pid: int, mark: str) -> bool:
    """Whether ``mark``, NAME=VALUE, was in a process's environment when its program began."""
    try:
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it ended, or is somebody else's
        return False


def listens(pid: int, port: int) -> bool:
    """Whether a process, or one below it, listens at a TCP port of this host."""
    of_port = f":{port:04X}"
    sockets = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            rows = [line.split() for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]
            sockets |= {f"socket:[{row[9]}]" for row in rows if row[1].endswith(of_port) and row[3] == _LISTENS}
    for each in (pid, *(process.pid for process in below([pid], running().values()))):
        with contextlib.suppress(OSError):  # it has ended
            for descriptor in Path(f"/proc/{each}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(descriptor) in sockets:
                        return True
    return False


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent's thread that started it ends; now, if ``parent`` has gone."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of each descendant whose own parent ends, in place of the host's first process."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_all(find: Callable[[], Iterable[Process]], seconds: float) -> None:
    """KILL what ``find`` gives until it gives nothing, for ``seconds`` at most."""
    deadline = time.monotonic() + seconds
    while (left := list(find())) and time.monotonic() < deadline:
        for process in left:
            send(process.pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def end_child(child: subprocess.Popen[Any], seconds: float) -> None:
    """KILL a child and close its pipes. One that has not ended within ``seconds``, as it hangs in the kernel, in a file
    system that does not answer for one, or is held by a debugger, is warned of, and waited for no more."""
    child.kill()
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        logger.warning("process %d was killed and has not ended within %g s: it is left behind", child.pid, seconds)
        return
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):  # of what was not sent yet
                pipe.close()


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
