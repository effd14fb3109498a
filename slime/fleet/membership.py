"""Which engines a run has, in versions: whoever was given one can tell it from later ones."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from slime.fleet.placement import Slot
from slime.fleet.spec import EngineSpec


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
