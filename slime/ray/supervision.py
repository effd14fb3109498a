"""Waiting for Ray calls: every wait has a deadline and ends at once when any process of the run dies."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from slime.options.errors import OptionError
from slime.utils.errors import BadInputError, SlimeError

LOAD_DATA = "load data"
RESTORE_DATA = "restore the data source"
_POLL_S = 1.0
_BLAME_S = 5.0
_FRAMES = 3


class RunError(SlimeError):
    """The run cannot go on; the message says who failed, in which phase, and why."""

    exit_status = 1


class InputError(RunError):
    """What the user gave cannot be run, as far as only the cluster or the data could tell."""

    exit_status = 2


@dataclass(frozen=True)
class Deadline:
    """How long a wait may last, and the flag that says so (None: no flag does)."""

    seconds: float
    flag: str | None = None

    def __str__(self) -> str:
        return f"{self.seconds:.0f} s" + (f" ({self.flag})" if self.flag else "")


class Supervisor:
    """Knows every actor of the run, and waits for their answers.

    Each watched actor has a method ``watch`` that only returns, by raising, when the process it owns has died. The
    death of an idle actor thus ends the wait for a busy one that would otherwise hang in a collective.
    """

    def __init__(self) -> None:
        self._watches: dict[ray.ObjectRef, str] = {}
        self._background: dict[ray.ObjectRef, tuple[str, str]] = {}
        self.version = "none yet"

    def watch(self, name: str, actor: Any) -> None:
        """Fail every later `wait` when ``actor`` or the process that it owns dies."""
        self._watches[actor.watch.remote()] = name

    def expect(self, who: str, call: ray.ObjectRef, phase: str) -> None:
        """Fail every later `wait` when ``call``, whose answer is waited for at another time, fails."""
        self._background[call] = (who, phase)

    def wait(self, calls: Mapping[str, ray.ObjectRef], phase: str, limit: Deadline) -> list[Any]:
        """The answers of ``calls`` (who was asked -> reference), in their order.

        Raises:
            RunError: a call failed, of these or of those expected; a watched actor died; or the deadline passed.
        """
        deadline = time.monotonic() + limit.seconds
        names = {ref: who for who, ref in calls.items()}
        pending = list(names)
        while pending:
            left = deadline - time.monotonic()
            if left <= 0:
                waiting = ", ".join(names[ref] for ref in pending)
                raise RunError(f"{phase}: no answer within {limit} from {waiting} (weight version {self.version})")
            others = [ref for ref in self._background if ref not in names]
            done, _ = ray.wait([*pending, *self._watches, *others], num_returns=1, timeout=min(left, _POLL_S))
            for ref in done:
                if ref in self._watches:
                    self._raise_failure(ref, self._watches[ref], phase)
                who, its_phase = self._background.pop(ref, (names.get(ref, ""), phase))
                if self._failed(ref):
                    self._blame(ref, who, its_phase)
                pending = [p for p in pending if p != ref]
        return [_get(ref) for ref in names]

    @staticmethod
    def _failed(ref: ray.ObjectRef) -> bool:
        try:
            _get(ref)
        except RayError:
            return True
        return False

    def _blame(self, ref: ray.ObjectRef, who: str, phase: str) -> None:
        # A call often fails because somebody else died; the death explains more than the broken connection.
        dead, _ = ray.wait(list(self._watches), num_returns=1, timeout=_BLAME_S) if self._watches else ([], [])
        for watch in dead:
            self._raise_failure(watch, self._watches[watch], phase)
        self._raise_failure(ref, who, phase)

    def _raise_failure(self, ref: ray.ObjectRef, who: str, phase: str) -> None:
        try:
            _get(ref)
        except RayTaskError as error:
            is_input = phase in (LOAD_DATA, RESTORE_DATA) and isinstance(error.cause, (BadInputError, OptionError))
            kind = InputError if is_input else RunError
            raise kind(f"{phase}: {who} failed (weight version {self.version}): {_reason(error)}") from None
        except RayActorError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise RunError(f"{phase}: the process of {who} died (weight version {self.version}): {lines[0]}") from None
        except RayError as error:
            raise RunError(f"{phase}: Ray could not run {who} (weight version {self.version}): {error}") from None
        raise RunError(f"{phase}: {who} ended its watch without a failure")


def _get(ref: ray.ObjectRef) -> Any:
    try:
        return ray.get(ref, timeout=60)
    except GetTimeoutError:
        raise RunError("an answer that Ray called ready could not be fetched within 60 s") from None


def _reason(error: RayTaskError) -> str:
    """The message of an error that tells all by itself; the end of the remote traceback of any other."""
    if isinstance(error.cause, (SlimeError, OptionError)):
        return str(error.cause)
    lines = str(error).rstrip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    return "\n" + "\n".join(lines[frames[-_FRAMES] if len(frames) > _FRAMES else 0 :])
