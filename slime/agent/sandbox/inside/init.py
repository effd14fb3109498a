"""The first process of a sandbox: runs programs for the owner, waits for all that ends, and watches what they take.

Messages are JSON, one a packet. From the owner: ``{"run": id, "argv": [...], "user": name, "env": {...}, "cwd": path}``
with three descriptors, and ``{"kill": id}``. To the owner: ``{"ready": {...}}``, ``{"ended": id, "status": number}``
and ``{"exceeded": what}``, after which everything but this process has been killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
from typing import Any, NoReturn

from . import confine

_LARGEST = 1 << 20
_WATCH_S, _WATCH_HOST_S = 0.2, 1.0
_DISK_WATCH_S = 2.0
_DISK_TIMEOUT_S = 5
_PATH = "/opt/agent/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_FAILED = 126
_SIGNALS = tuple(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGPIPE})


def serve(settings: dict[str, Any], control: socket.socket, has_proc: bool | None) -> NoReturn:
    """Never returns; ``has_proc``: whether /proc shows this sandbox's processes, None outside a jail."""
    try:
        first = _Init(settings, control, has_proc)
        first.prepare()
        first.loop()
    except OSError as error:  # before it is ready, what is missing; later, that the owner has gone
        with contextlib.suppress(OSError):
            control.send(json.dumps({"failed": str(error)}).encode())
    finally:
        os._exit(0)


class _Init:
    def __init__(self, settings: dict[str, Any], control: socket.socket, has_proc: bool | None) -> None:
        self._settings = settings
        self._control = control
        self._jail = settings["jail"]
        self._has_proc = has_proc
        self._running: dict[int, int] = {}
        self._watch_s = _WATCH_S if self._jail else _WATCH_HOST_S
        self._watch_due = self._disk_due = 0.0
        self._prefix = "" if self._jail else settings["directory"]
        self._user_id = None if self._jail or os.geteuid() != 0 else _unused_id(settings["plain_id"])

    def prepare(self) -> None:
        """Take no signal but of children's ends, which programs could otherwise end this process with."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        if not self._jail:
            self._make_places()

    def loop(self) -> None:
        ended, ends = os.pipe()
        for descriptor in (ended, ends):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(ends, warn_on_full_buffer=False)
        self._tell({"ready": {"single_user": self._settings["single_user"], "root": self._prefix}})
        while True:
            readable = select.select([self._control.fileno(), ended], [], [], self._watch_s)[0]
            if ended in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(ended, 4096)
            self._reap()
            if self._control.fileno() in readable:
                self._hear()
            if time.monotonic() >= self._watch_due:
                self._watch_due = time.monotonic() + self._watch_s
                self._watch()

    def _tell(self, message: dict[str, Any]) -> None:
        self._control.sendall(json.dumps(message).encode())

    def _hear(self) -> None:
        data, descriptors, _, _ = socket.recv_fds(self._control, _LARGEST, 3)
        if not data:
            os._exit(0)
        message = json.loads(data)
        if "kill" in message:
            for pid in [pid for pid, number in self._running.items() if number == message["kill"]]:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            return
        try:
            pid = os.fork()
            if pid == 0:
                self._become(message, descriptors)
            self._running[pid] = message["run"]
        except OSError as error:  # a control group's bound of processes holds for this one, too
            os.write(descriptors[2], f"the sandbox could not run it: {error}\n".encode())
            self._tell({"ended": message["run"], "status": _FAILED})
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid in self._running:
                    code = os.waitstatus_to_exitcode(status)
                    self._tell({"ended": self._running.pop(pid), "status": code if code >= 0 else 128 - code})

    def _become(self, message: dict[str, Any], descriptors: list[int]) -> NoReturn:
        """Be the program that was asked for; what prevents it goes to its standard error."""
        try:
            signal.set_wakeup_fd(-1)
            for number in (*_SIGNALS, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            for target, descriptor in enumerate(descriptors):
                os.dup2(descriptor, target)
            os.closerange(3, 4096)
            uid, gid, home = self._account(message["user"])
            self._confine(uid, gid)
            os.umask(0o022)
            os.chdir(message["cwd"] or home)
            env = {"PATH": self._path(), "HOME": home, "USER": message["user"], "LANG": "C.UTF-8", "SHELL": "/bin/bash"}
            if not self._jail:
                env |= {"TMPDIR": f"{self._prefix}/tmp", self._settings["mark"]: self._settings["id"]}
            os.execve(message["argv"][0], message["argv"], env | message["env"])
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.write(2, f"the sandbox could not run it: {error}\n".encode())
        os._exit(_FAILED)

    def _path(self) -> str:
        return f"{self._prefix}{_PATH}:{self._settings['python']}"

    def _account(self, name: str) -> tuple[int, int, str]:
        """A user's ids and home by the sandbox's own /etc/passwd; outside a jail there is one, by whatever name."""
        if not self._jail:
            own = os.geteuid() if self._user_id is None else self._user_id
            return own, os.getegid() if self._user_id is None else own, f"{self._prefix}/home/agent"
        with open("/etc/passwd", errors="replace") as file:
            for line in file:
                fields = line.rstrip("\n").split(":")
                if fields[0] == name and len(fields) > 5:
                    return int(fields[2]), int(fields[3]), fields[5] if os.path.isdir(fields[5]) else "/"
        raise LookupError(f"there is no user {name!r} here")

    def _confine(self, uid: int, gid: int) -> None:
        settings = self._settings
        processes = settings["processes"]
        if not self._jail and self._user_id is None:
            processes += _threads_of(uid)  # the host counts this user's others, too
        confine.set_limits(AS=settings["address_space"], FSIZE=settings["disk_mb"] << 20, NOFILE=settings["files"])
        confine.set_limits(NPROC=processes, CORE=0)
        if self._jail or self._user_id is not None:
            confine.become(
                uid, gid, groups=not settings["single_user"] or not self._jail, admin=self._jail and uid == 0
            )
        else:
            confine.give_up_capabilities()
        confine.refuse_system_calls()

    def _make_places(self) -> None:
        for place in ("tmp", "home/agent", "workspace", "opt/agent/bin"):
            os.makedirs(f"{self._prefix}/{place}")
        if self._user_id is not None:
            for at, _, _ in os.walk(self._prefix):
                os.chown(at, self._user_id, self._user_id)

    def _watch(self) -> None:
        if not self._settings["cgroup"]:
            pids = self._others()
            threads, memory = 0, 0
            for pid in pids:
                with contextlib.suppress(OSError, ValueError):
                    mine = _status(pid)
                    threads += mine.get("Threads", 0)
                    memory += mine.get("RssAnon", 0) + mine.get("RssShmem", 0)
            most = self._settings["memory_mb"] << 10
            # What processes share was counted for each of them; asking the kernel for the fair sum takes longer.
            if memory > most and sum(map(_fair_share, pids)) > most:
                self._end_all("memory", pids)
            elif threads > 2 * self._settings["processes"]:  # where the kernel does not count them, as for root itself
                self._end_all("processes", pids)
        if not self._jail and time.monotonic() > self._disk_due:
            self._disk_due = time.monotonic() + _DISK_WATCH_S
            if _megabytes(self._prefix) > self._settings["disk_mb"]:
                self._end_all("disk", self._others())

    def _others(self) -> list[int]:
        """All of the sandbox but this process."""
        if self._has_proc:
            return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        return [] if self._jail else below(os.getpid())

    def _end_all(self, what: str, pids: list[int]) -> None:
        self._tell({"exceeded": what})
        if self._jail:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # all of the namespace but this process
            return
        for _ in range(20):
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self._reap()
            if not (pids := self._others()):
                return


def _unused_id(wanted: int) -> int | None:
    """That id if this process may take it, or the last of those that it may: in a container they can be few."""
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    if any(first <= wanted < first + count for first, _, count in ranges):
        return wanted
    last = max(first + count - 1 for first, _, count in ranges)
    return last if last > 0 else None


def _status(pid: int) -> dict[str, int]:
    """Numbers of /proc/PID/status: threads, and memory in KiB."""
    numbers = {}
    with open(f"/proc/{pid}/status", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in ("RssAnon", "RssShmem", "Threads"):
                numbers[name] = int(value.split()[0])
    return numbers


def _fair_share(pid: int) -> int:
    """Memory in KiB, of what is shared its part; without what belongs to files."""
    total = 0
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                total += int(line.split()[1])
    return total


def _threads_of(uid: int) -> int:
    """How many threads of the host are a user's."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError):
            if os.stat(f"/proc/{name}").st_uid == uid:
                count += _status(int(name)).get("Threads", 0)
    return count


def below(ancestor: int) -> list[int]:
    """Processes that descend from one of the host's."""
    parents: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{name}/stat", errors="replace") as file:
            parents.setdefault(int(file.read().rsplit(")", 1)[1].split()[1]), []).append(int(name))
    found = [ancestor]
    for pid in found:
        found += parents.get(pid, [])  # the list grows while it is walked
    return found[1:]


def _megabytes(directory: str) -> float:
    """What lies in a directory, by a program that no depth of it stops; 0 where it cannot be told in time."""
    try:
        told = subprocess.run(
            ["du", "-skx", directory], capture_output=True, timeout=_DISK_TIMEOUT_S, env={"PATH": _PATH}
        )
        return int(told.stdout.split()[0]) / 1024
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return 0.0
