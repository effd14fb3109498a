"""The engines that a run has lost: what each died of, and whether those that are left will do."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from slime.fleet.membership import Member
from slime.fleet.spec import EngineSpec
from slime.observability import events
from slime.ray.supervision import RunError, Supervisor

_TIME = "%Y-%m-%d %H:%M:%S"
_HEAD_LINES, _LOG_LINES = 2, 15
"""Of each engine's end, in the error of a run that has lost too many of them."""


@dataclass(frozen=True)
class _Loss:
    member: Member
    when: str
    cause: str
    """Phase, engine, status or question, the end of its log."""


class Losses:
    """Those that were lost and do not serve again yet, by name."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._lost: dict[str, _Loss] = {}
        self._untold: dict[str, str] = {}
        """Of whom the next push says that it was skipped."""

    def note(self, member: Member, cause: str) -> None:
        """That one died, or was found to hang, or did not start, and of what."""
        lines, when = cause.splitlines(), time.strftime(_TIME)
        kept = [*lines[:_HEAD_LINES], *lines[_HEAD_LINES:][-_LOG_LINES:]]
        self._lost[member.name] = _Loss(member, when, "\n".join(kept))

    def forget(self, name: str) -> str:
        """What it died of: it is back, or never was there for others."""
        self._untold.pop(name, None)
        return self._lost.pop(name).cause if name in self._lost else ""

    def will_be_skipped(self, name: str) -> None:
        """Have `take_skipped` tell of it."""
        self._untold[name] = f"{name}, which was lost at {self._lost[name].when}"

    def take_skipped(self, given: Collection[str]) -> list[str]:
        """Whom a push to those ``given`` leaves out, and no push has told of."""
        told, self._untold = [text for name, text in self._untold.items() if name not in given], {}
        return told

    def of(self, like: EngineSpec) -> list[str]:
        """The names of those that could do what engines like that one can."""
        return [name for name, loss in self._lost.items() if loss.member.spec.is_like(like)]

    def tell(
        self, kind: str, member: Member, phase: str, cause: str, action: str, seconds: float | None = None
    ) -> None:
        """A line of `events`."""
        version = self._supervisor.version
        events.add(kind, member.name, phase=phase, cause=cause, action=action, version=version, seconds=seconds)

    def check(
        self,
        member: Member,
        phase: str,
        cause: str,
        there: Iterable[Member],
        coming: Collection[str] | None,
        min_engines: int,
    ) -> None:
        """Raise RunError, with every cause, where too few are left for good, now that one is lost.

        ``there`` are those of its model that live, ``coming`` the names of those that start again; None where none ever
        does. Then one that waits for weights does not count: nobody brings them while a rollout waits for it.
        """
        model = member.spec.model
        alive = list(there)
        lost = [name for name in self.of(member.spec) if name not in (coming or ())]
        left = {other.name for other in alive if other.serves or coming is not None} | {*(coming or ())}
        least = min_engines if model.trained else 1
        if len(left) >= least and (model.tolerates_loss or not lost):
            return
        if not model.tolerates_loss or (lost == [member.name] and not alive and not coming):
            raise RunError(cause)
        waiting = ", ".join(other.name for other in alive if not other.serves)
        named = f"{len(left)} of the {least} engines of --min-engines are left" if left else "no engine is left"
        named += f" (without weights yet: {waiting})" if waiting else ""
        causes = [f"{name} was lost at {self._lost[name].when}, {self._lost[name].cause}" for name in lost]
        raise RunError("\n".join([f"{phase}: {named}, {' and '.join(lost)} were lost", *causes]))
