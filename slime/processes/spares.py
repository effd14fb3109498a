"""Processes that are spawned before there is work for them: what it needs is imported by the time it comes.

A process that `multiprocessing` spawns is another Python, which imports all of its packages before it does anything.
Where several have to be started one after the other, the next one's imports need not wait for the first one's work.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import multiprocessing
import os
import resource
from collections.abc import Callable, Mapping
from multiprocessing import context, reduction, spawn
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

_FROM_THE_START = ("CUDA_", "LD_")
"""How variables begin that a loader or a driver reads once, at the start of a process or while it imports."""
_LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_STACK)


@dataclasses.dataclass
class _Job:
    """What a spawned process has from its parent at its start; of another start the parent's now counts."""

    target: Callable[..., None]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    environment: dict[str, str] = dataclasses.field(default_factory=lambda: dict(os.environ))
    start_method: str = dataclasses.field(default_factory=multiprocessing.get_start_method)
    limits: list[tuple[int, int]] = dataclasses.field(
        default_factory=lambda: [resource.getrlimit(limit) for limit in _LIMITS]
    )


class Spares:
    """Processes that have imported a module, and wait; each is started once more, with something to do."""

    def __init__(self, module: str, count: int) -> None:
        """Spawn ``count`` processes that import ``module``."""
        self._module = module
        self._variables, self._program = _variables(os.environ), spawn.get_executable()
        self._waiting = [_Spare(module) for _ in range(count)]

    def install(self) -> None:
        """Have them take over what this process spawns next: their module's own functions, one after the other. When it
        spawns anything else, those that are left are ended."""
        start = context.SpawnProcess._Popen

        def start_or_take_over(process: BaseProcess) -> Any:
            return self._take_over(process) or start(process)

        context.SpawnProcess._Popen = staticmethod(start_or_take_over)  # type: ignore[assignment,method-assign]

    def _take_over(self, process: BaseProcess) -> Any:
        """One of them as what stands for a started process; None where that has to be another."""
        target = process._target  # type: ignore[attr-defined]
        fits = _variables(os.environ) == self._variables and spawn.get_executable() == self._program
        if getattr(target, "__module__", None) != self._module or not fits:
            self.dismiss()
        if not self._waiting:
            return None
        job = _Job(target, process._args, process._kwargs)  # type: ignore[attr-defined]
        return self._waiting.pop(0).take(job)

    def dismiss(self) -> None:
        """End those that wait."""
        while self._waiting:
            self._waiting.pop().end()


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_FROM_THE_START)}


class _Spare:
    def __init__(self, module: str) -> None:
        self._jobs, theirs = multiprocessing.Pipe()  # a socket: file descriptors go through it
        self._process = multiprocessing.get_context("spawn").Process(
            target=_import_and_wait, args=(theirs, module), daemon=True
        )
        self._process.start()
        theirs.close()

    def take(self, job: _Job) -> Any:
        """Itself, started; None where it has ended."""
        handles = _Handles()
        content = handles.dump(job)
        try:
            self._jobs.send(len(handles.fds))
            for fd in handles.fds:
                reduction.send_handle(self._jobs, fd, self._process.pid)
            self._jobs.send_bytes(content)
        except OSError:
            return None
        finally:
            self._jobs.close()
        multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]
        return self._process._popen  # type: ignore[attr-defined]

    def end(self) -> None:
        self._jobs.close()
        self._process.terminate()
        self._process.join()


class _Handles:
    """Where `multiprocessing` puts the file descriptors of what it pickles for a process."""

    def __init__(self) -> None:
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        self.fds.append(fd)
        return len(self.fds) - 1

    def DupFd(self, number: int) -> _Handle:
        return _Handle(number)

    def dump(self, job: _Job) -> bytes:
        buffer = io.BytesIO()
        context.set_spawning_popen(self)  # type: ignore[arg-type]
        try:
            reduction.dump(job, buffer)
        finally:
            context.set_spawning_popen(None)
        return buffer.getvalue()


_received: list[int] = []


@dataclasses.dataclass
class _Handle:
    """A file descriptor of a job, by its place among them."""

    number: int

    def detach(self) -> int:
        return _received[self.number]


def _import_and_wait(jobs: Connection, module: str) -> None:
    """What a spare does."""
    importlib.import_module(module)
    try:
        _received[:] = [reduction.recv_handle(jobs) for _ in range(jobs.recv())]
        job: _Job = reduction.ForkingPickler.loads(jobs.recv_bytes())
    except EOFError:
        return
    jobs.close()
    for name in os.environ.keys() - job.environment.keys():
        del os.environ[name]
    # Those alone that differ: whoever gives a process a title looks for its first variable where the kernel put it.
    os.environ.update(job.environment.items() - os.environ.items())
    for limit, values in zip(_LIMITS, job.limits, strict=True):
        resource.setrlimit(limit, values)
    multiprocessing.set_start_method(job.start_method, force=True)
    multiprocessing.current_process().daemon = False
    job.target(*job.args, **job.kwargs)
