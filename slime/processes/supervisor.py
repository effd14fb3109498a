"""Run a server so that it cannot outlive its owner: ``python -m slime.processes.supervisor --owner-fd N -- CMD``.

The owner holds the write end of a pipe and this process the read end. When the owner goes, however it goes, the pipe
ends and so does the server: every process of its tree, by id. The supervisor is a child subreaper, so a descendant
whose parent has died becomes the supervisor's child and cannot leave the tree by starting a session of its own.
When the supervisor itself is killed, a guard, a process that does nothing but wait for that, kills what is left: all
of the server's session, and all that has the server's mark in its environment. The guard watches the owner as well: a
supervisor that was stopped is made to go on when its owner goes, and one that does not end then is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from slime.processes import heartbeat, kernel
from slime.processes.kernel import Process, send

_MARK = "SLIME_SERVER_ID"
_OWNER_CHECK_S = 1.0
_KILL_DEADLINE_S = 10.0
_KILL_POLL_S = 0.02


def tree_of(session: int | None, mark: str) -> list[Process]:
    """What is left of a server: of its supervisor's session, with its mark, and below any of these."""
    everything = kernel.running()
    own = [p for p in everything.values() if p.session == session or kernel.is_marked(p.pid, mark)]
    found = [*own, *kernel.below([p.pid for p in own], everything.values())]
    return [process for process in dict.fromkeys(found) if process.pid not in (os.getpid(), session)]


def mapped_files(pid: int, prefix: str) -> set[str]:
    """The files whose paths start with ``prefix`` that a process has mapped; none when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {line[line.index(prefix) :] for line in lines if f" {prefix}" in line}


class Supervisor:
    """One server process and its tree."""

    def __init__(self, owner_fd: int, grace: float, scratch: str | None, heartbeats: str | None = None) -> None:
        self._owner_fd = owner_fd
        self._grace = grace
        self._scratch = scratch
        self._heartbeats = heartbeats
        self._left_over: set[str] = set()
        self._guard: int | None = None
        self._mark = os.urandom(16).hex()
        self._pid, self._owner = os.getpid(), os.getppid()
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
        kernel.adopt_orphans()
        guarded = self._start_guard()
        server = subprocess.Popen(
            command,
            env={**kernel.TITLES, **os.environ, _MARK: self._mark},
            preexec_fn=functools.partial(kernel.die_with_parent, os.getpid()),
        )
        self._server = server.pid
        while self._status is None and not self._stop_asked and not self._owner_is_dead():
            self._wait(_OWNER_CHECK_S)
            self._note_scratch()
            self._reap()
        self._note_scratch()
        self._end_tree()
        for path in self._left_over:
            Path(path).unlink(missing_ok=True)
        heartbeat.remove_directory(self._heartbeats)
        # Of what is left in spite of KILL the guard takes care, when our end closes its pipe.
        if self._guard is not None and not self._tree():
            send(self._guard, signal.SIGKILL)
            deadline = time.monotonic() + _KILL_DEADLINE_S
            while self._guard is not None and time.monotonic() < deadline:
                self._sleep_until_child_ends()
        os.close(guarded)
        server.returncode = self._status  # reaped by `_reap`; Popen must not wait for it again
        return 1 if self._status is None else self._status

    def _start_guard(self) -> int:
        """Start the guard; the descriptor whose closing, by our end at the latest, sets it going."""
        leads = os.getsid(0) == self._pid
        session, (guard_end, ours) = self._pid if leads else None, os.pipe()
        if pid := os.fork():
            self._guard = pid
            os.close(guard_end)
            return ours
        try:
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
                signal.signal(number, signal.SIG_IGN)
            for descriptor in (0, ours):
                os.close(descriptor)
            self._outlast_supervisor(guard_end)
            mark = f"{_MARK}={self._mark}"
            kernel.kill_all(lambda: tree_of(session, mark), _KILL_DEADLINE_S)
            heartbeat.remove_directory(self._heartbeats)
        finally:
            os._exit(0)

    def _outlast_supervisor(self, ended: int) -> None:
        """In the guard: return when the supervisor has ended, and see to it that it does when its owner has gone."""
        waits = [ended, self._owner_fd]
        while not select.select(waits, [], [], _OWNER_CHECK_S)[0] and not self._owner_is_dead():
            pass
        self._send_to_supervisor(signal.SIGCONT)
        # Twice its own deadline: it shall always have ended the tree by itself, unless it cannot.
        ready, _, _ = select.select([ended], [], [], self._grace + 2 * _KILL_DEADLINE_S)
        if not ready:
            self._send_to_supervisor(signal.SIGKILL)

    def _send_to_supervisor(self, number: int) -> None:
        if os.getppid() == self._pid:  # else it has ended, and its id may be another's
            send(self._pid, number)

    def _note_scratch(self) -> None:
        # While it lives, because a server that was killed can no longer be asked which of all such files is its own.
        if self._scratch is not None and not self._left_over:
            for process in self._tree():
                self._left_over |= mapped_files(process.pid, self._scratch)

    def _owner_is_dead(self) -> bool:
        # The parent is looked at as well: a process forked by the owner may have kept the pipe's other end open.
        ready, _, _ = select.select([self._owner_fd], [], [], 0)
        supervisor = kernel.with_id(self._pid)
        return bool(ready) or supervisor is None or supervisor.parent != self._owner

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
            if pid == self._guard:
                self._guard = None  # its id may be another's from now on
            if pid == self._server:
                code = os.waitstatus_to_exitcode(status)
                self._status = code if code >= 0 else 128 - code

    def _end_tree(self) -> None:
        """TERM to the server, which ends its own tree in order; after the grace period KILL to whatever is left."""
        deadline = time.monotonic() + self._grace
        if self._status is None:
            _terminate(self._server)
        while self._status is None and time.monotonic() < deadline:
            self._sleep_until_child_ends()
        for process in self._tree():
            _terminate(process.pid)
        while self._tree() and time.monotonic() < deadline:
            self._sleep_until_child_ends()
        kernel.kill_all(self._tree, _KILL_DEADLINE_S)
        self._reap()

    def _tree(self) -> list[Process]:
        """All processes that are alive below this one but for the guard, parents before children."""
        found = kernel.below([os.getpid()], kernel.running().values())
        return [process for process in found if process.pid != self._guard]

    def _sleep_until_child_ends(self) -> None:
        select.select([self._wake_read], [], [], _KILL_POLL_S)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 512)
        self._reap()


def _terminate(pid: int) -> None:
    send(pid, signal.SIGTERM)
    send(pid, signal.SIGCONT)  # one that is stopped heeds a signal only when it goes on


def main() -> int:
    """Parse the command line, supervise, and exit as the server did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--owner-fd", type=int, required=True, help="read end of the owner's pipe")
    parser.add_argument("--grace", type=float, default=10.0, help="seconds between TERM and KILL")
    parser.add_argument("--scratch", metavar="PREFIX", help="remove the server's mapped files of such paths at its end")
    parser.add_argument("--heartbeats", metavar="DIRECTORY", help="remove it at the server's end")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the server's command")
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    return Supervisor(options.owner_fd, options.grace, options.scratch, options.heartbeats).run(command)


if __name__ == "__main__":
    sys.exit(main())
