"""Where the engines are, and calling all of them at once."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from slime.backends.sglang.client import EngineControl, EngineError

_T = TypeVar("_T")


@dataclass(frozen=True)
class EngineAddress:
    """One engine, as a trainer reaches it. One that takes the place of another is a new one, also at the same URL."""

    url: str
    num_gpus: int
    generate_key: str | None = field(default=None, repr=False)  # messages may show the rest
    admin_key: str | None = field(default=None, repr=False)
    first_slot: int = 0
    """Of its devices, counted over those of the trainers; where they have others it says nothing."""
    apart: bool = False
    """Whether its devices are its own, in a run of which other engines may share those of the trainers."""
    life: int = 0
    """How often it was started again."""
    name: str = ""
    """In the run. An external engine that has left and joined again has another."""

    @property
    def slots(self) -> range:
        """Those of its ranks, in their order. Of a slot that trains and generates, training rank r has the r-th."""
        return range(self.first_slot, self.first_slot + self.num_gpus)

    def control(self, timeout: float) -> EngineControl:
        """A client whose every call ends within ``timeout`` seconds."""
        return EngineControl(self.url, self.admin_key, self.generate_key, timeout)


def start_all(
    calls: Mapping[str, Callable[[], _T]], timeout: float, phase: str, *, settle: bool = False
) -> Callable[[], dict[str, _T]]:
    """Start calls, all at the same time, by the names under which errors mention them; they have ``timeout`` seconds
    together. What it returns waits until all have returned, or one has failed: it returns what they did, by name, or
    raises what one did. EngineErrors, and one for the deadline, name ``phase`` and calls.

    A call that blocks for ever cannot be cut off in Python. It is left to a daemon thread, which, unlike one of an
    executor, does not keep this process from ending. With ``settle`` the others are waited for as well when one has
    failed, because they use what the caller then takes away: not for calls that wait for each other.
    """
    results: queue.SimpleQueue[tuple[str, _T | BaseException]] = queue.SimpleQueue()

    def run(name: str, call: Callable[[], _T]) -> None:
        try:
            results.put((name, call()))
        except BaseException as error:
            results.put((name, error))

    deadline = time.monotonic() + timeout
    for name, call in calls.items():
        threading.Thread(target=run, args=(name, call), name=f"{phase}: {name}", daemon=True).start()

    def wait() -> dict[str, _T]:
        returned: dict[str, _T] = {}
        failures: dict[str, BaseException] = {}
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

    return wait
