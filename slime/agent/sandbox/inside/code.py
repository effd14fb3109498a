"""The inside of `python_code`: locks itself in, then runs the Python on standard input in this very process.

Prints READY once it is locked in, so that whatever comes before is a failure of the sandbox and not of the code.
"""

from __future__ import annotations

import json
import linecache
import os
import resource
import signal
import sys
import traceback
from typing import NoReturn

from . import confine
from .confine import NOBODY

READY = "ready\n"
_NUM_FILES = 1000


def enter_jail(root: str, disk_mb: int) -> None:
    """Namespaces of its own: no network, no other process, and of the files only Python's, read-only, and /tmp.

    Raises:
        OSError: the host does not permit it.
    """
    uid, gid = os.getuid(), os.getgid()
    spaces = confine.NEW_NS | confine.NEW_IPC | confine.NEW_PID | confine.NEW_NET
    confine.unshare(spaces if uid == 0 else spaces | confine.NEW_USER)
    if uid != 0:
        confine.map_ids("self", f"{NOBODY} {uid} 1", f"{NOBODY} {gid} 1", setgroups=False)
    confine.keep_mounts_to_oneself()
    confine.mount_tmpfs(root, disk_mb, _NUM_FILES)
    places = {f"{sys.base_prefix}/lib", f"{sys.base_prefix}/lib64", "/lib", "/lib64", "/usr/lib", "/usr/lib64"}
    for place in sorted(filter(os.path.isdir, places)):
        if not os.path.isdir(root + place):
            os.makedirs(root + place)
            confine.bind(place, root + place)
    os.mkdir(f"{root}/tmp")
    os.chmod(f"{root}/tmp", 0o777)
    os.chroot(root)
    os.chdir("/tmp")


def drop_privileges() -> None:
    """Become nobody, where that can be chosen, and keep no capability."""
    if os.getuid() == 0:
        confine.become(NOBODY, NOBODY, groups=True, admin=False)
    else:
        confine.give_up_capabilities()
    # Again, since a change of user forgets it.
    confine.die_with_parent()
    if not os.access(os.path.dirname(os.__file__), os.R_OK | os.X_OK):
        raise PermissionError(
            f"outside a jail the code runs as 'nobody', who cannot read {os.path.dirname(os.__file__)}"
        )


def set_limits(cpu_s: int, memory_mb: int, disk_mb: int) -> None:
    """Limits of this process; it cannot start another one, nor a thread."""
    confine.set_limits(AS=memory_mb << 20, FSIZE=disk_mb << 20, NOFILE=32, NPROC=0, CORE=0)
    # First an exception, which tells why, and a second later the end.
    signal.signal(signal.SIGXCPU, lambda *_: _out_of_time(cpu_s))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))


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
    confine.die_with_parent()
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
            confine.die_with_parent()
            confine.hide()
            if pid := os.fork():
                return wait_for(pid, most=128)
        drop_privileges()
        set_limits(limits["cpu_s"], limits["memory_mb"], limits["disk_mb"])
        confine.refuse_system_calls()
    except OSError as error:
        print(error)
        return 1
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    print(READY, end="")
    return run(code)
