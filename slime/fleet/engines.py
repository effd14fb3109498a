"""The engines of a run: who of them lives, calling those, going on without one that has died; one joins, one leaves."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from slime.fleet.placement import Placement, Slot
from slime.fleet.spec import EngineSpec, Fleet
from slime.observability.progress import warn
from slime.ray.cluster import actor_environment, as_actor, worker_options
from slime.ray.engine_actor import EXAMINATION, EngineActor, EngineNode, EnginePlan
from slime.ray.supervision import MARGIN_S, Deadline, RunError, Supervisor, limit_of
from slime.weights import EngineAddress


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

    def serving(self, model: str) -> dict[str, Any]:
        """The actors of a model's engines that are to get requests, by URL."""
        return {m.url: m.actor for m in self.engines if m.serves and m.spec.model.name == model}


_TIME = "%Y-%m-%d %H:%M:%S"
_HEAD_LINES, _LOG_LINES = 2, 15
"""Of each engine's end, in the error of a run that has lost all of them."""
_LEAVE_S = 60.0
START_ROUTER = "start router"
Keys = tuple[str, str] | None
"""(generate, admin) of servers; None for open ones, on loopback."""


class Engines:
    """The engines of a run. Until `serve` the death of any of them ends the run, from then on that of the last one of
    its model, or of any where its model wants all. One that hangs is ended, and is then dead.

    The slots of an engine that died are free. Its requests are tried again by whoever sent them.
    """

    def __init__(self, args: argparse.Namespace, supervisor: Supervisor) -> None:
        self._args, self._supervisor = args, supervisor
        self._keys: Keys = None
        self.membership = Membership()
        self._placement = Placement([], [], [])
        self._manager: Any = None
        self._members: dict[str, Member] = {}
        """All that there were, by name."""
        self._deaths: dict[str, tuple[str, str]] = {}
        """When one died, or was found to hang, and of what: phase, engine, status or question, the end of its log."""
        self._skipped: list[str] = []
        """Who died, as the next push says."""
        self._trains = False

    # ---- their lives

    def create(self, fleet: Fleet, placement: Placement, keys: Keys = None) -> None:
        """Make the actors of all the fleet's engines, each on the first of its slots."""
        self._placement, self._trains, self._keys = placement, fleet.trainers > 0, keys
        for spec, slots in zip(fleet.engines, placement.engines, strict=True):
            for first in range(0, len(slots), spec.width):
                self._make(spec, slots[first : first + spec.width], serves=True)

    def _make(self, spec: EngineSpec, slots: list[Slot], *, serves: bool) -> Member:
        """The actor is on the first of the slots; it makes those of the engine's other nodes."""
        rank = sum(other.spec.model == spec.model for other in self._members.values())
        nodes, where = [], {"runtime_env": actor_environment(self._placement.interface())}
        for first in range(0, spec.width, spec.on_node):
            part = slots[first : first + spec.on_node]
            options = {**where, **self._placement.options(part[0], trains=False)}
            nodes.append(EngineNode(options, [slot.gpu for slot in part if slot.gpu is not None] or None))
        its_args = spec.options(worker_options(self._args), self._placement.on_gpus)
        plan = EnginePlan(its_args, rank, self._keys, nodes, spec.model.called("engine"))
        actor = as_actor(EngineActor, **{EXAMINATION: 1}).options(**nodes[0].options).remote(plan)
        name = f"{plan.name} {rank}"
        member = self._members[name] = Member(name, spec, "", actor, tuple(slots), serves)
        self.membership = self.membership.having(member)
        self._supervisor.watch(name, actor, functools.partial(self._go_on_without, name))
        return member

    def started(self, urls: list[str]) -> None:
        """Note the addresses at which all answer, in the order of `begin`; RunError if several have the same."""
        if len(set(urls)) < len(urls):
            raise RunError(f"start engines: several have the same address: {', '.join(sorted(urls))}")
        members = zip(self.membership.engines, urls, strict=True)
        self.membership = self.membership.having(*(replace(member, url=url) for member, url in members))

    def serve(self, manager: Any, opened: ray.ObjectRef | None) -> None:
        """Have the rollout manager send them requests, when ``opened``, its call that opens the routers, has returned.
        From now on go on without one that dies where its model tolerates that, as long as it has another."""
        self._tell(manager, START_ROUTER, opened)
        self._manager = manager

    def add(self, model: str) -> str:
        """Start one more engine like the first of ``model``; its name. One of the trained model gets no request before
        `push` has brought it the weights. RunError where there is no such model, its engines are beside trainers, no
        slot is free, or it does not start; the engines are then those of before."""
        specs = {member.spec.model.name: member.spec for member in reversed(self._members.values())}
        if model not in specs:
            raise RunError(f"add an engine: no model {model!r} is served, there are: {', '.join(specs) or 'none'}")
        if (spec := specs[model]).beside_trainers:
            raise RunError(f"add an engine: those of {model!r} are on the trainers' slots, and no other can join them")
        member = self._make(spec, self._placement.take(spec, self._args.placement_timeout), serves=False)
        phase, limit = f"start {member.name}", limit_of(self._args, "engine_start_timeout", MARGIN_S)
        try:
            urls = self._supervisor.wait({member.name: member.actor.start.remote()}, phase, limit)
        except RunError:
            self._supervisor.forget(member.name)
            self._leave_out(member)
            raise
        if not urls:  # its death was noticed
            raise RunError(f"{phase}: {self._deaths.pop(member.name)[1]}")
        waits = spec.model.trained and self._trains
        self.membership = self.membership.having(replace(member, url=urls[0], serves=not waits))
        self._tell(self._manager, phase)
        return member.name

    def remove(self, name: str) -> None:
        """End an engine, whose requests go on at others; RunError if there is none, or no other serves its model."""
        named = {member.name: member for member in self.membership.engines}
        if name not in named:
            raise RunError(f"remove {name}: there is no such engine, there are: {', '.join(named)}")
        member = named[name]
        others = [m for m in self.membership.engines if m.serves and m.spec.is_like(member.spec) and m is not member]
        if not others:
            raise RunError(f"remove {name}: no other engine serves the model {member.spec.model.name!r}")
        self.membership = self.membership.without(name)
        self._supervisor.forget(name)  # first: it may die meanwhile
        self._tell(self._manager, f"deregister {name}")
        ray.wait([member.actor.leave.remote()], timeout=_LEAVE_S)
        self._free(member)

    def _leave_out(self, member: Member) -> None:
        if member.name in (other.name for other in self.membership.engines):
            self.membership = self.membership.without(member.name)
            self._free(member)

    def _free(self, member: Member) -> None:
        # It owns the server's supervisor, which ends what is left of the tree when its owner goes, and the actors of
        # the engine's other nodes, which Ray ends likewise.
        ray.kill(member.actor)
        self._placement.give_back(list(member.slots))

    # ---- calling them

    def begin(self, method: str, *values: Any, sleepers: bool = False) -> dict[str, ray.ObjectRef]:
        """Call a method of all that live, or only of those that sleep while trainers train, by name."""
        return {
            member.name: getattr(member.actor, method).remote(*values)
            for member in self.membership.engines
            if member.spec.beside_trainers or not sleepers
        }

    def call(self, phase: str, method: str, limit: Deadline, *values: Any) -> list[Any]:
        """The answers of all sleepers that live when the call is over."""
        return self._supervisor.wait(self.begin(method, *values, sleepers=True), phase, limit)

    def metrics(self) -> dict[str, float]:
        """How many of the trained model's live, in a run that has any."""
        trained = self.membership.trained
        return {"rollout/engines_alive": float(len(trained))} if trained else {}

    def push(self, version: int, publish: Callable[[list[EngineAddress]], dict[str, float]]) -> dict[str, float]:
        """Have ``publish`` push weights to the trained model's that live, and see to it that they have this version
        then; say once of each other that it was skipped. Those that joined then get requests.

        A push during which an engine dies leaves the others paused, with weights of two versions: it is made again as a
        whole, without that engine. RunError where it failed although no engine died, or none is left.
        """
        while True:
            before = self.membership
            while self._skipped:
                warn(f"push of version {version}: skipped {self._skipped.pop(0)}")
            try:
                figures = publish([self._address(member) for member in before.trained])
                break
            except RunError as error:
                if self.membership is before:
                    self._examine(f"push of version {version}: {error}".splitlines()[0])
                if self.membership is before or not self.membership.trained:
                    raise
        joined = [replace(member, serves=True) for member in self.membership.trained if not member.serves]
        if joined:
            self.membership = self.membership.having(*joined)
            self._tell(self._manager, f"register {' and '.join(member.name for member in joined)}")
        return figures

    def _address(self, member: Member) -> EngineAddress:
        generate_key, admin_key = self._keys or (None, None)
        first = self._placement.number(member.slots[0])
        apart = not member.spec.beside_trainers
        return EngineAddress(member.url, member.spec.width, generate_key, admin_key, first, apart)

    def _examine(self, because: str) -> None:
        """Find out whether one hangs, which is then dead: who waits for its answer knows only that there is none."""
        name = "rollout_health_check_timeout"
        limit = limit_of(self._args, name, getattr(self._args, name) + MARGIN_S)  # it is asked twice
        calls = {m.name: m.actor.examine.remote(because, paused=True) for m in self.membership.trained}
        self._supervisor.wait(calls, "examine the engines", limit)

    def _tell(self, manager: Any, phase: str, opened: ray.ObjectRef | None = None) -> None:
        calls = {"the rollout manager": manager.serve.remote(self.membership, opened)}
        self._supervisor.wait(calls, phase, limit_of(self._args, "engine_start_timeout", MARGIN_S))

    def _go_on_without(self, name: str, phase: str, cause: str) -> None:
        member, model = self._members[name], self._members[name].spec.model
        lines = cause.splitlines()
        kept = [*lines[:_HEAD_LINES], *lines[_HEAD_LINES:][-_LOG_LINES:]]
        when = time.strftime(_TIME)
        self._deaths[name] = when, "\n".join(kept)
        if self._manager is not None and member in self.membership.engines:  # without its address yet
            self._leave_out(member)  # `add`, which waits for it, says so
            return
        lost = [other for other in self._deaths if member.spec.is_like(self._members[other].spec)]
        alive = [m for m in self.membership.engines if member.spec.is_like(m.spec) and m.name != name]
        if self._manager is None or not model.tolerates_loss or (lost == [name] and not alive):
            raise RunError(cause)
        self.membership = self.membership.without(name)
        if not any(other.serves for other in alive):
            causes = [f"{each} was lost at {': '.join(self._deaths[each])}" for each in lost]
            waiting = f" (without weights yet: {', '.join(other.name for other in alive)})" if alive else ""
            first = f"{phase}: no engine is left{waiting}, {' and '.join(lost)} were lost"
            raise RunError("\n".join([first, *causes]))
        self._free(member)
        self._skipped.append(f"{name}, which was lost at {when}")
        removed = self._manager.serve.remote(self.membership, None)
        self._supervisor.expect("the rollout manager", removed, f"deregister {name}")
        warn(
            f"{lines[0]}; going on with {len(alive)} of {len(alive) + len(lost)} engines, which get its "
            f"requests (log: {self._args.run_dir}/logs/{name.replace(' ', '_')}.log)"
        )
