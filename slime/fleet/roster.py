"""The engines that a run has: their actors, made and ended, and calls to all of them at once."""

from __future__ import annotations

import argparse
import functools
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import ray

from slime.fleet.actors import ActorMaker
from slime.fleet.external import Keys
from slime.fleet.membership import Member, Membership
from slime.fleet.placement import Placement, Slot
from slime.fleet.spec import EngineSpec, Fleet
from slime.ray.supervision import Deadline, RunError, Supervisor
from slime.weights import EngineAddress


class Roster(ABC):
    """Who there is, in versions. What becomes of one that dies is decided by whoever completes this."""

    def __init__(self, args: argparse.Namespace, supervisor: Supervisor) -> None:
        self._args, self._supervisor = args, supervisor
        self.membership = Membership()
        self._placement = Placement([], [], [])
        self._actors = ActorMaker(args, self._placement, None)
        self._members: dict[str, Member] = {}
        """All that there were, by name."""
        self._trains = False

    def create(self, fleet: Fleet, placement: Placement, keys: Keys = None) -> None:
        """Make the actors of all the fleet's engines, each on the first of its slots."""
        self._placement, self._trains = placement, fleet.trainers > 0
        self._actors = ActorMaker(self._args, placement, keys)
        for spec, slots in zip(fleet.engines, placement.engines, strict=True):
            for number in range(spec.count):
                first = number * spec.width
                member = self._make(spec, slots[first : first + spec.width])
                self.membership = self.membership.having(member)
                self._watch(member)

    def _make(self, spec: EngineSpec, slots: list[Slot]) -> Member:
        """One more, which nobody knows yet."""
        rank = sum(other.spec.model == spec.model for other in self._members.values())
        name, actor = self._actors.make(spec, slots, rank)
        member = self._members[name] = Member(name, spec, "", actor, tuple(slots), rank=rank)
        return member

    def _watch(self, member: Member) -> None:
        self._supervisor.watch(member.called, member.actor, functools.partial(self._go_on_without, member.name))

    def started(self, urls: list[str]) -> None:
        """Note the addresses at which all answer, in the order of `begin`; RunError if several have the same."""
        if len(set(urls)) < len(urls):
            raise RunError(f"start engines: several have the same address: {', '.join(sorted(urls))}")
        members = zip(self.membership.engines, urls, strict=True)
        self.membership = self.membership.having(*(replace(member, url=url) for member, url in members))

    def _free(self, member: Member) -> None:
        # It owns the server's supervisor, which ends what is left of the tree when its owner goes, and the actors of
        # the engine's other nodes, which Ray ends likewise.
        ray.kill(member.actor)
        self._placement.give_back(list(member.slots))

    def begin(self, method: str, *values: Any, sleepers: bool = False) -> dict[str, ray.ObjectRef]:
        """Call a method of all that live, or only of those that sleep while trainers train, by name."""
        return {
            member.called: getattr(member.actor, method).remote(*values)
            for member in self.membership.engines
            if member.spec.beside_trainers or not sleepers
        }

    def call(self, phase: str, method: str, limit: Deadline, *values: Any) -> list[Any]:
        """The answers of all sleepers that live when the call is over."""
        return self._supervisor.wait(self.begin(method, *values, sleepers=True), phase, limit)

    def leave_groups(self, names: list[str], limit: Deadline) -> None:
        """Have those of the trained model that live leave collective groups, those of these in which they are."""
        calls = {member.called: member.actor.leave_groups.remote(names) for member in self.membership.trained}
        self._supervisor.wait(calls, "leave the group of trainers that died", limit)

    def _address(self, member: Member) -> EngineAddress:
        generate_key, admin_key = self._actors.keys_of(member.spec) or (None, None)
        first = self._placement.number(member.slots[0]) if member.slots else len(self._placement.slots)
        apart = not member.spec.beside_trainers
        return EngineAddress(
            member.url, member.spec.width, generate_key, admin_key, first, apart, member.life, member.name
        )

    @abstractmethod
    def _go_on_without(self, name: str, phase: str, failure: RunError) -> None:
        """Called when the latest life of an engine is over, in ``phase``; RunError with the words of ``failure`` if the
        run cannot go on."""
