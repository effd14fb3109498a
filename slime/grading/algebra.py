"""Comparing mathematical answers: strings and numbers here, algebra in processes that can be killed."""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import logging
import os
import select
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from slime.grading.equality import quick_equal
from slime.processes.kernel import end_child
from slime.utils.environment import server_environment

logger = logging.getLogger(__name__)

_GRADE_S = 10.0
_START_S = 60.0
_END_S = 10.0
_MAX_WORKERS = 8


async def answers_equal(answer: str, label: str) -> bool:
    """Whether ``answer`` and ``label`` have the same value; algebra that takes over 10 s counts as no."""
    verdict = quick_equal(answer, label)
    return await asyncio.wrap_future(algebra_pool().equal(answer, label)) if verdict is None else verdict


def answers_equal_now(answer: str, label: str) -> bool:
    """As `answers_equal`, for a thread that may wait."""
    verdict = quick_equal(answer, label)
    return algebra_pool().equal(answer, label).result() if verdict is None else verdict


class _Worker:
    """One `grade_worker` process, started when needed, replaced when it hangs or dies; for one thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def equal(self, answer: str, label: str, seconds: float) -> bool:
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"answer": answer, "label": label}) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            reply = ""
        else:
            reply = _line(process, seconds)
        if not reply:
            logger.warning(
                "comparing %.60r with %.60r failed or took over %g s: counted as unequal", answer, label, seconds
            )
            self.stop()
        return reply.strip() == "true"

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "ignore", "-m", "slime.grading.grade_worker"]
        env = {**server_environment(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, close_fds=True
        )
        if not _line(process, _START_S):
            status = process.poll()
            self.stop()
            raise RuntimeError(
                f"{' '.join(command)} did not get ready (exit status {status}): is math-verify installed?"
            )
        return process

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            end_child(process, _END_S)


def _line(process: subprocess.Popen[str], seconds: float) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    return process.stdout.readline() if ready else ""


class AlgebraPool:
    """Threads that grade, each with a worker of its own, which dies with the thread that started it."""

    def __init__(self, size: int, seconds: float = _GRADE_S) -> None:
        self._seconds = seconds
        self._workers: list[_Worker] = []
        self._own = threading.local()
        self._threads = ThreadPoolExecutor(size, "grade", self._begin_thread)

    def _begin_thread(self) -> None:
        self._own.worker = _Worker()
        self._workers.append(self._own.worker)

    def equal(self, answer: str, label: str) -> Future[bool]:
        """Whether the two have the same value; a RuntimeError where no worker process could be started."""
        return self._threads.submit(lambda: self._own.worker.equal(answer, label, self._seconds))

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
