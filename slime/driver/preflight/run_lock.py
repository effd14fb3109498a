"""One run a directory: a lock that the kernel lets go of when the driver ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from slime.files.storage import why_not_written
from slime.ray.supervision import InputError

_NAME = "run.lock"
_LONGEST = 1000


def acquire_run_lock(directory: str | Path, flag: str) -> int:
    """Make the directory that ``flag`` names, and keep other runs from it until the returned descriptor is closed.

    On a file system without locks it keeps nobody.

    Raises:
        InputError: another run has it, which; or nothing can be written there.
    """
    path = Path(directory, _NAME)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        why = why_not_written(error, flag, directory) or f"{flag} {directory}: {error}"
        raise InputError(f"the lock of a run, {_NAME}, cannot be made: {why}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, _LONGEST, 0).decode().strip()
        os.close(lock)
        raise InputError(
            f"{flag} {directory}: another run, {holder}, writes there: wait for its end, or name another --run-dir and "
            "--save"
        ) from None
    except OSError:
        return lock
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return lock
