"""Starts a soak's run, ends it in order, and sees to it that nothing of it is left."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from slime.processes import kernel
from tools.quickstart import ROOT
from tools.soaking.processes import OverError, command_line, tail_of
from tools.soaking.watching import wait_for

_END_S = 120.0
"""More than a driver takes to end in order when it is told to."""
_LEFT_S = 60.0
"""In which the janitor and supervisors end what a driver has left."""
_SHOWN = 3000


class Running:
    """The program that starts a run, and starts it again; as a context manager it is ended with the block."""

    def __init__(
        self, command: Sequence[str], log: Path, others: Callable[[], Sequence[kernel.Process]] = tuple
    ) -> None:
        """``others`` are processes below this one that are none of the run's."""
        self._others = others
        kernel.adopt_orphans()
        self._before = set(kernel.below([os.getpid()], kernel.running().values()))
        self._log, self.left = log, list[str]()
        """Of each process that was there when it should not have been: its command."""
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        with log.open("ab") as output:
            self._launcher = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
                preexec_fn=functools.partial(kernel.die_with_parent, os.getpid()),
            )
        self.pid = self._launcher.pid

    def __enter__(self) -> Running:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._launcher.poll() is None:
            self._launcher.send_signal(signal.SIGTERM)
            if wait_for(lambda: self._launcher.poll() is not None, _END_S) is None:
                self.left.append(f"the launcher, {_END_S:g} s after SIGTERM")
        if wait_for(lambda: not self._below(), _LEFT_S, 0.2) is None:
            self.left += [f"{process.pid} {command_line(process.pid)[:150]}" for process in self._below()]
            kernel.kill_all(self._below, _LEFT_S)

    def check(self, deadline: float) -> None:
        """Raise OverError where it has ended, TimeUpError after ``deadline`` (`time.monotonic`)."""
        if (status := self._launcher.poll()) is not None:
            raise OverError(f"the run has ended with status {status}:\n{tail_of(self._log)[-_SHOWN:]}")
        if time.monotonic() > deadline:
            raise TimeUpError

    def wait(self, deadline: float, meanwhile: Callable[[], None]) -> int:
        """Its exit status; TimeUpError after ``deadline``."""
        while (status := self._launcher.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeUpError
            meanwhile()
            time.sleep(1)
        return status

    def _below(self) -> list[kernel.Process]:
        _reap(self._launcher)
        now = kernel.below([os.getpid()], kernel.running().values())
        known = {(process.pid, process.started) for process in (*self._before, *self._others())}
        return [process for process in now if (process.pid, process.started) not in known]


class TimeUpError(Exception):
    """The shard's time is over."""


def _reap(child: subprocess.Popen[bytes]) -> None:
    """Take the statuses of orphans that this process has adopted, not that of its own child."""
    child.poll()
    for process in Path("/proc/self/task").glob("*/children"):
        for pid in process.read_text().split():
            if int(pid) != child.pid and kernel.with_id(int(pid)) is None:
                try:
                    os.waitpid(int(pid), os.WNOHANG)
                except ChildProcessError:
                    continue
