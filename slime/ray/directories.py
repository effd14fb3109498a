"""Where a local Ray writes, and whether it can."""

from __future__ import annotations

import os

from slime.files.storage import why_no_directory
from slime.ray.supervision import InputError

_SOCKET_BYTES = 107
"""The longest path of a Unix socket on Linux."""
_RAYS_SHARE = "/ray/session_2025-01-01_00-00-00_000000_{pid}/sockets/plasma_store"
"""What Ray adds to its temporary directory."""


def check_places() -> None:
    """Raise InputError, with what to set, where HOME or the temporary directory does not do for a local Ray."""
    variable, temporary = temporary_directory()
    given = f"{variable}={temporary}"
    path, added = os.path.abspath(temporary), len(_RAYS_SHARE.format(pid=os.getpid()))
    if (length := len(os.fsencode(path)) + added) > _SOCKET_BYTES:
        raise InputError(
            f"{given}: Ray's sockets there would have paths of {length} bytes, and the kernel takes {_SOCKET_BYTES}: "
            f"set RAY_TMPDIR to a directory whose path has at most {_SOCKET_BYTES - added}, such as /tmp"
        )
    if why := why_no_directory(path):
        raise InputError(f"{given}: Ray's sessions are written there, and {why}: set RAY_TMPDIR to another directory")
    home = os.path.expanduser("~")
    if why := why_no_directory(home):
        raise InputError(
            f"HOME={home}: Ray keeps its token there, and {why}: set HOME to a directory that can be written to"
        )


def temporary_directory() -> tuple[str, str]:
    """The variable that says where a local Ray has its sessions, and the directory."""
    for variable in ("RAY_TMPDIR", "TMPDIR"):
        if variable in os.environ:
            return variable, os.environ[variable]
    return "RAY_TMPDIR", "/tmp"
