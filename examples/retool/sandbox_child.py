"""The inside of `tool_sandbox`: locks itself in, then runs the Python on standard input.

Started as ``python -I -S sandbox_child.py LIMITS``; imports nothing but the standard library. Prints READY once it is
locked in, so that whatever comes before is a failure of the sandbox and not of the code.
"""

from __future__ import annotations

import ctypes
import errno
import json
import linecache
import os
import resource
import signal
import struct
import sys
import traceback
from typing import Any, NoReturn

READY = "ready\n"
NOBODY = 65534
_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_NS, _NEW_IPC, _NEW_USER, _NEW_PID, _NEW_NET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_NOSUID, _NODEV, _BIND, _RECURSIVE, _PRIVATE = 2, 4, 0x1000, 0x4000, 0x40000
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY, _ATTR_NOSUID = 442, -100, 0x8000, 1, 2
_PDEATHSIG, _DUMPABLE, _NO_NEW_PRIVS = 1, 4, 38
_CAPABILITIES_V3 = 0x20080522
_NUM_FILES = 1000
_SECCOMP, _SECCOMP_FILTER = 22, 2
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""By `os.uname`: the column of a number in the table below, and what the kernel calls the architecture."""
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
"""System calls that the code may not make, and their numbers on each architecture."""


def _call(function: str, *args: Any) -> None:
    """A function of the C library; OSError where it fails."""
    if getattr(_LIBC, function)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


def enter_jail(root: str, disk_mb: int) -> None:
    """Namespaces of its own: no network, no other process, and of the files only Python's, read-only, and /tmp.

    Raises:
        OSError: the host does not permit it.
    """
    uid, gid = os.getuid(), os.getgid()
    spaces = _NEW_NS | _NEW_IPC | _NEW_PID | _NEW_NET
    _call("unshare", spaces if uid == 0 else spaces | _NEW_USER)
    if uid != 0:
        for name, content in (
            ("setgroups", "deny"),
            ("uid_map", f"{NOBODY} {uid} 1"),
            ("gid_map", f"{NOBODY} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(content)
    _call("mount", b"none", b"/", None, _RECURSIVE | _PRIVATE, None)
    size = f"size={disk_mb}m,nr_inodes={_NUM_FILES},mode=755".encode()
    _call("mount", b"tmpfs", root.encode(), b"tmpfs", _NOSUID | _NODEV, size)
    places = {f"{sys.base_prefix}/lib", f"{sys.base_prefix}/lib64", "/lib", "/lib64", "/usr/lib", "/usr/lib64"}
    for place in sorted(filter(os.path.isdir, places)):
        if not os.path.isdir(root + place):
            os.makedirs(root + place)
            _call("mount", place.encode(), (root + place).encode(), None, _BIND | _RECURSIVE, None)
            _make_read_only(root + place)
    os.mkdir(f"{root}/tmp")
    os.chmod(f"{root}/tmp", 0o777)
    os.chroot(root)
    os.chdir("/tmp")


def _make_read_only(place: str) -> None:
    attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY | _ATTR_NOSUID, 0, 0, 0)
    _call("syscall", _MOUNT_SETATTR, _AT_FDCWD, place.encode(), _AT_RECURSIVE, attributes, ctypes.sizeof(attributes))


def drop_privileges() -> None:
    """Become nobody, where that can be chosen, and keep no capability."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    _call("capset", (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0), (ctypes.c_uint32 * 6)())
    _call("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0)
    # Again, since a change of user forgets it.
    _call("prctl", _PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if not os.access(os.path.dirname(os.__file__), os.R_OK | os.X_OK):
        raise PermissionError(
            f"outside a jail the code runs as 'nobody', who cannot read {os.path.dirname(os.__file__)}"
        )


def set_limits(cpu_s: int, memory_mb: int, disk_mb: int) -> None:
    """Limits of this process; it cannot start another one, nor a thread."""
    memory, disk = memory_mb << 20, disk_mb << 20
    limits = {"AS": memory, "FSIZE": disk, "NOFILE": 32, "NPROC": 0, "CORE": 0}
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    # First an exception, which tells why, and a second later the end.
    signal.signal(signal.SIGXCPU, lambda *_: _out_of_time(cpu_s))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))


def refuse_system_calls() -> None:
    """Have the kernel answer those of `REFUSED` with EPERM, for good; calls of another architecture end the process.

    Raises:
        OSError: the kernel has no filters, or their numbers on this machine are not known here.
    """
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(f"seccomp: the numbers of system calls on {machine} are not known here")
    column, architecture = _ARCHITECTURES[machine]
    load, jump_equal, jump_greater, answer = 0x20, 0x15, 0x35, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
    program = [(load, 0, 0, 4), (jump_equal, 1, 0, architecture), (answer, 0, 0, kill), (load, 0, 0, 0)]
    # The x32 calls of x86_64 have numbers from here on.
    program += [(jump_greater, 0, 1, 0x40000000), (answer, 0, 0, kill)]
    for numbers in REFUSED.values():
        program += [(jump_equal, 0, 1, numbers[column]), (answer, 0, 0, refuse)]
    program.append((answer, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    _call("prctl", _SECCOMP, _SECCOMP_FILTER, header, 0, 0)


def _out_of_time(cpu_s: int) -> NoReturn:
    raise TimeoutError(f"more than {cpu_s} s of CPU time")


def wait_for(pid: int, most: int = 255) -> int:
    """The status of a child, one of its own being ``most`` at most; of a signal 128 and more, as a shell has it."""
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return min(status, most) if status >= 0 else 128 - status


def run(code: str) -> int:
    """Run the code as a program; its exit status. A traceback shows the code's own lines only."""
    name = "<code>"
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    try:
        exec(compile(code, name, "exec"), {"__name__": "__main__"})
    except SystemExit:
        raise
    except BaseException as error:
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
        print("".join([*traceback.format_list(own), *traceback.format_exception_only(error)]), end="")
        return 1
    return 0


def main() -> int:
    """Exit status 0 where the code raised nothing; in a jail more than 128 is a signal."""
    limits = json.loads(sys.argv[1])
    _call("prctl", _PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    code = sys.stdin.read()
    if os.getppid() != limits["owner"]:
        return 1  # it was gone before it could be asked for: nobody would end the code
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which the code may send us: our traceback is nothing to read
    try:
        if limits["jail"]:
            enter_jail(limits["directory"], limits["disk_mb"])
            if pid := os.fork():  # the new process namespace begins with a child
                return wait_for(pid)
            # All of the namespace ends with this process, which is not the code: that may leave the process group and
            # take back its own PDEATHSIG, but it cannot trace this one.
            _call("prctl", _PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            _call("prctl", _DUMPABLE, 0, 0, 0, 0)
            if pid := os.fork():
                return wait_for(pid, most=128)
        drop_privileges()
        set_limits(limits["cpu_s"], limits["memory_mb"], limits["disk_mb"])
        refuse_system_calls()
    except OSError as error:
        print(error)
        return 1
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    print(READY, end="")
    return run(code)


if __name__ == "__main__":
    sys.exit(main())
