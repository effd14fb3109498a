"""Ranks as processes of a test, with a deadline.

Where there is no GPU they are forked from a process that has imported what they need: that takes ten seconds a rank.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from slime.utils import device
from slime.utils.http_utils import PortReservation

TIMEOUT = 600.0
"""Seconds; importing torch on a busy machine takes many of them."""

_KILLED_S = 10.0
"""How long a killed process may take to be gone."""


def run_ranks(
    function: Callable[..., None],
    arguments: tuple[Any, ...],
    ranks: int,
    timeout: float = TIMEOUT,
    *,
    forks: bool = True,
) -> None:
    """Call ``function(rank, *arguments)`` in one new process a rank; none of them is left afterwards.

    Args:
        forks: False gives each rank an interpreter of its own, with its own order of sets and nothing imported.

    Raises:
        ProcessRaisedException: a rank raised; the message is its traceback.
        AssertionError: ranks were still running after ``timeout`` seconds; it names them.
    """
    # A fork of a process that has asked for GPUs cannot use them.
    method = "forkserver" if forks and not device.is_cuda() else "spawn"
    multiprocessing.set_forkserver_preload(["tests.preloaded"])
    context: Any = mp.start_processes(function, arguments, nprocs=ranks, join=False, start_method=method)
    deadline = time.monotonic() + timeout
    try:
        while not context.join(max(0.0, deadline - time.monotonic())):
            left = [rank for rank, process in enumerate(context.processes) if process.is_alive()]
            assert time.monotonic() < deadline, f"ranks {left} were still running after {timeout} s"
    finally:
        for process in context.processes:
            process.kill()
            process.join(_KILLED_S)


def run_program(path: Path, words: list[str], ranks: int, log: Path, timeout: float = TIMEOUT) -> None:
    """Run a Python program on ranks that find each other as under torchrun; what they print goes to ``log``.

    Raises as `run_ranks` does.
    """
    log.touch()
    reservation = PortReservation("127.0.0.1")
    reservation.release()
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reservation.port), "WORLD_SIZE": str(ranks)}
    variables |= {"LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    try:
        run_ranks(_run_program, (str(path), words, variables, str(log)), ranks, timeout)
    finally:
        reservation.close()


def _run_program(rank: int, path: str, words: list[str], variables: dict[str, str], log: str) -> None:
    os.environ |= {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    with open(log, "a") as printed:
        for number in (1, 2):
            os.dup2(printed.fileno(), number)
    sys.argv = [path, *words]
    torch.set_num_threads(1)  # OMP_NUM_THREADS comes too late for a torch that was loaded before
    runpy.run_path(path, run_name="__main__")
