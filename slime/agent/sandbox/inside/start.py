"""Starts a sandbox and ends it: ``python -I -S inside start SETTINGS``, a process on the host, in no namespace itself.

Standard input is a pipe from the owner. When that ends, or the owner's process, everything of the sandbox is killed
and its directory removed, however the owner went.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from . import cgroup, confine, init, network, root

_FIRST_ID, _NUM_IDS = 0x70000000, 65536
"""Ids of the host that no account has: what the sandbox's own 0 to 65535 are there, where root starts it."""
_CHECK_S = 0.5
_END_S = 20.0


def main() -> int:
    """Exit status 0 when the sandbox has ended; what prevented it is sent to the owner as ``{"failed": why}``."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    control = socket.socket(fileno=settings["control"])
    os.set_inheritable(control.fileno(), False)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("800")  # where the host runs out of memory, the run itself comes last
    confine.adopt_orphans()
    settings["cgroup"] = None
    try:
        os.mkdir(settings["directory"], 0o755)
    except OSError as error:
        _tell_failure(control, error)
        return 1
    try:
        return _run(settings, control)
    except OSError as error:
        _tell_failure(control, error)
        return 1
    finally:
        _kill_children()
        if settings["cgroup"]:
            _remove_cgroup(settings["cgroup"])
        remove_directory(settings["directory"])


def _run(settings: dict[str, Any], control: socket.socket) -> int:
    if settings["jail"]:
        bytes_mb = settings["memory_mb"] + settings["disk_mb"]  # its files are memory
        settings["cgroup"] = cgroup.make(settings["id"], bytes_mb, 2 * settings["processes"])
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            os.close(0)
            os.open("/dev/null", os.O_RDWR)
            _become_init(settings, control, theirs)
        except BaseException as error:  # a child must never go back to its parent's code
            _tell_failure(control, error)
        os._exit(1)
    theirs.close()
    listener = None
    try:
        if settings["jail"]:
            _let_in(pid, settings, ours)
            listener = _listener(ours) if settings["reach"] else None
    except (OSError, EOFError) as error:
        _tell_failure(control, error)
        return 1
    control.close()
    if listener is not None:
        arguments = (listener, *settings["reach"])
        threading.Thread(target=network.forward, args=arguments, daemon=True).start()
    _wait(pid, settings["owner"])
    return 0


def _tell_failure(control: socket.socket, error: BaseException) -> None:
    with contextlib.suppress(OSError):
        control.send(json.dumps({"failed": str(error)}).encode())


def _let_in(pid: int, settings: dict[str, Any], link: socket.socket) -> None:
    """Map the ids of the child's new user namespace, which only a process outside of it may, and limit it by cgroup."""
    if link.recv(1) != b"u":
        raise EOFError("it could not have namespaces of its own")
    if settings["cgroup"]:
        with open(f"{settings['cgroup']}/cgroup.procs", "w") as file:
            file.write(str(pid))
    single = False
    ids = f"0 {_FIRST_ID} {_NUM_IDS}"
    try:
        confine.map_ids(pid, ids, ids, setgroups=True)
    except PermissionError:
        if os.geteuid() == 0:  # inside it would still be the host's root, to whom its /proc/sys is writable
            raise PermissionError("root here may not map ids, which takes CAP_SETUID and CAP_SETGID") from None
        single = True
        confine.map_ids(pid, f"0 {os.geteuid()} 1", f"0 {os.getegid()} 1", setgroups=False)
    link.send(b"s" if single else b"m")


def _become_init(settings: dict[str, Any], control: socket.socket, link: socket.socket) -> None:
    """Never returns: the sandbox's first process, in its namespaces if it is a jail."""
    confine.die_with_parent()
    if not settings["jail"]:
        settings["single_user"] = True
        confine.adopt_orphans()
        init.serve(settings, control, None)
    spaces = confine.NEW_NS | confine.NEW_IPC | confine.NEW_PID | confine.NEW_NET | confine.NEW_UTS
    confine.unshare(confine.NEW_USER | spaces)
    link.send(b"u")
    answer = link.recv(1)
    if not answer:
        os._exit(1)
    settings["single_user"] = answer == b"s"
    sources = root.open_sources(settings["read_only"])
    if not settings["single_user"]:
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    confine.die_with_parent()  # again, since a change of user forgets it
    socket.sethostname("sandbox")
    confine.keep_mounts_to_oneself()
    address, names = _inner_address(settings["reach"])
    root.make(settings["directory"], settings["disk_mb"], sources, settings["single_user"], names)
    network.raise_loopback(address)
    if settings["reach"]:
        with network.listen(address or "127.0.0.1", settings["reach"][1]) as listener:
            socket.send_fds(link, [b"l"], [listener.fileno()])
    if pid := os.fork():  # the new process namespace begins with a child
        control.close()
        os.waitpid(pid, 0)
        os._exit(0)
    confine.die_with_parent()
    confine.hide()
    link.close()
    has_proc = root.enter(settings["directory"])
    init.serve(settings, control, has_proc)


def _inner_address(reach: list[Any] | None) -> tuple[str | None, dict[str, str]]:
    """Under which address programs find what they may reach, so that its URL is the same inside and outside."""
    if not reach:
        return None, {}
    try:
        socket.inet_aton(reach[0])
        return reach[0], {}
    except OSError:
        return None, {reach[0]: "127.0.0.1"}


def _listener(link: socket.socket) -> socket.socket:
    data, descriptors, _, _ = socket.recv_fds(link, 1, 1)
    if data != b"l":
        raise EOFError("it ended before it was ready")
    return socket.socket(fileno=descriptors[0])


def _wait(pid: int, owner: int) -> None:
    """Until the sandbox has ended by itself, or its owner lets it go or is gone."""
    owners = select.poll()
    owners.register(0, select.POLLIN | select.POLLHUP)
    while os.getppid() == owner:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                if ended == pid:
                    return
        if owners.poll(1000 * _CHECK_S):
            return


def _kill_children() -> None:
    """KILL all that descends from this process, as whose children orphans end up; a jail ends with its first one."""
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline:
        for pid in init.below(os.getpid()):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def _remove_cgroup(path: str) -> None:
    for _ in range(50):
        try:
            return os.rmdir(path)
        except OSError:
            time.sleep(0.1)


def remove_directory(directory: str) -> None:
    """With what programs left in it: they may have nested directories deeper than Python's own rmtree can follow."""
    try:
        os.rmdir(directory)
    except OSError:
        subprocess.run(["rm", "-rf", directory], timeout=60, stderr=subprocess.DEVNULL)
