"""Engines that start while others serve, those that were lost and new ones: how often that is tried, when, and what
becomes of each try."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from slime.fleet.membership import Member
from slime.ray.budget import Budget, pause_before
from slime.ray.supervision import MARGIN_S, Deadline, limit_of

_END_S = 40.0
"""In which an engine ends its servers on all nodes, killed ones among them."""


Told = Callable[[str, str], None]
"""Called with the name of an engine that was to join, and with why it did not; with no reason when it has."""


@dataclass
class Arrival:
    """One engine on its way into the run."""

    member: Member
    """Its latest life."""
    told: Told | None = None
    """Who hears what becomes of one that was never there; None of one that comes back."""
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

    def came_up(self, arrival: Arrival, url: str) -> None:
        """It answers at ``url``."""

    def did_not_start(self, arrival: Arrival, phase: str, cause: str) -> None:
        """Its actor is gone again; whoever hears of it says what becomes of it."""


class Arrivals:
    """The engines that are on their way, by name. Everything happens in `tick`, which waits for nothing."""

    def __init__(self, fleet: _Fleet, args: argparse.Namespace) -> None:
        self._fleet, self._args = fleet, args
        self._under_way: dict[str, Arrival] = {}
        self.beside_trainers = True
        """Whether engines on the trainers' slots may begin to start now."""

    @functools.cached_property
    def _budget(self) -> Budget:
        return Budget(self._args.engine_restart_limit)

    @property
    def _limit(self) -> Deadline:
        """Of the start of an actor and its servers."""
        return limit_of(self._args, "engine_start_timeout", MARGIN_S)

    def __iter__(self) -> Iterator[Arrival]:
        return iter(list(self._under_way.values()))

    def join(self, member: Member, told: Told) -> None:
        """Begin to start one that was never there. It is tried once; ``told`` is called when that is over."""
        arrival = self._under_way[member.name] = Arrival(member, told)
        self._call_start(arrival)

    def take(self, member: Member) -> bool:
        """Begin to bring back an engine that was lost; False, and it is on its way no more, where its budget is
        spent."""
        before = self._under_way.pop(member.name, None)
        if not self._budget.take(member.name):
            return False
        arrival = self._under_way[member.name] = Arrival(member)
        if before is not None:  # lost again before it served
            arrival.noticed = before.noticed
        # It ends its servers on every node, so that their memory is free; one that hangs itself is killed after all.
        arrival.ending, arrival.ends_by = member.actor.stop.remote(), time.monotonic() + _END_S
        return True

    def again(self, arrival: Arrival) -> float | None:
        """Try once more, after a pause: how many seconds that is; None where the budget is spent."""
        if not self._budget.take(arrival.member.name):
            self.drop(arrival.member.name)
            return None
        arrival.attempt += 1
        pause = pause_before(arrival.attempt)
        arrival.not_before = time.monotonic() + pause
        return pause

    def drop(self, name: str) -> Arrival | None:
        """Leave it at that: it serves, or is not to come any more. A start under way is ended."""
        arrival = self._under_way.pop(name, None)
        if arrival is not None and (arrival.ending is not None or arrival.starting is not None):
            ray.kill(arrival.member.actor)
        return arrival

    def beside(self) -> list[str]:
        """Those on trainers' slots that take memory, or give it back, just now."""
        changing = (each.member for each in self if each.ending is not None or each.starting is not None)
        return [member.name for member in changing if member.spec.beside_trainers]

    def tick(self, phase: str) -> None:
        """Go on with each; what the run cannot go on after is raised by whoever is told of it."""
        for arrival in self:
            if arrival.ending is not None:
                self._end(arrival)
            if arrival.ending is None and arrival.starting is None and not arrival.joined:
                self._begin(arrival)
            elif arrival.starting is not None:
                self._follow(arrival, phase)

    def _end(self, arrival: Arrival) -> None:
        if _is_ready(arrival.ending) or time.monotonic() > arrival.ends_by:
            arrival.ending = None
            # It owns what is left of the tree, and the actors of the engine's other nodes, which Ray ends likewise.
            ray.kill(arrival.member.actor)

    def _begin(self, arrival: Arrival) -> None:
        allowed = self.beside_trainers or not arrival.member.spec.beside_trainers
        if allowed and time.monotonic() >= arrival.not_before:
            arrival.member = self._fleet.next_life(arrival.member)
            self._call_start(arrival)

    def _call_start(self, arrival: Arrival) -> None:
        arrival.starting = arrival.member.actor.start.remote()
        arrival.starts_by = time.monotonic() + self._limit.seconds

    def _follow(self, arrival: Arrival, phase: str) -> None:
        failure = ""
        if _is_ready(arrival.starting):
            try:
                url = ray.get(arrival.starting, timeout=60)
            except RayError as error:
                failure = str(getattr(error, "cause", None) or error)
            else:
                arrival.starting, arrival.joined = None, True
                self._fleet.came_up(arrival, url)
        elif time.monotonic() > arrival.starts_by:
            failure = f"it has not started within {self._limit}"
        if failure:
            arrival.starting = None
            ray.kill(arrival.member.actor)
            self._fleet.did_not_start(arrival, phase, failure)


def _is_ready(call: Any) -> bool:
    return bool(ray.wait([call], timeout=0)[0])
