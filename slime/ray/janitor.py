"""Ends what a killed driver leaves on its host: ``python -m slime.ray.janitor OWNER_FD OWNER_PID MARK GRACE``.

A local Ray's processes end with their driver, all but the two agents of its node: these keep looking for the head for
about a minute. And where Ray itself is broken, nobody is left who would end workers, or what these have started. The
janitor learns of the driver's end by the pipe whose other end the driver holds. It knows the tree below the driver, and
finds what has left that by the run's mark in its environment; never by name.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
import time

from slime.utils import processes
from slime.utils.processes import RUN_MARK, TITLES, Process

_LOOK_S = 2.0
_GRACE_S = 10.0
_KILL_S = 10.0
_POLL_S = 0.2


def start(grace: float = _GRACE_S) -> int:
    """Mark this process's later children, and start a janitor for it.

    Args:
        grace: seconds that these have to end by themselves when this process has gone.

    Returns:
        The descriptor to give to `dismiss`.
    """
    environment = dict(os.environ)
    mark = secrets.token_hex(8)
    os.environ |= {**{name: os.environ.get(name, value) for name, value in TITLES.items()}, RUN_MARK: mark}
    janitor_end, owner_end = os.pipe()
    words = (str(janitor_end), str(os.getpid()), f"{RUN_MARK}={mark}", str(grace))
    command = [sys.executable, "-m", "slime.ray.janitor", *words]
    subprocess.Popen(
        command, pass_fds=(janitor_end,), stdin=subprocess.DEVNULL, start_new_session=True, env=environment
    )
    os.close(janitor_end)
    return owner_end


def dismiss(owner_end: int, *, ended_well: bool) -> None:
    """End the janitor: there is nothing left to do for it, or where the run did not end well, what is left."""
    if ended_well:
        os.write(owner_end, b"done")
    os.close(owner_end)


def tree_of(owner: int, mark: str, known: dict[int, Process]) -> dict[int, Process]:
    """What runs below ``owner``, has its mark or was ``known`` to, by id; but for this process."""
    everything = processes.running()
    found = processes.below([owner], everything.values())
    found += [process for process in everything.values() if processes.is_marked(process.pid, mark)]
    found += [known[pid] for pid in known.keys() & everything.keys() if everything[pid].started == known[pid].started]
    return {process.pid: process for process in found if process.pid not in (os.getpid(), owner)}


def main() -> None:
    """Wait for the owner's end, give its processes time to end, and kill those of them that are left."""
    # One that is sent to every process of a job must not end this one first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    owner_fd, owner, mark, grace = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    known: dict[int, Process] = {}
    # The parent is looked at as well: a process forked by the owner may have kept the pipe's other end open.
    while not (told := select.select([owner_fd], [], [], _LOOK_S)[0]) and os.getppid() == owner:
        known = tree_of(owner, mark, known)
    if told and os.read(owner_fd, 1):
        return
    deadline = time.monotonic() + grace
    while (known := tree_of(owner, mark, known)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    processes.kill_all(lambda: tree_of(owner, mark, known).values(), _KILL_S)


if __name__ == "__main__":
    main()
