"""Which engines a run has, in versions: whoever was given one can tell it from later ones; and which one the rollout
manager, who sends the requests, was given."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayError

from slime.fleet.placement import Slot
from slime.fleet.spec import EngineSpec
from slime.ray.supervision import MARGIN_S, Supervisor, limit_of

_MANAGER = "the rollout manager"
_ANSWER_S = 60.0


@dataclass(frozen=True)
class Member:
    """One engine that has started."""

    name: str
    """As messages call it: "engine 0". None of the run's other engines ever has the same."""
    spec: EngineSpec
    url: str
    actor: Any = field(repr=False)
    slots: tuple[Slot, ...] = field(repr=False)
    serves: bool = True
    """Whether it is to get requests: one that joins does when it has the current weights."""
    rank: int = 0
    """Its number among those of its model."""
    life: int = 0
    """How often it was started again."""

    @property
    def called(self) -> str:
        """Its name, and which life it is after the first one: what happens to that says nothing of the next."""
        return f"{self.name} (start {self.life + 1})" if self.life else self.name


@dataclass(frozen=True)
class Membership:
    """The engines of a run, in the order of their joining; whoever was given a version can tell it from later ones."""

    version: int = 0
    engines: tuple[Member, ...] = ()

    def having(self, *joined: Member) -> Membership:
        """The next version, in which these are there, in the place of those of their names."""
        members = {member.name: member for member in (*self.engines, *joined)}
        return replace(self, version=self.version + 1, engines=tuple(members.values()))

    def without(self, name: str) -> Membership:
        """The next version, without the engine of this name."""
        left = tuple(member for member in self.engines if member.name != name)
        return replace(self, version=self.version + 1, engines=left)

    @property
    def trained(self) -> list[Member]:
        """Those that get the trainers' weights."""
        return [member for member in self.engines if member.spec.model.trained]

    @property
    def open_urls(self) -> frozenset[str]:
        """Where those are that ask for none of the run's keys."""
        return frozenset(member.url for member in self.engines if not member.spec.keyed)

    def serving(self, model: str) -> dict[str, Any]:
        """The actors of a model's engines that are to get requests, by URL."""
        return {m.url: m.actor for m in self.engines if m.serves and m.spec.model.name == model}


class Registrar:
    """Has the rollout manager send requests to those of a membership that serve, and knows what it has confirmed."""

    def __init__(self, args: argparse.Namespace, supervisor: Supervisor) -> None:
        self._args, self._supervisor = args, supervisor
        self._manager: Any = None
        self._opened: ray.ObjectRef | None = None
        self.is_away = False
        """Whether the manager has died, and no other serves yet: nothing is told until `begin` tells the next one."""
        self._confirmed = Membership()
        self._calls: dict[ray.ObjectRef, Membership] = {}
        """Those that nobody waits for."""

    @property
    def has_begun(self) -> bool:
        """Whether engines get requests."""
        return self._manager is not None

    def begin(self, manager: Any, membership: Membership, phase: str, opened: ray.ObjectRef | None) -> None:
        """Go on with this manager, once it has been told who is there, which it hears when ``opened`` is there."""
        if self.has_begun:  # the next one hears at once of those that die while its routers open
            self._manager, self._opened, self.is_away = manager, opened, False
        self._ask(manager, membership, phase, opened)
        self._manager = manager

    def tell(self, membership: Membership, phase: str) -> None:
        """Tell it who is there, and wait until it has answered."""
        if not self.is_away:
            self._ask(self._manager, membership, phase, self._opened)

    def _ask(self, manager: Any, membership: Membership, phase: str, opened: ray.ObjectRef | None) -> None:
        limit = limit_of(self._args, "engine_start_timeout", MARGIN_S)
        if self._supervisor.wait({_MANAGER: manager.serve.remote(membership, opened)}, phase, limit):
            self._confirm(membership)

    def tell_later(self, membership: Membership, phase: str) -> None:
        """`tell`, and wait for nothing: its failure ends whatever the driver then waits for."""
        if not self.is_away:
            call = self._manager.serve.remote(membership, self._opened)
            self._supervisor.expect(_MANAGER, call, phase)
            self._calls[call] = membership

    def hear(self) -> None:
        """Note what it has answered meanwhile."""
        for call, membership in list(self._calls.items()):
            if ray.wait([call], timeout=0)[0]:
                del self._calls[call]
                with contextlib.suppress(RayError):  # of one that has died: another is told anew
                    ray.get(call, timeout=_ANSWER_S)
                    self._confirm(membership)

    def _confirm(self, membership: Membership) -> None:
        if membership.version > self._confirmed.version:
            self._confirmed = membership

    def registered(self) -> frozenset[str]:
        """Whom requests reach, by the names of their lives (`Member.called`). From any thread."""
        return frozenset(member.called for member in self._confirmed.engines if member.serves)
