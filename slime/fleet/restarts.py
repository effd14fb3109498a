"""Starting again what was lost: how often that may be, when, and what becomes of each try."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from slime.fleet.membership import Member
from slime.ray.supervision import Deadline

_HOUR_S = 3600.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 60.0
_END_S = 40.0
"""In which an engine ends its servers on all nodes, killed ones among them."""


class Budget:
    """How often each of several may be started again within an hour."""

    def __init__(self, limit: int, clock: Callable[[], float] | None = None) -> None:
        self.limit, self._clock = limit, clock or time.monotonic
        self._taken: defaultdict[str, deque[float]] = defaultdict(deque)

    def take(self, name: str) -> bool:
        """Whether it may be started once more; then that is counted."""
        taken, now = self._taken[name], self._clock()
        while taken and taken[0] <= now - _HOUR_S:
            taken.popleft()
        if len(taken) >= self.limit:
            return False
        taken.append(now)
        return True


def pause_before(attempt: int) -> float:
    """Seconds to wait before the n-th start in a row that failed so far, from 0; the first one waits for nothing."""
    return min(_FIRST_PAUSE_S * 2 ** (attempt - 1), _LONGEST_PAUSE_S) if attempt else 0.0


@dataclass
class Comeback:
    """One engine on its way back."""

    member: Member
    """Its latest life."""
    noticed: float = field(default_factory=time.monotonic)
    """When it was found to be lost."""
    attempt: int = 0
    """Starts of it that have failed."""
    not_before: float = 0.0
    ending: ray.ObjectRef | None = None
    """Of the end of the life before, while that is waited for."""
    ends_by: float = 0.0
    starting: ray.ObjectRef | None = None
    starts_by: float = 0.0
    joined: bool = False
    """Whether it has started, and is waiting for what it needs to serve."""


class _Fleet(Protocol):
    """Who has the engines."""

    def next_life(self, member: Member) -> Member:
        """Make the actor of the next life, on the same slots."""

    def came_up(self, comeback: Comeback, url: str) -> None:
        """It answers at ``url``."""

    def did_not_start(self, comeback: Comeback, phase: str, cause: str) -> None:
        """Its actor is gone again; whoever hears of it says what becomes of it."""


class Restarts:
    """The engines that are on their way back, by name. Everything happens in `tick`, which waits for nothing."""

    def __init__(self, fleet: _Fleet, limit: int, start: Deadline) -> None:
        """Each may be started ``limit`` times in an hour; ``start`` bounds the start of an actor and its servers."""
        self._fleet, self._start = fleet, start
        self._budget = Budget(limit)
        self._under_way: dict[str, Comeback] = {}
        self.beside_trainers = True
        """Whether engines on the trainers' slots may begin to start now."""

    def __iter__(self) -> Iterator[Comeback]:
        return iter(list(self._under_way.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._under_way

    def take(self, member: Member) -> bool:
        """Begin to bring back an engine that was lost; False, and nothing is begun, where its budget is spent."""
        if not self._budget.take(member.name):
            return False
        before = self._under_way.get(member.name)
        comeback = self._under_way[member.name] = Comeback(member)
        if before is not None:  # lost again before it served
            comeback.noticed = before.noticed
        # It ends its servers on every node, so that their memory is free; one that hangs itself is killed after all.
        comeback.ending, comeback.ends_by = member.actor.stop.remote(), time.monotonic() + _END_S
        return True

    def again(self, comeback: Comeback) -> float | None:
        """Try once more, after a pause: how many seconds that is; None where the budget is spent."""
        if not self._budget.take(comeback.member.name):
            self.drop(comeback.member.name)
            return None
        comeback.attempt += 1
        pause = pause_before(comeback.attempt)
        comeback.not_before = time.monotonic() + pause
        return pause

    def drop(self, name: str) -> Comeback | None:
        """Leave it at that: it serves again, or is to come back no more. A start under way is ended."""
        comeback = self._under_way.pop(name, None)
        if comeback is not None and (comeback.ending is not None or comeback.starting is not None):
            ray.kill(comeback.member.actor)
        return comeback

    def beside(self) -> list[str]:
        """Those on trainers' slots that take memory, or give it back, just now."""
        changing = (each.member for each in self if each.ending is not None or each.starting is not None)
        return [member.name for member in changing if member.spec.beside_trainers]

    def tick(self, phase: str) -> None:
        """Go on with each; what the run cannot go on after is raised by whoever is told of it."""
        for comeback in self:
            if comeback.ending is not None:
                self._end(comeback)
            if comeback.ending is None and comeback.starting is None and not comeback.joined:
                self._begin(comeback)
            elif comeback.starting is not None:
                self._follow(comeback, phase)

    def _end(self, comeback: Comeback) -> None:
        if _is_ready(comeback.ending) or time.monotonic() > comeback.ends_by:
            comeback.ending = None
            # It owns what is left of the tree, and the actors of the engine's other nodes, which Ray ends likewise.
            ray.kill(comeback.member.actor)

    def _begin(self, comeback: Comeback) -> None:
        allowed = self.beside_trainers or not comeback.member.spec.beside_trainers
        if allowed and time.monotonic() >= comeback.not_before:
            comeback.member = self._fleet.next_life(comeback.member)
            comeback.starting = comeback.member.actor.start.remote()
            comeback.starts_by = time.monotonic() + self._start.seconds

    def _follow(self, comeback: Comeback, phase: str) -> None:
        failure = ""
        if _is_ready(comeback.starting):
            try:
                url = ray.get(comeback.starting, timeout=60)
            except RayError as error:
                failure = str(getattr(error, "cause", None) or error)
            else:
                comeback.starting, comeback.joined = None, True
                self._fleet.came_up(comeback, url)
        elif time.monotonic() > comeback.starts_by:
            failure = f"it has not started within {self._start}"
        if failure:
            comeback.starting = None
            ray.kill(comeback.member.actor)
            self._fleet.did_not_start(comeback, phase, failure)


def _is_ready(call: Any) -> bool:
    return bool(ray.wait([call], timeout=0)[0])
