"""Waiting for what other threads and processes do, however busy the machine is, and for no deadline at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import psutil


def wait_for(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Poll until ``condition()`` is true; AssertionError that names ``what`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether the process has not ended. One that has may stay as a zombie: whoever it was left to need not ask for it,
    as a session of tests that adopts the orphans of its runs."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_ends(processes: Sequence[psutil.Process], what: str, seconds: float = 60.0) -> None:
    """Until none of them is alive; AssertionError that names ``what`` and those left after ``seconds``."""
    deadline = time.monotonic() + seconds
    while left := [process for process in processes if process.is_running() and alive(process.pid)]:
        assert time.monotonic() < deadline, f"not ended within {seconds:g} s: {what}: {left}"
        time.sleep(0.02)


def command_line(process: psutil.Process) -> str:
    """Its words with spaces between; empty where it has ended: of a list of processes, some have before one asks."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def skip(seconds: float) -> None:
    """Put the clock of the running event loop forward, so that deadlines within ``seconds`` pass now.

    A test that shows what a deadline says calls it where the work has come to a stop: a deadline that is short enough
    to be waited for passes on a slow machine before the work has come there.
    """
    loop = asyncio.get_running_loop()
    clock = loop.time
    loop.time = lambda: clock() + seconds  # type: ignore[method-assign]
