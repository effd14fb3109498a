"""Calling a user's functions: off the event loop where they block, under a deadline, and with errors that say whose."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import logging
import threading
import time
import types
from argparse import Namespace
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from slime.data import Sample
from slime.data.source.numbers import numbers_kept
from slime.rollout.engine.loop import background_loop, cancel
from slime.rollout.engine.state import seconds_in_line
from slime.rollout.runtime import current
from slime.utils.calls import parameters_of
from slime.utils.errors import DeadlineError, HookError
from slime.utils.misc import load_function
from slime.utils.user_functions import is_first, naming

T = TypeVar("T")

logger = logging.getLogger(__name__)

_one_log_at_a_time = threading.Lock()
"""Rollouts under way end in threads of their own."""
_BLOCKED_S = 3.0
_SHORTEST_WAIT_S = 0.05


@dataclass(frozen=True)
class Limit:
    """How long a call may take, once it has begun."""

    seconds: float
    flag: str
    what: str
    """What is called, for the error message."""


async def call_hook(
    function: Callable[..., Any], where: str, *args: Any, limit: Limit | None = None, **kwargs: Any
) -> Any:
    """Call a sync or async user function, of ``where`` (flag and path); a sync one runs in a thread, so that it cannot
    stall the event loop. HookError where it raised, with its traceback; DeadlineError where it took longer than
    ``limit``.

    What cannot be ended is left alone, and counts no more among those that run: a thread that outlives its limit or
    whose caller was cancelled, and a coroutine that goes on when it is cancelled.
    """
    with naming(where):
        call = functools.partial(function, *args, **kwargs)
        if inspect.iscoroutinefunction(function):
            return await within(limit, _named(where, call))
        runtime = current()  # outside of one no bound is known
        async with contextlib.nullcontext() if runtime is None else runtime.here().hook_threads:
            result = await within(limit, _named(where, functools.partial(_in_thread, call)))
        return await within(limit, _named(where, lambda: result)) if inspect.isawaitable(result) else result


async def _named(where: str, call: Callable[[], Awaitable[T]]) -> T:
    """The answer of ``call``: a SystemExit that left its task would end the event loop."""
    with naming(where):
        answer = call()
        return await (_timed(where, answer) if inspect.iscoroutine(answer) else answer)


@types.coroutine
def _timed(where: str, coroutine: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    """What ``coroutine`` returns; once it is told of one that keeps the event loop to itself."""
    step: Callable[[Any], Any] = coroutine.send
    value: Any = None
    while True:
        began = time.monotonic()
        try:
            waits_for = step(value)
        except StopIteration as stop:
            return stop.value
        finally:
            if (seconds := time.monotonic() - began) > _BLOCKED_S and is_first("blocks the loop", where):
                logger.warning(
                    "%s kept the event loop to itself for %.0f s: all other requests, rewards and deadlines waited "
                    "meanwhile. Make it a plain function (def, not async def), which runs in a thread of its own, or "
                    "await what takes long (asyncio.to_thread)",
                    *(where, seconds),
                )
        try:
            value = yield waits_for
            step = coroutine.send
        except GeneratorExit:
            coroutine.close()
            raise
        except BaseException as error:
            value, step = error, coroutine.throw


async def within(limit: Limit | None, call: Awaitable[T]) -> T:
    """The answer of ``call``; DeadlineError where it takes longer than ``limit``.

    The time in which requests of the call wait for those of others, such as older rollouts, does not count.

    It has a task of its own, since one that swallows its cancellation, as a loop over a bare ``except`` does, would
    otherwise be waited for.
    """
    task, loop, before = asyncio.ensure_future(call), asyncio.get_running_loop(), seconds_in_line()
    began = loop.time()
    try:
        while not task.done():
            left = None
            if limit is not None:
                left = limit.seconds + seconds_in_line() - before - (loop.time() - began)
                if left <= 0:
                    raise DeadlineError(f"{limit.what} took longer than {limit.seconds:g} s ({limit.flag})")
            await asyncio.wait([task], timeout=None if left is None else max(left, _SHORTEST_WAIT_S))
        return task.result()
    except GeneratorExit as error:  # the call's own: as such it would say that we are closed
        raise RuntimeError("GeneratorExit") from error
    finally:
        await cancel([task])


async def _in_thread(call: Callable[[], T]) -> T:
    """What ``call`` gives in a thread of its own, which, unlike one of an executor, may hang without taking a place."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(result)  # type: ignore[arg-type]
        else:
            answer.set_exception(error)

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = context.run(call)
        except StopIteration as stop:
            error = RuntimeError(f"StopIteration: {stop}")  # which no future can hold
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=run, name="hook", daemon=True).start()
    return await answer


def accepted(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Those of the keyword arguments that ``function`` takes."""
    parameters = parameters_of(function)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in arguments.items() if takes_any or name in parameters}


def logs_rollout(
    args: Namespace, rollout_id: int, samples: list[Sample], extra_metrics: dict[str, Any], seconds: float
) -> bool:
    """Whether ``--custom-rollout-log-function-path`` has logged a rollout; False where there is none. HookError where
    it failed, DeadlineError past ``--rollout-timeout``."""
    flag = "--custom-rollout-log-function-path"
    with numbers_kept(samples, f"{flag} {args.custom_rollout_log_function_path}"):
        return _log(args, flag, rollout_id, args, samples, extra_metrics, seconds)


def logs_evaluation(args: Namespace, rollout_id: int, data: dict[str, Any], extra_metrics: dict[str, Any]) -> bool:
    """As `logs_rollout`, for an evaluation of ``--custom-eval-rollout-log-function-path``."""
    return _log(args, "--custom-eval-rollout-log-function-path", rollout_id, args, data, extra_metrics)


def _log(args: Namespace, flag: str, *values: Any) -> bool:
    path = getattr(args, flag.removeprefix("--").replace("-", "_"))
    if path is None:
        return False
    function, where = load_function(path, flag=flag), f"{flag} {path}"
    call = call_hook(function, where, *values, limit=Limit(args.rollout_timeout, "--rollout-timeout", where))
    with _one_log_at_a_time:
        result = background_loop().run(call, timeout=args.rollout_timeout, what=where)
    if result is not None and not isinstance(result, (bool, np.bool_)):
        raise HookError(f"{where} must return True (it has logged all it wants to) or False, not {result!r:.80}")
    return bool(result)
