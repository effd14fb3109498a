"""Comparing mathematical answers: strings and numbers here, algebra in processes that can be killed."""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import logging
import os
import queue
import select
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from slime.rollout.reward.equality import quick_equal
from slime.utils.environment import server_environment
from slime.utils.processes import end_child

logger = logging.getLogger(__name__)

_GRADE_S = 10.0
_START_S = 60.0
_END_S = 10.0
_MAX_WORKERS = 8


async def answers_equal(answer: str, label: str) -> bool:
    """Whether ``answer`` and ``label`` have the same value; algebra that takes over 10 s counts as no."""
    verdict = quick_equal(answer, label)
    return await algebra_pool().equal(answer, label) if verdict is None else verdict


def answers_equal_now(answer: str, label: str) -> bool:
    """As `answers_equal`, for a thread that may wait."""
    verdict = quick_equal(answer, label)
    return algebra_pool().equal_now(answer, label) if verdict is None else verdict


class _Worker:
    """One `grade_worker` process, started when needed, replaced when it hangs or dies; for one thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def equal(self, answer: str, label: str, seconds: float) -> bool:
        if self._process is None:
            self._start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"answer": answer, "label": label}) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            reply = ""
        else:
            reply = self._line(seconds)
        if not reply:
            logger.warning(
                "comparing %.60r with %.60r failed or took over %g s: counted as unequal", answer, label, seconds
            )
            self.stop()
        return reply.strip() == "true"

    def _start(self) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "slime.rollout.reward.grade_worker"]
        env = {**server_environment(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, close_fds=True
        )
        if not self._line(_START_S):
            status = self._process.poll()
            self.stop()
            raise RuntimeError(
                f"{' '.join(command)} did not get ready (exit status {status}): is math-verify installed?"
            )

    def _line(self, seconds: float) -> str:
        assert self._process is not None
        stdout = self._process.stdout
        assert stdout is not None
        ready, _, _ = select.select([stdout], [], [], seconds)
        return stdout.readline() if ready else ""

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            end_child(process, _END_S)


class AlgebraPool:
    """Workers, each driven by a thread of its own while it grades."""

    def __init__(self, size: int, seconds: float = _GRADE_S) -> None:
        self._seconds = seconds
        self._workers = [_Worker() for _ in range(size)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="grade")

    async def equal(self, answer: str, label: str) -> bool:
        """Whether the two have the same value.

        Raises:
            RuntimeError: no worker process could be started.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._grade, answer, label)

    def equal_now(self, answer: str, label: str) -> bool:
        """As `equal`, for a thread that may wait."""
        return self._threads.submit(self._grade, answer, label).result()

    def _grade(self, answer: str, label: str) -> bool:
        # In a thread of the pool, as a worker dies with the thread that started it.
        worker = self._idle.get()
        try:
            return worker.equal(answer, label, self._seconds)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End all processes."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.stop()


@functools.cache
def algebra_pool() -> AlgebraPool:
    """The process's pool; its processes start when the first answer needs them."""
    pool = AlgebraPool(min(_MAX_WORKERS, os.cpu_count() or 1))
    atexit.register(pool.close)
    return pool
