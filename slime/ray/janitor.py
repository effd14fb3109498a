"""Ends what a killed driver leaves on its host: ``python -m slime.ray.janitor OWNER_FD OWNER_PID MARK GRACE SPARED``.

A local Ray's processes end with their driver, all but the two agents of its node: these keep looking for the head for
about a minute. And where Ray itself is broken, nobody is left who would end workers, or what these have started. The
janitor learns of the driver's end by the pipe whose other end the driver holds. It knows the tree below the driver, and
finds what has left that by the run's mark in its environment; never by name. What ran below the driver before the run
began is its user's: a script that ends in ``exec python train.py`` leaves the driver everything that it had started.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping

from slime.processes import kernel
from slime.processes.kernel import RUN_MARK, TITLES, Process

MEMORY = "/dev/shm"
"""A file system in this host's memory."""
_LOOK_S = 2.0
_GRACE_S = 10.0
_KILL_S = 10.0
_POLL_S = 0.2


def memory_directory(mark: str) -> str:
    """What a run may keep in this host's memory, by the value of its mark; the janitor removes it at the run's end."""
    return f"{MEMORY}/slime-{mark}"


def start(grace: float = _GRACE_S) -> int:
    """Mark this process's later children, and start a janitor that leaves them ``grace`` seconds; for `dismiss`."""
    environment = dict(os.environ)
    before = _began(kernel.below([os.getpid()], kernel.running().values()))
    spared = ",".join(f"{pid}:{started}" for pid, started in before.items())
    mark = secrets.token_hex(8)
    os.environ |= {**{name: os.environ.get(name, value) for name, value in TITLES.items()}, RUN_MARK: mark}
    janitor_end, owner_end = os.pipe()
    words = (str(janitor_end), str(os.getpid()), f"{RUN_MARK}={mark}", str(grace), spared)
    command = [sys.executable, "-m", "slime.ray.janitor", *words]
    # It has the output of nobody: who reads the driver's to its end, such as a `tee`, would wait for the janitor.
    nothing = subprocess.DEVNULL
    subprocess.Popen(
        command,
        pass_fds=(janitor_end,),
        stdin=nothing,
        stdout=nothing,
        stderr=nothing,
        start_new_session=True,
        env=environment,
    )
    os.close(janitor_end)
    return owner_end


def dismiss(owner_end: int, *, ended_well: bool) -> None:
    """End the janitor: there is nothing left to do for it, or where the run did not end well, what is left."""
    try:
        if ended_well:
            with contextlib.suppress(BrokenPipeError):  # it was killed
                os.write(owner_end, b"done")
    finally:
        os.close(owner_end)


class Tree:
    """The processes of a run, as often as they are looked for."""

    def __init__(self, owner: int, mark: str, spared: Mapping[int, int]) -> None:
        """``mark`` is NAME=VALUE in the environment of the run's processes, ``spared`` when each of those began, by its
        id, that are not the run's, with what they start, unless marked."""
        self._owner, self._mark, self._spared = owner, mark, dict(spared)
        self._known: dict[int, int] = {}

    def look(self) -> list[Process]:
        """What runs below the owner, has its mark or was found earlier; but for this process."""
        everything = kernel.running()
        spared = _still(self._spared, everything)
        spared += kernel.below([process.pid for process in spared], everything.values())
        marked = [process for process in everything.values() if kernel.is_marked(process.pid, self._mark)]
        found = set(kernel.below([self._owner], everything.values())) - set(spared)
        found |= {*marked, *_still(self._known, everything)}
        # What has lost its parent since is told by its id.
        self._spared, self._known = _began(set(spared) - set(marked)), _began(found)
        return [process for process in found if process.pid not in (os.getpid(), self._owner)]


def _began(several: Iterable[Process]) -> dict[int, int]:
    return {process.pid: process.started for process in several}


def _still(began: Mapping[int, int], everything: Mapping[int, Process]) -> list[Process]:
    """Those that run; another process that has got the id of one began later."""
    return [everything[pid] for pid in began.keys() & everything.keys() if everything[pid].started == began[pid]]


def main() -> None:
    """Wait for the owner's end, give its processes time to end, and kill those of them that are left."""
    # One that is sent to every process of a job must not end this one first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    owner_fd, owner, mark, grace = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    spared = [pair.split(":") for pair in sys.argv[5].split(",") if pair]
    tree = Tree(owner, mark, {int(pid): int(started) for pid, started in spared})
    # The parent is looked at as well: a process forked by the owner may have kept the pipe's other end open.
    while not (told := select.select([owner_fd], [], [], _LOOK_S)[0]) and os.getppid() == owner:
        tree.look()
    if told and os.read(owner_fd, 1):
        _forget(sys.argv[3])
        return
    deadline = time.monotonic() + grace
    while tree.look() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    kernel.kill_all(tree.look, _KILL_S)
    _forget(sys.argv[3])  # last: nobody writes there any longer


def _forget(mark: str) -> None:
    shutil.rmtree(memory_directory(mark.partition("=")[2]), ignore_errors=True)


if __name__ == "__main__":
    main()
