"""Children end with their parent, however they are held, and whoever ends one waits for as long as its deadline."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from slime.grading.algebra import AlgebraPool
from slime.processes import kernel
from tests.waiting import alive, wait_for

NUM_GPUS = 0
_PTRACE_SEIZE = 0x4206
PARENT = """
import sys
module = __import__(sys.argv[1], fromlist=["_"])
module._END_S = 0.1
{start}
print(child.pid, flush=True)
sys.stdin.readline()
{stop}
print("stopped", flush=True)
sys.stdin.readline()
"""
CHILDREN = {
    "slime.data.rows.row_workers": ("worker = module._Worker(None, None); child = worker._process", "worker.stop()"),
    "slime.grading.algebra": (
        "worker = module._Worker(); worker._start(); child = worker._process",
        "worker.stop()",
    ),
    "slime.options.flags.installed": (
        "flags = module.PendingFlags('pytest', 'import time; time.sleep(600)'); child = flags._process",
        "flags.__exit__()",
    ),
}
"""How a child of each module is started and ended."""


@contextmanager
def parent_of(module: str, errors: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process with a child, and the child's id; it ends the child when it is written to. ``errors``: its stderr."""
    start, stop = CHILDREN[module]
    command = [sys.executable, "-c", PARENT.format(start=start, stop=stop), module]
    pipe = subprocess.PIPE
    with errors.open("w") as err, subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=err, text=True) as parent:
        try:
            assert parent.stdout is not None
            yield parent, int(parent.stdout.readline())
        finally:
            parent.kill()


@pytest.mark.parametrize("module", CHILDREN)
def test_a_killed_child_that_does_not_end_is_left_behind(module: str, tmp_path: Path) -> None:
    """Its parent is not told of its end while somebody else traces it."""
    libc = ctypes.CDLL(None)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    errors = tmp_path / "errors"
    with parent_of(module, errors) as (parent, child):
        if libc.ptrace(_PTRACE_SEIZE, child, None, None):
            os.kill(child, signal.SIGKILL)
            pytest.skip("this host lets nobody trace a process")
        assert parent.stdin is not None
        assert parent.stdout is not None
        try:
            parent.stdin.write("\n")
            parent.stdin.flush()
            wait_for(lambda: psutil.Process(child).status() == psutil.STATUS_ZOMBIE, "it was killed")
            expected = f"process {child} was killed and has not ended within 0.1 s: it is left behind\n"
            wait_for(lambda: errors.read_text() == expected, "its parent left it behind")
        finally:
            os.waitpid(child, 0)
        assert parent.stdout.readline() == "stopped\n"


@pytest.mark.parametrize("module", ["slime.data.rows.row_workers", "slime.grading.algebra"])
def test_a_stopped_worker_ends_with_its_parent(module: str, tmp_path: Path) -> None:
    with parent_of(module, tmp_path / "errors") as (parent, child):
        one, two = (Path(f"/proc/{child}/fd/{number}") for number in (1, 2))
        wait_for(lambda: one.readlink() == two.readlink(), "it has begun: what libraries print is not an answer")
        os.kill(child, signal.SIGSTOP)
        wait_for(lambda: psutil.Process(child).status() == psutil.STATUS_STOPPED, "it is stopped")
        try:
            parent.kill()
            wait_for(lambda: not alive(child), "it ended")
        finally:
            if alive(child):
                os.kill(child, signal.SIGKILL)


def test_a_grader_outlives_the_thread_that_first_asked_for_it() -> None:
    """The kernel kills a child that dies with its parent already when the thread that started it ends."""
    pool = AlgebraPool(1, seconds=60.0)
    verdicts: list[bool] = []
    try:
        for _ in range(2):
            asking = threading.Thread(target=lambda: verdicts.append(pool.equal(r"\sqrt{8}", r"2\sqrt{2}").result()))
            asking.start()
            asking.join()
            task = Path(f"/proc/self/task/{asking.native_id}")
            wait_for(lambda task=task: not task.exists(), "the thread has ended for the kernel too")
    finally:
        pool.close()
    assert verdicts == [True, True]


_LISTENS = """
import socket, sys, time
family = socket.AF_INET6 if sys.argv[-1] == "::1" else socket.AF_INET
with socket.create_server((sys.argv[-1], 0), family=family) as taken:
    print(taken.getsockname()[1], flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_who_listens_at_a_port_is_known_of_a_process_and_those_below_it(host: str) -> None:
    below = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {_LISTENS!r}, {host!r}]).wait()"
    with subprocess.Popen([sys.executable, "-c", below], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if not (line := process.stdout.readline()):
            pytest.skip(f"nobody listens at {host} here")
        port = int(line)
        (child,) = psutil.Process(process.pid).children()
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
            assert [kernel.listens(pid, port) for pid in (process.pid, child.pid, other.pid)] == [True, True, False]
            assert not kernel.listens(process.pid, port % 65535 + 1)
            other.kill()
        child.kill()
    assert not kernel.listens(process.pid, port)
