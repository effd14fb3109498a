"""Calling a user's function: its errors say whose it is, how it is called, and what it raised."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from slime.utils.errors import BadInputError, HookError, SlimeError
from slime.utils.misc import load_function


def check_parameters(
    function: Callable[..., Any], where: str, positional: Iterable[str], keywords: Iterable[str] = ()
) -> None:
    """See whether a function can be called so.

    Args:
        where: flag and path, for the error.
        positional: what it gets by position, under the names that the documentation has; the user's may be others.
        keywords: what it gets by name.

    Raises:
        BadInputError: it cannot; the message has both signatures.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some that are not written in Python have none
        return
    positional, keywords = list(positional), list(keywords)
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        expected = ", ".join([*positional, *(["*"] if keywords else []), *keywords])
        plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
        raise BadInputError(
            f"{where}: it is called as ({expected}), and takes {inspect.Signature(plain)}: {error}"
        ) from None


def call_user_function(
    flag: str, path: str, values: Mapping[str, Any], keywords: Mapping[str, Any] | None = None
) -> Any:
    """What the function that ``flag`` names by ``path`` returns.

    Args:
        values: by their documented names; they are passed by position, in this order.
        keywords: passed by name.

    Raises:
        BadInputError: it is not there, or cannot be called so.
        HookError: it raised; the message holds its traceback.
    """
    where, keywords = f"{flag} {path}", keywords or {}
    function = load_function(path, flag=flag)
    check_parameters(function, where, values, keywords)
    try:
        return function(*values.values(), **keywords)
    except SlimeError as error:
        raise HookError(f"{where}: {error}") from error
    except Exception as error:
        own = error.__traceback__ and error.__traceback__.tb_next  # without this very frame
        frames = "".join(traceback.format_exception(type(error), error, own))
        raise HookError(f"{where} raised {type(error).__name__}: {error}\n{frames.rstrip()}") from error
