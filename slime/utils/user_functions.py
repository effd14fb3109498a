"""Calling a user's function: its errors say whose it is, and what it raised."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Generic, TypeVar

from slime.utils.elsewhere import told
from slime.utils.errors import DeadlineError, HookError, SettingError
from slime.utils.misc import load_function

T = TypeVar("T")


@contextlib.contextmanager
def naming(where: str, passes: type[Exception] = HookError) -> Iterator[None]:
    """Within, a user's code runs: what it raises, but ``passes``, is a HookError with flag, path and traceback."""
    try:
        yield
    except (passes, DeadlineError, SettingError):
        raise
    except asyncio.CancelledError as error:
        if _is_being_cancelled():
            raise  # it is we who cancel
        raise HookError(f"{where} raised CancelledError: something that it waits for was cancelled") from error
    except SystemExit as error:
        raise HookError(f"{where} called sys.exit({error.code!r:.80})") from error
    except GeneratorExit:
        raise  # it is we who close the coroutine
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # Ctrl-C, which no other thread gets
        frames = "".join(traceback.format_exception(type(error), error, _from_theirs(error.__traceback__)))
        raise HookError(f"{where} raised {told(error)}\n{frames.rstrip()}") from error


def _is_being_cancelled() -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return task is None or task.cancelling() > 0


def _from_theirs(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of slime that come before those of the user's code."""
    own = trace
    while own is not None and own.tb_frame.f_globals.get("__name__", "").startswith("slime."):
        own = own.tb_next
    return own or trace


def call_user_function(
    flag: str, path: str, values: Mapping[str, Any], keywords: Mapping[str, Any] | None = None
) -> Any:
    """What the function that ``flag`` names by ``path`` returns, given ``values`` by position in their order, by their
    documented names, and ``keywords`` by name. BadInputError where it is not there; HookError, with its traceback,
    where it raised, or is an ``async`` function in disguise."""
    function, where = load_function(path, flag=flag), f"{flag} {path}"
    with naming(where):
        answer = function(*values.values(), **(keywords or {}))
    if inspect.iscoroutine(answer):  # of a plain function that calls an async one, which has not begun
        answer.close()
        raise HookError(f"{where} returned a coroutine, which nobody awaits here: have it return when all is done")
    return answer


TOLD: ContextVar[set[tuple[str, ...]] | None] = ContextVar("told_of_functions", default=None)
"""Where `is_first` notes."""


class setting(Generic[T]):
    """Within the block, and in coroutines and hook threads that it starts, ``variable`` has this value."""

    def __init__(self, variable: ContextVar[T], value: T) -> None:
        self._variable, self._value = variable, value

    def __enter__(self) -> None:
        self._token = self._variable.set(self._value)

    def __exit__(self, *_: object) -> None:
        self._variable.reset(self._token)


def is_first(*what: str) -> bool:
    """Whether this is asked of ``what`` for the first time: for warnings that are given once; else always."""
    noted = TOLD.get()
    is_known = noted is not None and what in noted
    if noted is not None:
        noted.add(what)
    return not is_known
