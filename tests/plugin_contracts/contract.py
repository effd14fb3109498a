"""What a contract is, how one of its checks is run on a user's function, and what is told when it is broken."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.entry.arguments import GROUPS
from slime.options.errors import OptionError
from slime.options.flags.schema import flag_of, hook_fields
from slime.rollout.engine.state import router_url
from slime.rollout.runtime import RolloutRuntime
from slime.utils import calls
from slime.utils.calls import Call, form_of, parameters_of, signature_of
from slime.utils.errors import SlimeError
from slime.utils.misc import load_function, load_module, split_function_path
from tests.plugin_contracts.engine import StandInEngine

SHOWN = 300
_SLIME = Path(calls.__file__).parents[1]
_LAST_FRAMES = 3
FIELDS = {flag_of(option): option for option in hook_fields(GROUPS)}


class BrokenError(AssertionError):
    """A function does not keep its contract.

    Args:
        problem: what is wrong.
        change: what its author can do about it; None: what the contract says in general.
    """

    def __init__(self, problem: str, change: str | None = None) -> None:
        super().__init__(problem)
        self.change = change


class NotMeantError(Exception):
    """A check has no meaning for a function; the message says why."""


@dataclass(frozen=True)
class Contract:
    """What the functions of one flag are held to."""

    flag: str
    own: tuple[str, ...]
    """Paths of functions of slime and its examples, which are checked where the user names none."""
    advice: str
    """What such a function does, in a sentence: what to change where a check has no better advice."""
    checks: tuple[Callable[[Subject], None], ...]
    """Each titled by its docstring, the signature apart."""

    @property
    def forms(self) -> tuple[Call, ...]:
        """The forms that a function may have."""
        return FIELDS[self.flag].metadata["call"]


@dataclass
class Subject:
    """A function under check, and what it is checked with."""

    contract: Contract
    path: str
    """With the function's name in it."""
    args: Namespace
    engine: StandInEngine
    notes: list[str] = field(default_factory=list)
    """What the author may want to know although nothing is broken."""
    returned: list[Any] = field(default_factory=list)
    """Results of the function's calls so far."""
    messages: bool = False
    """Whether the prompts are chat messages, which no template was applied to."""

    @property
    def function(self) -> Any:
        """The function, or class."""
        return load_function(self.path, flag=self.contract.flag)

    @property
    def form(self) -> Call:
        """How it is called; raises OptionError where it has none of the forms."""
        return form_of(self.function, self.contract.forms, f"{self.contract.flag} {self.path}")

    def must(self, holds: bool, problem: str, change: str | None = None) -> None:
        """Raise BrokenError unless something holds."""
        if not holds:
            raise BrokenError(problem, change)

    def takes(self, name: str) -> bool:
        """Whether the function has a parameter of this name, or takes any by name."""
        parameters = parameters_of(self.function)
        return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


_RUNTIMES: list[RolloutRuntime] = []
"""Kept: what a function has under way may go on after its check, as it may after a rollout."""


def run_check(check: Callable[[Subject], None], subject: Subject, timeout: float) -> None:
    """Run one check in a thread of its own, which is left behind where the user's function hangs.

    Raises:
        BrokenError, NotMeantError: and whatever else slime or the function raised.
    """
    errors: list[BaseException] = []
    runtime = RolloutRuntime(subject.args)
    _RUNTIMES.append(runtime)
    runtime.http.add_api_keys({router_url(subject.args): subject.args.sglang_router_api_key})

    def run() -> None:
        try:
            with runtime.active(), _recorded(subject):
                check(subject)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="contract", daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        raise BrokenError(
            f"it did not end within {timeout:g} s (--contract-timeout){_where_it_hangs(subject)}",
            "give everything that it waits for a deadline",
        )
    if errors:
        raise errors[0]


def report(subject: Subject, title: str, error: BaseException) -> str:
    """The block that tells a user what is wrong with a function."""
    contract = subject.contract
    trace = _own_trace(subject, error)
    raised = "mend what it raised: the traceback ends there" if trace and _is_told(error) else None
    if raised and subject.messages:
        raised += "; if it takes text, add --apply-chat-template: prompts are lists of chat messages without it"
    change = getattr(error, "change", None) or raised or contract.advice
    lines = [
        f"BROKEN  {contract.flag} {subject.path}",
        f"  check:    {title}",
        f"  found:    {_head(subject.function)}{_place(subject.function)}",
        f"  expected: {contract.forms[0]}",
        *(f"        or  {call}" for call in contract.forms[1:]),
    ]
    if subject.returned and not raised:
        lines.append(f"  returned: {_shown(subject.returned[-1])}")
    lines += [f"  problem:  {problem_of(subject, error)}", f"  change:   {change}"]
    if trace:
        lines += ["  traceback:", *(f"    {line}" for line in trace.splitlines())]
    return "\n".join(lines)


@contextlib.contextmanager
def _recorded(subject: Subject) -> Iterator[None]:
    """Within the block, note what the function returns."""
    source, name = split_function_path(subject.path)
    *outer, name = str(name).split(".")
    holder = functools.reduce(getattr, outer, load_module(source))
    function = getattr(holder, name)
    if not inspect.isfunction(function) or outer:
        yield
        return

    @functools.wraps(function)
    async def record_async(*args: Any, **kwargs: Any) -> Any:
        subject.returned.append(await function(*args, **kwargs))
        return subject.returned[-1]

    @functools.wraps(function)
    def record(*args: Any, **kwargs: Any) -> Any:
        subject.returned.append(function(*args, **kwargs))
        return subject.returned[-1]

    setattr(holder, name, record_async if inspect.iscoroutinefunction(function) else record)
    try:
        yield
    finally:
        setattr(holder, name, function)


def problem_of(subject: Subject, error: BaseException) -> str:
    """The first line of an error's message, without flag and path, which the block has above."""
    message = str(error).strip().splitlines()[0] if str(error).strip() else ""
    for path in (subject.path, Path(subject.path).name):
        message = message.replace(f"{subject.contract.flag} {path}", "").replace(path, "it")
    message = message.strip().removeprefix(":").strip()
    return message if _is_told(error) else f"slime cannot work with it: {type(error).__name__}: {message}"


def _is_told(error: BaseException) -> bool:
    """Whether an error's message is written for users: slime raises ValueError for what it refuses."""
    if isinstance(error, (BrokenError, SlimeError, OptionError)):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, ValueError) and bool(frames) and Path(frames[-1].filename).is_relative_to(_SLIME)


def _own_trace(subject: Subject, error: BaseException) -> str:
    """The traceback of what the user's file raised, from its first frame on, or of what slime could not foresee."""
    file, cause = _file(subject.function), error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    frames = traceback.extract_tb(cause.__traceback__)
    first = next((i for i, frame in enumerate(frames) if Path(frame.filename) == file), None)
    if first is None and _is_told(error):
        return ""
    if first is None:
        first = -_LAST_FRAMES
    return "".join(traceback.format_list(frames[first:]) + traceback.format_exception_only(cause)).rstrip()


def _where_it_hangs(subject: Subject) -> str:
    file = str(_file(subject.function))
    for frame in sys._current_frames().values():
        for entry in reversed(traceback.extract_stack(frame)):
            if entry.filename == file:
                return f"; it is at line {entry.lineno}: {entry.line}"
    return ""


def _file(function: Any) -> Path | None:
    try:
        source = inspect.getsourcefile(inspect.unwrap(function))
    except Exception:  # an object may raise anything when it is asked for something
        return None
    return Path(source) if source else None


def _head(function: Any) -> str:
    """Kind, name and parameters, without their types; the kind alone of what cannot be asked for more."""
    try:
        return _described(function)
    except Exception:
        return f"an object of {type(function).__name__}"


def _described(function: Any) -> str:
    name, signature = getattr(function, "__name__", type(function).__name__), signature_of(function)
    if signature is not None:
        bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
        name += str(inspect.Signature(bare))
    if inspect.isclass(function):
        return f"class {name}"
    return f"{'async ' if inspect.iscoroutinefunction(function) else ''}{name}"


def _place(function: Any) -> str:
    try:
        line = inspect.getsourcelines(inspect.unwrap(function))[1]
    except Exception:
        return ""
    return f"  ({_file(function)}:{line})"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"
