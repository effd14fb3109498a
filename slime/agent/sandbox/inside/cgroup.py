"""A control group (version 2) of a sandbox's own, where the host lets this process make one: the kernel then bounds the
memory and the number of all its processes together. Elsewhere there are the limits of each process, and a watch."""

from __future__ import annotations

import contextlib
import os

_MOUNT = "/sys/fs/cgroup"
PARENT = "SLIME_AGENT_CGROUP"
"""Names a group to make them below; unset, this process's own and its parent are tried."""


def make(name: str, memory_mb: int, processes: int, mount: str = _MOUNT, own: str | None = None) -> str | None:
    """The new group's directory; None where there can be none.

    Raises:
        OSError: `PARENT` names a group below which none can be made.
    """
    named = os.environ.get(PARENT)
    for parent in [named] if named else _candidates(mount, own):
        path = f"{parent}/{name}"
        try:
            with open(f"{parent}/cgroup.subtree_control") as file:
                if not {"memory", "pids"} <= set(file.read().split()):
                    raise PermissionError(f"{parent}/cgroup.subtree_control does not pass on memory and pids")
            os.mkdir(path)
            limits = {"memory.max": memory_mb << 20, "memory.swap.max": 0, "pids.max": processes}
            for limit, value in limits.items():
                _write(f"{path}/{limit}", value)
            return path
        except OSError as error:
            with contextlib.suppress(OSError):
                os.rmdir(path)
            if named:
                raise OSError(f"{PARENT}={named}: {error}") from error
    return None


def _write(path: str, value: int) -> None:
    try:
        with open(path, "w") as file:
            file.write(str(value))
    except FileNotFoundError:
        if not path.endswith("swap.max"):  # a host without swap accounting has none
            raise


def _candidates(mount: str, own: str | None) -> list[str]:
    """This process's group, which passes nothing on while it holds processes, and the one above it."""
    if own is None:
        try:
            with open("/proc/self/cgroup") as file:
                own = next((line[3:].strip() for line in file if line.startswith("0::")), None)
        except OSError:
            own = None
    if own is None:
        return []
    path = f"{mount}/{own.strip('/')}".rstrip("/")
    return [path, os.path.dirname(path)] if path != mount else [path]
