"""Calling a user's functions: off the event loop where they block, and with errors that say whose they are."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from slime.utils.errors import SlimeError


class HookError(SlimeError):
    """A user's function failed or returned what it must not; the message names the flag, the path and the cause."""


async def call_hook(function: Callable[..., Any], where: str, *args: Any, **kwargs: Any) -> Any:
    """Call a sync or async user function; a sync one runs in a thread, so that it cannot stall the event loop.

    Args:
        function: the user's function.
        where: flag and path, for the error message.

    Raises:
        HookError: the function raised; the message holds its traceback.
    """
    with naming(where):
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        result = await asyncio.to_thread(function, *args, **kwargs)
        return await result if inspect.isawaitable(result) else result


def call_quick_hook(function: Callable[..., Any], where: str, *args: Any, **kwargs: Any) -> Any:
    """As `call_hook`, of a sync function and from synchronous code."""
    with naming(where):
        return function(*args, **kwargs)


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """Within the block a user's code runs: what it raises becomes a HookError with flag, path and traceback."""
    try:
        yield
    except HookError:
        raise
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        raise HookError(f"{where} raised {type(error).__name__}: {error}\n{trace}") from error


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether ``function`` takes a keyword argument ``name``."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def accepted(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Those of the keyword arguments that ``function`` takes."""
    return {name: value for name, value in arguments.items() if accepts(function, name)}
