"""Signs of life from within a server: each of its processes beats, and who owns the server sees one that stands still.

A file for each process, mapped into its memory, holds three numbers: beats of a thread that does nothing else, turns of
the loop that does the process's work (0 where it has none), and whether that loop is at work, as long as that may take.
Numbers only grow, and silence is counted in looks of the reader: a host that stood still as a whole looked at nothing.

Imports the standard library only, so that a process beats before it does anything else.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import struct
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from slime.processes import kernel

DIRECTORY_VARIABLE = "SLIME_HEARTBEATS"
"""Where the processes of a server have their files, in its environment."""
BEAT_S = 1.0
THREAD = "heartbeat"
_NUMBERS = struct.Struct("=3Q")
_SHARED_MEMORY = Path("/dev/shm")
_TIME = "%Y-%m-%d %H:%M:%S"


def make_directory() -> str:
    """A directory for the heartbeats of one server, on no disk where that can be."""
    where = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
    return tempfile.mkdtemp(prefix="slime_heartbeats_", dir=where)


def remove_directory(directory: str | None) -> None:
    """Remove it with what is in it, if it is there; who still beats does so unseen."""
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)


class Heart:
    """This process's numbers."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._open()

    def _open(self) -> None:
        own = kernel.with_id(os.getpid())
        assert own is not None
        with Path(self._directory, f"{own.pid}-{own.started}").open("w+b") as file:
            file.truncate(_NUMBERS.size)
            self._numbers = memoryview(mmap.mmap(file.fileno(), _NUMBERS.size)).cast("Q")

    def beat(self) -> None:
        """The process lives: threads other than the one that holds the interpreter get their turn."""
        self._numbers[0] += 1

    def turn(self, *, works: bool) -> None:
        """The loop that does the process's work has come round; ``works`` is as of `work`."""
        self._numbers[2] = works
        self._numbers[1] += 1

    def work(self, works: bool = True) -> None:
        """Whether the loop does something that may take any time: until then its standing still says nothing."""
        self._numbers[2] = works

    def run(self) -> None:
        """Beat from now on, in a thread."""
        threading.Thread(target=self._run, name=THREAD, daemon=True).start()

    def go_on_in_fork(self) -> None:
        """In a process that was forked from this one and goes on as one of the server's: beat for it, not for the
        parent. A fork that becomes another program beats no more, and must not begin to."""
        with contextlib.suppress(OSError):
            self._open()
            self.run()

    def _run(self) -> None:
        while True:
            self.beat()
            time.sleep(BEAT_S)


_own: Heart | None = None


def begin() -> None:
    """Beat from now on, where the environment says where; a full or missing directory costs this sign of life only."""
    global _own
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if directory is not None and _own is None:
        with contextlib.suppress(OSError):
            _own = Heart(directory)
            _own.run()


def own() -> Heart | None:
    """This process's, once `begin` was called; None where nobody looks."""
    return _own


@dataclass
class _Seen:
    """What was seen last of one process."""

    numbers: tuple[int, int, int] = (0, 0, 0)
    silent: list[int] = field(default_factory=lambda: [0, 0])
    """In how many looks in a row its thread, and its loop, had not gone on."""
    since: list[float] = field(default_factory=lambda: [time.time(), time.time()])


class Watcher:
    """Looks at the processes of one server on this host."""

    def __init__(self, directory: str, timeout: float) -> None:
        """A process stands still that has not beaten for ``timeout`` seconds."""
        self.pause = min(BEAT_S, timeout / 4)
        """Seconds between two looks, for whoever looks."""
        self._directory, self._looks = Path(directory), max(2, round(timeout / self.pause))
        self._seen: dict[str, _Seen] = {}

    def look(self) -> str | None:
        """Look at all processes; which of them stands still, and since when, or None.

        A loop that is not at work stands still by itself, unless another of the server's is at work: it may wait for
        that one. What a loop at work takes is for the server itself to judge.
        """
        now, numbers = time.time(), self._read()
        self._seen = {name: self._seen.get(name, _Seen()) for name in numbers}
        for name, seen in self._seen.items():
            beats, turns, works = numbers[name]
            for index, moved in enumerate((beats != seen.numbers[0], turns != seen.numbers[1] or works or not turns)):
                seen.silent[index] = 0 if moved else seen.silent[index] + 1
                seen.since[index] = now if moved else seen.since[index]
            seen.numbers = numbers[name]
        for index, what in enumerate(("gives no sign of life", "has a scheduler that stands still with nothing to do")):
            if index and any(works for *_, works in numbers.values()):
                break
            for name, seen in self._seen.items():
                if seen.silent[index] >= self._looks:
                    since = time.strftime(_TIME, time.localtime(seen.since[index]))
                    return f"{_called(name)} {what}, since {since}"
        return None

    def _read(self) -> dict[str, tuple[int, int, int]]:
        """The numbers of each process that runs, by the name of its file."""
        found: dict[str, tuple[int, int, int]] = {}
        with contextlib.suppress(OSError):
            for path in self._directory.iterdir():
                pid, _, started = path.name.partition("-")
                process = kernel.with_id(int(pid))
                if process is not None and str(process.started) == started:
                    with contextlib.suppress(OSError, struct.error):  # not written yet
                        found[path.name] = _NUMBERS.unpack(path.read_bytes())
        return found


def _called(name: str) -> str:
    """A process by its id and the title that it gave itself, a word."""
    pid = name.partition("-")[0]
    with contextlib.suppress(OSError):
        title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace").strip()
        if title and "/" not in title and " " not in title:
            return f"process {pid} ({title})"
    return f"process {pid}"
