"""Where the engines are, and calling all of them at once."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from slime.backends.sglang.client import EngineControl, EngineError

_T = TypeVar("_T")


@dataclass(frozen=True)
class EngineAddress:
    """One engine, as a trainer reaches it."""

    url: str
    num_gpus: int
    generate_key: str | None = None
    admin_key: str | None = None

    def control(self, timeout: float) -> EngineControl:
        """A client whose every call ends within ``timeout`` seconds."""
        return EngineControl(self.url, self.admin_key, self.generate_key, timeout)


def call_all(
    calls: Mapping[str, Callable[[], _T]], timeout: float, phase: str, *, settle: bool = False
) -> dict[str, _T]:
    """Make calls at the same time; return when all have returned, or as soon as one has failed.

    A call that blocks for ever cannot be cut off in Python. It is left to a daemon thread, which, unlike one of an
    executor, does not keep this process from ending.

    Args:
        calls: by the name under which an error mentions them.
        timeout: seconds for all of them.
        phase: what is being done, for the error.
        settle: when one has failed, wait for the others as well, because they use what the caller then takes away. Not
            for calls that wait for each other.

    Raises:
        EngineError: a call has raised one, or the deadline has passed; it names the phase and the calls.
        Exception: any other that a call raised.
    """
    results: queue.SimpleQueue[tuple[str, _T | BaseException]] = queue.SimpleQueue()

    def run(name: str, call: Callable[[], _T]) -> None:
        try:
            results.put((name, call()))
        except BaseException as error:
            results.put((name, error))

    for name, call in calls.items():
        threading.Thread(target=run, args=(name, call), name=f"{phase}: {name}", daemon=True).start()
    returned: dict[str, _T] = {}
    failures: dict[str, BaseException] = {}
    deadline = time.monotonic() + timeout
    while len(returned) + len(failures) < len(calls) and (settle or not failures):
        try:
            name, result = results.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            missing = ", ".join(name for name in calls if name not in {**returned, **failures})
            late = EngineError(f"no answer within {timeout:.0f} s (--weight-update-timeout) from {missing}")
            failures.setdefault(missing, late)
            break
        if isinstance(result, BaseException):
            failures[name] = result
        else:
            returned[name] = result
    for failure in failures.values():
        if isinstance(failure, EngineError):
            raise EngineError(f"{phase}: {failure}") from failure
        raise failure
    return returned
