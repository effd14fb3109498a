"""Running coroutines from synchronous code, and many of them under one deadline."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import contextvars
import functools
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from slime.utils.errors import CancelledRolloutError, DeadlineError

T = TypeVar("T")

HOOK_THREADS = 64
"""Calls of plain functions of the user at the same time, on one event loop."""
_CANCEL_S = 10.0
_EXIT_S = 2.0
_GRACE_S = 45.0
"""More than a filter, then groups, then connections take together to end, and less than who calls us grants."""


class BackgroundLoop:
    """One event loop in a daemon thread, for all rollouts: users' modules keep sessions and locks of one loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(HOOK_THREADS, "hook"))
        self._tasks: set[asyncio.Task[Any]] = set()
        """What `cancel` ends."""
        self._thread = threading.Thread(target=self._run, name="rollout-loop", daemon=True)
        self._thread.start()
        atexit.register(self._close_connections)

    def _close_connections(self) -> None:
        """End the generators that lend them (`Http`), as `asyncio.run` does: at exit each would say that it is open."""
        with contextlib.suppress(concurrent.futures.TimeoutError):
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_EXIT_S)

    async def _end(self) -> None:
        await cancel([task for task in self._tasks if task is not asyncio.current_task()])
        await self._loop.shutdown_asyncgens()

    def _run(self) -> None:
        while True:
            # One that leaves a user's task ends `run_forever`; whoever awaits the task has it all the same.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()

    def _reacts(self) -> bool:
        reacted = threading.Event()
        self.soon(reacted.set)
        return reacted.wait(_GRACE_S)

    def soon(self, function: Callable[..., Any], *args: Any) -> None:
        """Have ``function`` called on the loop, and do not wait for it."""
        self._loop.call_soon_threadsafe(function, *args)

    def track(self, task: asyncio.Task[Any]) -> None:
        """Have `cancel` end one that nobody `run`s (on the loop)."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self, timeout: float) -> None:
        """Cancel whatever is run or tracked, and wait for the end of it; who runs it gets CancelledRolloutError."""

        async def cancel_all() -> None:
            tasks = [task for task in self._tasks if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=timeout)

        self.run(cancel_all(), timeout=timeout, what="cancelling rollouts")

    async def _tracked(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if (task := asyncio.current_task()) is not None:
            self.track(task)
        return await coroutine

    def run(self, coroutine: Coroutine[Any, Any, T], *, timeout: float, what: str, keeps_it: bool = False) -> T:
        """The result of ``coroutine``, run to its end; ``what`` is being done, for the error message.

        It keeps its ``timeout`` (seconds) itself; this only notices, a little later, that something blocks the loop: a
        DeadlineError shows where, and the next caller gets a new loop. With ``keeps_it`` its deadline stands still at
        times (`in_line`), so that only a loop that is blocked is too late. CancelledRolloutError where `cancel` was
        called.
        """
        future = asyncio.run_coroutine_threadsafe(self._tracked(coroutine), self._loop)
        limit = timeout + _GRACE_S
        try:
            while keeps_it and not concurrent.futures.wait([future], limit).done and self._reacts():
                limit = _GRACE_S
            return future.result(0 if keeps_it else limit)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            future.cancel()
            background_loop.cache_clear()
            frame = sys._current_frames().get(self._thread.ident or 0)
            stack = "".join(traceback.format_stack(frame)) if frame else "(its thread is gone)\n"
            raise DeadlineError(
                f"{what} did not end within {timeout:g} s and does not react: the event loop is blocked here:\n{stack}"
            ) from None
        except concurrent.futures.CancelledError:
            raise CancelledRolloutError(f"{what} was cancelled") from None
        except KeyboardInterrupt:
            future.cancel()
            raise


@functools.cache
def background_loop() -> BackgroundLoop:
    """The process's event loop for rollouts, started at first use."""
    return BackgroundLoop()


_own_threads = concurrent.futures.ThreadPoolExecutor(8, "rollout")


async def in_own_thread(function: Callable[..., T], *args: Any) -> T:
    """What a function gives in a thread that no hook can take."""
    call = functools.partial(contextvars.copy_context().run, function, *args)
    return await asyncio.get_running_loop().run_in_executor(_own_threads, call)


async def run_all(
    jobs: Sequence[Coroutine[Any, Any, T]],
    *,
    timeout: float | None = None,
    late: Callable[[], str] = lambda: "not all jobs finished in time",
) -> list[T]:
    """Results of all jobs in order; the first failure, the deadline or a cancellation cancels the rest. DeadlineError
    after ``timeout`` seconds, with what ``late`` says while the late jobs are still there to be described."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    if not tasks:
        return []
    try:
        done, pending = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task in done:
                task.result()
        if pending:
            raise DeadlineError(late())
        return [task.result() for task in tasks]
    finally:
        await cancel(tasks)


async def cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel what is not done, and wait, not for long, until it has ended; what tasks raise, ever, is forgotten."""
    pending = []
    for task in tasks:
        if task.done():
            _forget(task)
        else:
            task.add_done_callback(_forget)
            task.cancel()
            pending.append(task)
    if pending:
        await asyncio.wait(pending, timeout=_CANCEL_S)


def _forget(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()
