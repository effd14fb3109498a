"""Ranks as processes of a test, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

TIMEOUT = 600.0
"""Seconds; importing torch on a busy machine takes many of them."""

_KILLED_S = 10.0
"""How long a killed process may take to be gone."""


def run_ranks(function: Callable[..., None], arguments: tuple[Any, ...], ranks: int, timeout: float = TIMEOUT) -> None:
    """Call ``function(rank, *arguments)`` in one new process a rank; none of them is left afterwards.

    Raises:
        ProcessRaisedException: a rank raised; the message is its traceback.
        AssertionError: ranks were still running after ``timeout`` seconds; it names them.
    """
    context: Any = mp.spawn(function, arguments, nprocs=ranks, join=False)
    deadline = time.monotonic() + timeout
    try:
        while not context.join(max(0.0, deadline - time.monotonic())):
            left = [rank for rank, process in enumerate(context.processes) if process.is_alive()]
            assert time.monotonic() < deadline, f"ranks {left} were still running after {timeout} s"
    finally:
        for process in context.processes:
            process.kill()
            process.join(_KILLED_S)
