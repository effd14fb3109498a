"""Who is who among the processes of a run: those below the program that starts it, by what the run's own logs say."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterable
from pathlib import Path

from slime.processes import kernel
from slime.processes.kernel import Process

_SERVER = re.compile(r"Started server process \[(\d+)\]")
_OWN = re.compile(r": process (\d+) on ")
_ROUTER = ("slime.processes.supervisor", "slime.backends.sglang.launch_router")
_ADDRESS = re.compile(r" --host (\S+) --port (\d+) ")
_DRIVER = "train.py"
_LOG_END = 1 << 20


class OverError(Exception):
    """The run has ended, or stands still, as the message says."""


class Run:
    """The processes below ``launcher``, of the run whose directory is ``run_dir``; None where one is not there now."""

    def __init__(self, launcher: int, run_dir: Path, seed: int = 0) -> None:
        """``seed`` is of ``--seed``: that of an engine is larger by its rank."""
        self._launcher, self._logs, self._seed = launcher, run_dir / "logs", seed

    def all(self) -> list[Process]:
        """Every process of the run, wherever it was re-parented below the launcher."""
        return kernel.below([self._launcher], kernel.running().values())

    def driver(self) -> Process | None:
        """The program that the launcher has started."""
        own = [process for process in self.all() if process.parent == self._launcher]
        return next((process for process in own if _has(process.pid, (_DRIVER,))), None)

    def of_log(self, role: str) -> Process | None:
        """The process that last began to write this log, "trainer_1" or "rollout_manager"."""
        return self._living(_OWN, role)

    def server(self, engine: str) -> Process | None:
        """The server of an engine, "engine 0", which answers requests."""
        return self._living(_SERVER, engine.replace(" ", "_"))

    def newer_server(self, engine: str, than: Process) -> Process | None:
        """The server that an engine is starting in the place of ``than``, which need not answer yet."""
        words = ("slime.backends.sglang.launch ", f" --random-seed {self._seed + int(engine.split()[1])} ")
        newer = [process for process in self.all() if process.started > than.started and _has(process.pid, words)]
        return next((each for each in newer if not _has(each.pid, ("slime.processes.supervisor",))), None)

    def scheduler(self, engine: str) -> Process | None:
        """What generates, below an engine's server."""
        server = self.server(engine)
        below = [] if server is None else kernel.below([server.pid], kernel.running().values())
        return next((process for process in below if _has(process.pid, ("scheduler",))), None)

    def router(self) -> Process | None:
        """The router, which calls itself something else: below its supervisor, beside the guard of that."""
        everything = self.all()
        owners = {process.pid for process in everything if _has(process.pid, _ROUTER)}
        own = [process for process in everything if process.parent in owners and process.pid not in owners]
        return own[0] if own else None

    def router_address(self) -> tuple[str, int] | None:
        """Where the router listens, which the command line of its supervisor says."""
        for process in self.all():
            line = command_line(process.pid)
            if all(word in line for word in _ROUTER) and (found := _ADDRESS.search(line)):
                return found[1], int(found[2])
        return None

    def _living(self, pattern: re.Pattern[str], role: str) -> Process | None:
        """The process that a log names last, if it runs, and below the launcher."""
        pids = pattern.findall(tail_of(self._logs / f"{role}.log"))
        return next((process for process in self.all() if pids and process.pid == int(pids[-1])), None)


def command_line(pid: int) -> str:
    """The words of a process's command, with a space between them; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _has(pid: int, words: Iterable[str]) -> bool:
    line = command_line(pid)
    return all(word in line for word in words)


def tail_of(path: Path) -> str:
    """The end of a log; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_END))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def strike(process: Process, number: int) -> bool:
    """Send a signal to this process, and to no other that has got its id since; whether it was there."""
    now = kernel.with_id(process.pid)
    if now is None or now.started != process.started:
        return False
    kernel.send(process.pid, number)
    return True


def limit_files(process: Process, size: int | None) -> bool:
    """Keep a process from writing files beyond ``size`` bytes, as a quota would, or (None) as far as it might before;
    whether it was there."""
    now = kernel.with_id(process.pid)
    if now is None or now.started != process.started:
        return False
    _, most = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most if size is None else size, most))
    return True
