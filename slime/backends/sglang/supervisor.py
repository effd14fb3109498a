"""Run a server so that it cannot outlive its owner: ``python -m slime.backends.sglang.supervisor --owner-fd N -- CMD``.

The owner holds the write end of a pipe and this process the read end. When the owner goes, however it goes, the pipe
ends and so does the server: every process of its tree, by id. The supervisor is a child subreaper, so a descendant
whose parent has died becomes the supervisor's child and cannot leave the tree by starting a session of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_OWNER_CHECK_S = 1.0
_KILL_DEADLINE_S = 10.0
_KILL_POLL_S = 0.02

_libc = ctypes.CDLL(None, use_errno=True)


def descendants() -> list[int]:
    """The ids of all living processes below this one, parents before children; zombies are not counted."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
        except OSError:
            continue  # the process ended between the listing and the reading
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(entry.name))
    found = children.get(os.getpid(), [])
    for pid in found:
        found += children.get(pid, [])  # the list grows while it is walked: breadth first
    return found


def mapped_files(pid: int, prefix: str) -> set[str]:
    """The files whose paths start with ``prefix`` that a process has mapped; none when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {line[line.index(prefix) :] for line in lines if f" {prefix}" in line}


class Supervisor:
    """One server process and its tree."""

    def __init__(self, owner_fd: int, grace: float, scratch: str | None) -> None:
        self._owner_fd = owner_fd
        self._grace = grace
        self._scratch = scratch
        self._left_over: set[str] = set()
        self._owner = os.getppid()
        self._stop_asked = False
        self._status: int | None = None
        self._wake_read, wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._ask_stop)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # a handler, so that it writes to the wake-up pipe

    def _ask_stop(self, number: int, frame: FrameType | None) -> None:
        self._stop_asked = True

    def run(self, command: list[str]) -> int:
        """Run ``command`` until it ends or its owner does; its exit status, 128 + n if signal n ended it."""
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        server = subprocess.Popen(command, preexec_fn=_die_with_parent)
        self._server = server.pid
        while self._status is None and not self._stop_asked and not self._owner_is_gone():
            self._wait(_OWNER_CHECK_S)
            self._note_scratch()
            self._reap()
        self._note_scratch()
        self._end_tree()
        for path in self._left_over:
            Path(path).unlink(missing_ok=True)
        server.returncode = self._status  # reaped by `_reap`; Popen must not wait for it again
        return 1 if self._status is None else self._status

    def _note_scratch(self) -> None:
        # While it lives, because a server that was killed can no longer be asked which of all such files is its own.
        if self._scratch is not None and not self._left_over:
            for pid in descendants():
                self._left_over |= mapped_files(pid, self._scratch)

    def _owner_is_gone(self) -> bool:
        # The parent is looked at as well: a process forked by the owner may have kept the pipe's other end open.
        ready, _, _ = select.select([self._owner_fd], [], [], 0)
        return bool(ready) or os.getppid() != self._owner

    def _wait(self, seconds: float) -> None:
        ready, _, _ = select.select([self._owner_fd, self._wake_read], [], [], seconds)
        if self._wake_read in ready:
            os.read(self._wake_read, 512)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._server:
                code = os.waitstatus_to_exitcode(status)
                self._status = code if code >= 0 else 128 - code

    def _end_tree(self) -> None:
        """TERM to the server, which ends its own tree in order; after the grace period KILL to whatever is left."""
        deadline = time.monotonic() + self._grace
        if self._status is None:
            _signal(self._server, signal.SIGTERM)
        while self._status is None and time.monotonic() < deadline:
            self._sleep_until_child_ends()
        for pid in descendants():
            _signal(pid, signal.SIGTERM)
        while descendants() and time.monotonic() < deadline:
            self._sleep_until_child_ends()
        deadline = time.monotonic() + _KILL_DEADLINE_S
        while (left := descendants()) and time.monotonic() < deadline:
            for pid in left:
                _signal(pid, signal.SIGKILL)
            self._sleep_until_child_ends()
        self._reap()

    def _sleep_until_child_ends(self) -> None:
        select.select([self._wake_read], [], [], _KILL_POLL_S)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 512)
        self._reap()


def _die_with_parent() -> None:
    # Only for a supervisor that is itself killed: SGLang's own children die with the server in the same way.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def main() -> int:
    """Parse the command line, supervise, and exit as the server did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--owner-fd", type=int, required=True, help="read end of the owner's pipe")
    parser.add_argument("--grace", type=float, default=10.0, help="seconds between TERM and KILL")
    parser.add_argument("--scratch", metavar="PREFIX", help="remove the server's mapped files of such paths at its end")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the server's command")
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    return Supervisor(options.owner_fd, options.grace, options.scratch).run(command)


if __name__ == "__main__":
    sys.exit(main())
