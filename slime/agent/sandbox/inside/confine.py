"""What locks a process in: namespaces, mounts, identities, limits and the filter of system calls.

Imports the standard library only: it runs in processes started as ``python -I -S``, before any code of others.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import struct
from collections.abc import Iterable
from typing import Any

NOBODY = 65534
NEW_NS, NEW_UTS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
NOSUID, NODEV, _BIND, _RECURSIVE, _PRIVATE = 2, 4, 0x1000, 0x4000, 0x40000
_LIBC = ctypes.CDLL(None, use_errno=True)
_DETACH = 2
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY, _ATTR_NOSUID = 442, -100, 0x8000, 1, 2
_PDEATHSIG, _DUMPABLE, _NO_NEW_PRIVS, _BOUNDING_DROP, _CHILD_SUBREAPER = 1, 4, 38, 24, 36
_CAPABILITIES_V3, _NUM_CAPABILITIES = 0x20080522, 64
_ROOTS_CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 10)
"""chown, dac_override, fowner, fsetid, kill, setgid, setuid, net_bind_service: what installing programs takes."""
_SECCOMP, _SECCOMP_FILTER = 22, 2
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""By `os.uname`: the column of a number in the tables below, and what the kernel calls the architecture."""
_CLONE, _CLONE3 = (56, 220), (435, 435)
_NAMESPACE_FLAGS = 0x7E020000
REFUSED = {
    # Memory that no limit of the process counts.
    **{"shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "memfd_create": (319, 279)},
    **{"memfd_secret": (447, 447), "msgget": (68, 186), "msgsnd": (69, 189), "semget": (64, 190), "semop": (65, 193)},
    **{"mq_open": (240, 180), "io_setup": (206, 0), "vmsplice": (278, 75)},
    # What belongs to the user and not to the process.
    **{"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)},
    # Other processes.
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272)},
    **{"pidfd_getfd": (438, 438)},
    # New namespaces and mounts, a tmpfs above all.
    **{"unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41)},
    **{"chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430)},
    **{"fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442)},
    **{"open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264)},
    # Large parts of the kernel, of which programs like these need nothing.
    **{"io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "bpf": (321, 280)},
    **{"perf_event_open": (298, 241), "userfaultfd": (323, 282), "fanotify_init": (300, 262), "personality": (135, 92)},
    **{"init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104)},
    **{"kexec_file_load": (320, 294), "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142)},
    **{"quotactl": (179, 60), "acct": (163, 89), "syslog": (103, 116)},
}
"""System calls that programs may not make, and their numbers on each architecture."""


def _machine() -> tuple[int, int]:
    if (machine := os.uname().machine) not in _ARCHITECTURES:
        raise OSError(f"the numbers of system calls on {machine} are not known here")
    return _ARCHITECTURES[machine]


def call(function: str, *args: Any) -> None:
    """A function of the C library; OSError where it fails."""
    if getattr(_LIBC, function)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


def unshare(spaces: int) -> None:
    """Enter new namespaces; of process ids, the next child does."""
    call("unshare", spaces)


def map_ids(pid: int | str, uids: str, gids: str, setgroups: bool) -> None:
    """Say which ids of the host those of a process's user namespace are: lines of ``inside outside count``."""
    for name, content in (("setgroups", None if setgroups else "deny"), ("uid_map", uids), ("gid_map", gids)):
        if content is not None:
            with open(f"/proc/{pid}/{name}", "w") as file:
                file.write(content)


def keep_mounts_to_oneself() -> None:
    call("mount", b"none", b"/", None, _RECURSIVE | _PRIVATE, None)


def mount_tmpfs(place: str, size_mb: int, num_files: int) -> None:
    """An empty file system in memory that holds no more than that."""
    options = f"size={size_mb}m,nr_inodes={num_files},mode=755".encode()
    call("mount", b"tmpfs", place.encode(), b"tmpfs", NOSUID | NODEV, options)


def bind(source: str, place: str, read_only: bool = True) -> None:
    """Show a file or directory of the host at ``place``, with all that is mounted below it."""
    call("mount", source.encode(), place.encode(), None, _BIND | _RECURSIVE, None)
    if read_only:
        attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY | _ATTR_NOSUID, 0, 0, 0)
        size = ctypes.sizeof(attributes)
        call("syscall", _MOUNT_SETATTR, _AT_FDCWD, place.encode(), _AT_RECURSIVE, attributes, size)


def pivot_here() -> None:
    """Make the working directory, a mount of its own, the root, and let go of the old one."""
    call("syscall", REFUSED["pivot_root"][_machine()[0]], b".", b".")
    call("umount2", b".", _DETACH)


def die_with_parent() -> None:
    """KILL when the parent ends; a change of user forgets it."""
    call("prctl", _PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of each descendant whose own parent ends."""
    call("prctl", _CHILD_SUBREAPER, 1, 0, 0, 0)


def hide() -> None:
    """Keep this process's memory and descriptors from others of its user."""
    call("prctl", _DUMPABLE, 0, 0, 0, 0)


def give_up_capabilities(keep: Iterable[int] = ()) -> None:
    """Keep no capability but ``keep``, and get none by running a program."""
    kept = frozenset(keep)
    _bound_capabilities(kept)
    low = sum(1 << capability for capability in kept)
    # Effective, permitted and inheritable, for the lower and then for the upper 32.
    call("capset", (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0), (ctypes.c_uint32 * 6)(low, low, 0, 0, 0, 0))
    call("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0)


def _bound_capabilities(kept: frozenset[int]) -> None:
    for capability in range(_NUM_CAPABILITIES):
        if capability not in kept:
            _LIBC.prctl(_BOUNDING_DROP, capability, 0, 0, 0)  # fails for those that the kernel does not know


def become(uid: int, gid: int, groups: bool, admin: bool) -> None:
    """Be that user; an ``admin`` may change files, ids and processes of its own user namespace, others may nothing."""
    kept = frozenset(_ROOTS_CAPABILITIES if admin else ())
    if groups:
        os.setgroups([])
    os.setresgid(gid, gid, gid)
    _bound_capabilities(kept)  # which another user could not do any more
    os.setresuid(uid, uid, uid)
    give_up_capabilities(kept)


def set_limits(**limits: int | None) -> None:
    """Limits of this process and its children, by their names without RLIMIT_; None leaves one as it is."""
    for name, limit in limits.items():
        if limit is not None:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))


def refuse_system_calls() -> None:
    """Have the kernel answer those of `REFUSED` and new namespaces with EPERM, for good.

    Calls of another architecture end the process.

    Raises:
        OSError: the kernel has no filters, or their numbers on this machine are not known here.
    """
    column, architecture = _machine()
    load, jump_equal, jump_greater, jump_set, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown, kill = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x80000000
    program = [(load, 0, 0, 4), (jump_equal, 1, 0, architecture), (answer, 0, 0, kill), (load, 0, 0, 0)]
    # The x32 calls of x86_64 have numbers from here on.
    program += [(jump_greater, 0, 1, 0x40000000), (answer, 0, 0, kill)]
    for numbers in REFUSED.values():
        program += [(jump_equal, 0, 1, numbers[column]), (answer, 0, 0, refuse)]
    # Its flags lie in memory, which a filter cannot read; the C library then uses the older call.
    program += [(jump_equal, 0, 1, _CLONE3[column]), (answer, 0, 0, unknown)]
    program += [(jump_equal, 0, 3, _CLONE[column]), (load, 0, 0, 16), (jump_set, 0, 1, _NAMESPACE_FLAGS)]
    program += [(answer, 0, 0, refuse), (answer, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    call("prctl", _SECCOMP, _SECCOMP_FILTER, header, 0, 0)
