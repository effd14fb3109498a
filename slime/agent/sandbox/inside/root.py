"""The files that programs in a jail see: the host's programs, read-only, and an empty rest of bounded size."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable

from . import confine

AGENT = 1000
_FILES_PER_MB = 64
_DEVICES = ("null", "zero", "full", "random", "urandom")
_OF_THE_HOST = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/usr")
_OF_ETC = (
    "alternatives",
    "ssl/certs",
    "ssl/openssl.cnf",
    "ca-certificates",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
)
"""What programs of the host look for in /etc and what is no secret."""


def open_sources(read_only: Iterable[str]) -> dict[str, int]:
    """What of the host is to be seen, each as a descriptor: the way to it may be open only to the user of now.

    Raises:
        OSError: a path of ``read_only`` is missing.
    """
    places = [place for place in _OF_THE_HOST if os.path.isdir(place) and not os.path.islink(place)]
    places += filter(os.path.exists, (f"/etc/{name}" for name in _OF_ETC))
    places += (place for place in (sys.base_prefix, *read_only) if not f"{place}/".startswith("/usr/"))
    return {place: os.open(place, os.O_PATH) for place in dict.fromkeys(places)}


def make(root: str, disk_mb: int, sources: dict[str, int], single_user: bool, names: dict[str, str]) -> None:
    """Mount it at ``root``; ``names`` are hosts and their addresses. Closes the sources.

    Raises:
        OSError: the host does not permit it.
    """
    confine.mount_tmpfs(root, disk_mb, _FILES_PER_MB * disk_mb)
    for place in filter(os.path.islink, _OF_THE_HOST):
        os.symlink(os.readlink(place), root + place)
    for place, descriptor in sources.items():
        _show(descriptor, root + place)
        os.close(descriptor)
    _make_directories(root, single_user)
    _make_etc(root, single_user, names)
    _make_devices(root)


def enter(root: str) -> bool:
    """Make it this process's root; whether programs will see processes there. The caller is in its process namespace.

    The old root is unmounted: nothing of the host is left to be reached by a descriptor or a way up.
    """
    try:
        confine.call("mount", b"proc", f"{root}/proc".encode(), b"proc", confine.NOSUID | confine.NODEV, None)
        has_proc = True
    except OSError:  # in containers that hide parts of /proc the kernel refuses a whole one
        has_proc = False
    os.chdir(root)
    confine.pivot_here()
    os.chdir("/")
    return has_proc


def _show(source: int, place: str) -> None:
    if stat.S_ISDIR(os.fstat(source).st_mode):
        os.makedirs(place, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "w"):
            pass
    confine.bind(f"/proc/self/fd/{source}", place)


def _make_directories(root: str, single_user: bool) -> None:
    # Root's own may hold the way to an interpreter.
    modes = {"/root": 0o711, "/home/agent": 0o755, "/workspace": 0o755, "/opt/agent/bin": 0o755, "/run": 0o755}
    modes |= {"/tmp": 0o1777, "/var/tmp": 0o1777, "/var/lib": 0o755, "/dev/shm": 0o1777, "/proc": 0o555}
    for place, mode in modes.items():
        os.makedirs(root + place, exist_ok=True)
        os.chmod(root + place, mode)
    if not single_user:
        for place in ("/home/agent", "/workspace", "/opt/agent", "/opt/agent/bin"):
            os.chown(root + place, AGENT, AGENT)


def _make_etc(root: str, single_user: bool, names: dict[str, str]) -> None:
    agent = 0 if single_user else AGENT
    hosts = "".join(f"{address}\t{name}\n" for name, address in {"localhost": "127.0.0.1", **names}.items())
    files = {
        "passwd": f"root:x:0:0:root:/root:/bin/bash\nagent:x:{agent}:{agent}::/home/agent:/bin/bash\n",
        "group": f"root:x:0:\nagent:x:{agent}:\n",
        "hosts": hosts,
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
        "resolv.conf": "",
        "hostname": "sandbox\n",
    }
    os.makedirs(f"{root}/etc", exist_ok=True)
    for name, content in files.items():
        with open(f"{root}/etc/{name}", "w") as file:
            file.write(content)


def _make_devices(root: str) -> None:
    for name in _DEVICES:
        with open(f"{root}/dev/{name}", "w"):
            pass
        confine.bind(f"/dev/{name}", f"{root}/dev/{name}", read_only=False)
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"{root}/dev/{name}")
