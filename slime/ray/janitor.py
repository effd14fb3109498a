"""Ends what a killed driver leaves of its local Ray: ``python -m slime.ray.janitor OWNER_FD OWNER_PID``.

Ray's processes end with their driver, all but the two agents of its node: these keep looking for the head for about a
minute. The janitor learns of the driver's end by the pipe whose other end the driver holds.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys

import psutil

_LOOK_S = 2.0
_GRACE_S = 10.0


def start() -> int:
    """Start a janitor for this process; the descriptor to give to `dismiss` when everything has ended in order."""
    janitor_end, owner_end = os.pipe()
    command = [sys.executable, "-m", "slime.ray.janitor", str(janitor_end), str(os.getpid())]
    subprocess.Popen(command, pass_fds=(janitor_end,), stdin=subprocess.DEVNULL, start_new_session=True)
    os.close(janitor_end)
    return owner_end


def dismiss(owner_end: int) -> None:
    """End the janitor: there is nothing left to do for it."""
    os.write(owner_end, b"done")
    os.close(owner_end)


def ray_processes(owner: int) -> list[psutil.Process]:
    """The daemons that ``owner`` started, and the workers and agents of its raylet."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(owner).children():
            if child.pid != os.getpid():
                found.append(child)
                with contextlib.suppress(psutil.NoSuchProcess):
                    found += child.children()
    return found


def main() -> None:
    """Wait for the owner's end, give its processes time to end, and kill those of them that are left."""
    # One that is sent to every process of a job must not end this one first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    owner_fd, owner = int(sys.argv[1]), int(sys.argv[2])
    known = ray_processes(owner)
    while not select.select([owner_fd], [], [], _LOOK_S)[0]:
        known = ray_processes(owner) or known
    if os.read(owner_fd, 1):
        return
    # psutil compares start times: a process that took over the id of one of these is not touched.
    _, left = psutil.wait_procs(known, timeout=_GRACE_S)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    main()
