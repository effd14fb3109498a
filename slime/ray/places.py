"""Where a local Ray and the libraries below it write besides the run's own directories, looked at before they start."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from slime.ray.supervision import InputError
from slime.utils.storage import amount, nearest_directory, why_no_directory

_SOCKET_BYTES = 107
"""The longest path of a Unix socket on Linux."""
_RAYS_SHARE = "/ray/session_2025-01-01_00-00-00_000000_{pid}/sockets/plasma_store"
"""What Ray adds to its temporary directory."""
_ROOM = 1 << 30
_SPILLS_BELOW = 0.05
"""Ray refuses objects that its memory has no room for when less than this share of the disk is free."""
_CACHES = ("XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "MPLCONFIGDIR")
"""Variables by which users send the caches of libraries elsewhere than to HOME. A run may do without: a hub's cache
that many share can often only be read, and other libraries then take a temporary directory."""


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


def place_warnings() -> list[str]:
    """What is short on this host and might end a run later, and what may cost it time or a library of the user's."""
    _, temporary = temporary_directory()
    directory = nearest_directory(Path(temporary).absolute())
    usage = shutil.disk_usage(directory)
    warnings = [
        f"{name}={own}: a library has its cache there, and {why}: what it would keep there is made again or missing"
        for name in _CACHES
        if (own := os.environ.get(name)) and (why := why_no_directory(own))
    ]
    if usage.free < _ROOM or usage.free < _SPILLS_BELOW * usage.total:
        warnings.append(
            f"{amount(usage.free)} of {amount(usage.total)} are free in {directory}, where Ray writes its logs, and, "
            "while more than 5 % of the disk are free, what its memory has no room for: set RAY_TMPDIR to another "
            "directory"
        )
    return warnings


def temporary_directory() -> tuple[str, str]:
    """The variable that says where a local Ray has its sessions, and the directory."""
    for variable in ("RAY_TMPDIR", "TMPDIR"):
        if variable in os.environ:
            return variable, os.environ[variable]
    return "RAY_TMPDIR", "/tmp"
