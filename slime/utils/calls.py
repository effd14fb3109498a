"""How slime calls a user's function: what it passes, what it wants back, and whether a function can be called so."""

from __future__ import annotations

import ast
import functools
import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from slime.utils.errors import BadInputError


class CallError(BadInputError):
    """A user's function cannot be called as slime would.

    Args:
        problem: why, apart from who it is.
        change: what its author can do about it, where the problem does not say so.
    """

    def __init__(self, message: str, problem: str, change: str | None = None) -> None:
        super().__init__(message)
        self.problem = problem
        self.change = change


@dataclass(frozen=True)
class Call:
    """One form of a user's function."""

    parameters: str
    """As in a definition. Those before ``*`` are passed by position, so that their names are the user's; one with a
    default is not always passed. Those behind it are passed by name: always, or, with a default, to functions that have
    such a parameter. ``**kwargs`` is for what later versions may pass."""
    returns: str
    discriminator: str | None = None
    """The parameter by whose name this form is told from the others."""
    is_async: bool = False
    """Whether it is usually ``async``; a plain function is then called in a thread."""
    may_be_async: bool = False
    """Whether it may be ``async`` where it usually is not: what it returns is awaited all the same."""

    def __str__(self) -> str:
        prefix = "async " if self.is_async else "[async] " if self.may_be_async else ""
        return f"{prefix}({self.parameters}) -> {self.returns}"

    @cached_property
    def _arguments(self) -> ast.arguments:
        given = ast.parse(f"lambda {self.parameters}: None", mode="eval").body
        assert isinstance(given, ast.Lambda)
        return given.args

    @property
    def positional(self) -> list[str]:
        """What is always passed by position."""
        names = [argument.arg for argument in self._arguments.args]
        return names[: len(names) - len(self._arguments.defaults)]

    def _by_name(self, signature: inspect.Signature) -> list[str]:
        pairs = zip(self._arguments.kwonlyargs, self._arguments.kw_defaults, strict=True)
        return [a.arg for a, default in pairs if default is None or a.arg in signature.parameters]

    def problem(self, signature: inspect.Signature) -> str | None:
        """Why a function of this signature cannot be called so."""
        try:
            signature.bind(*self.positional, **dict.fromkeys(self._by_name(signature)))
        except TypeError as error:
            return str(error)
        return None


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """A function's or class's signature; None for those that are not written in Python."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """A function's or class's parameters by name; nothing of those that have no signature."""
    signature = signature_of(function)
    return {} if signature is None else signature.parameters


def form_of(function: Callable[..., Any], calls: tuple[Call, ...], where: str) -> Call:
    """The form that a user's function has.

    Args:
        calls: the forms that there are.
        where: flag and path, for the error.

    Raises:
        CallError: it has none of them (the message has its signature and theirs), is an abstract class, is async where
            nobody would await it, or raised something of its own when it was asked.
    """
    try:
        return _form_of(function, calls, where)
    except CallError:
        raise
    except (Exception, SystemExit) as error:  # of its __getattr__, its __signature__ or a default's __repr__
        raised = " ".join(traceback.format_exception_only(error)).strip()
        problem = f"asking it for its parameters raised {raised}"
        change = "name a plain function, which may call it"
        raise CallError(f"{where}: {problem}: {change}", problem, change) from error


def _form_of(function: Callable[..., Any], calls: tuple[Call, ...], where: str) -> Call:
    if inspect.isabstract(function):
        lacking = sorted(getattr(function, "__abstractmethods__", ()))
        problem = f"the class lacks {', '.join(lacking)}, which its base class leaves to it: define what is missing"
        raise CallError(f"{where}: {problem}", problem)
    signature = signature_of(function)
    if signature is None:
        return calls[0]
    told = tuple(call for call in calls if call.discriminator in signature.parameters)
    fitting = told or tuple(call for call in calls if call.discriminator is None)
    if len(fitting) == 1:
        wrong = fitting[0].problem(signature)
        if wrong is None:
            if _is_async(function) and not (fitting[0].is_async or fitting[0].may_be_async):
                problem = "it is async, and nobody awaits it, so that it would never run"
                raise CallError(f"{where}: {problem}: write def, not async def", problem, "write def, not async def")
            return fitting[0]
        problem = wrong
    else:
        names = " or ".join(str(call.discriminator) for call in calls)
        problem = f"it must have a parameter {names}, not both: the name tells how it is called"
    forms = " or as ".join(f"({call.parameters})" for call in told or calls)
    raise CallError(f"{where}: it is called as {forms}, and takes {signature}: {problem}", problem)


def _is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it only gives something to await: an ``async`` function, a partial, or an object, of one."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
