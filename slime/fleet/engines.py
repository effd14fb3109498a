"""The engines of a run: who of them lives, calling those, going on without one that has died until it is back; one
joins, one leaves."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray

from slime.fleet.actors import ActorMaker
from slime.fleet.external import Keys
from slime.fleet.losses import Losses
from slime.fleet.membership import Member, Membership
from slime.fleet.placement import Placement, Slot
from slime.fleet.restarts import Comeback, Restarts
from slime.fleet.spec import EngineSpec, Fleet
from slime.observability.progress import say, warn
from slime.ray.supervision import MARGIN_S, Deadline, RayDownError, RunError, Supervisor, limit_of
from slime.weights import EngineAddress


class NoEngineError(RunError):
    """No engine is there for now: all are on their way back."""


_LEAVE_S = 60.0
START_ROUTER = "start router"
Publish = Callable[[list[EngineAddress]], dict[str, float]]


class Engines:
    """The engines of a run. Until `serve` the death of any of them ends the run. From then on one that dies is started
    again on its slots, and the run ends when too few are left for good: less than ``--min-engines`` of the trained
    model, none of another, or any where its model wants all. One that hangs is ended, and is then dead.

    The slots of an engine that is given up are free. Its requests are tried again by whoever sent them.
    """

    def __init__(self, args: argparse.Namespace, supervisor: Supervisor) -> None:
        self._args, self._supervisor = args, supervisor
        self.membership = Membership()
        self._placement = Placement([], [], [])
        self._actors = ActorMaker(args, self._placement, None)
        self._manager: Any = None
        self._members: dict[str, Member] = {}
        """All that there were, by name."""
        self._losses = Losses(supervisor)
        self._trains = False
        self._restarts: Restarts | None = None
        """From `serve` on; None where none is started again."""
        self._given: tuple[list[Member], str] = ([], "")
        """Whom the latest push reached, and its phase."""
        self._restarted = 0
        self._recoveries: list[float] = []
        """Since they were asked for: starts of lost engines, and seconds until one served again."""

    # ---- their lives

    def create(self, fleet: Fleet, placement: Placement, keys: Keys = None) -> None:
        """Make the actors of all the fleet's engines, each on the first of its slots."""
        self._placement, self._trains = placement, fleet.trainers > 0
        self._actors = ActorMaker(self._args, placement, keys)
        for spec, slots in zip(fleet.engines, placement.engines, strict=True):
            for number in range(spec.count):
                first = number * spec.width
                self._make(spec, slots[first : first + spec.width], serves=True)

    def _make(self, spec: EngineSpec, slots: list[Slot], *, serves: bool) -> Member:
        rank = sum(other.spec.model == spec.model for other in self._members.values())
        name, actor = self._actors.make(spec, slots, rank)
        member = self._members[name] = Member(name, spec, "", actor, tuple(slots), serves, rank)
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
        From now on go on without one that dies, and start it again, with ``--no-use-fault-tolerance`` only where its
        model tolerates that and has another."""
        self._tell(manager, START_ROUTER, opened)
        self._manager = manager
        if self._args.use_fault_tolerance and self._restarts is None:
            start = limit_of(self._args, "engine_start_timeout", MARGIN_S)
            self._restarts = Restarts(self, self._args.engine_restart_limit, start)
            self._supervisor.attend(self._restarts.tick)

    def add(self, model: str) -> str:
        """Start one more engine like the first of ``model``; its name. One of the trained model gets no request before
        `push` has brought it the weights. RunError where there is no such model, its engines are beside trainers, no
        slot is free, or it does not start; the engines are then those of before."""
        ours = [member.spec for member in reversed(self._members.values()) if not member.spec.urls]
        specs = {spec.model.name: spec for spec in ours}
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
            raise RunError(f"{phase}: {self._losses.forget(member.name)}")
        waits = spec.model.trained and self._trains
        self.membership = self.membership.having(replace(member, url=urls[0], serves=not waits))
        self._tell(self._manager, phase)
        return member.name

    def remove(self, name: str) -> None:
        """End an engine, whose requests go on at others; RunError if there is none, or no other serves its model."""
        named = {member.name: member for member in self.membership.engines}
        if name not in named:
            if self._restarts is not None and (comeback := self._restarts.drop(name)) is not None:
                self._losses.forget(name)
                self._placement.give_back(list(comeback.member.slots))
                return
            raise RunError(f"remove {name}: there is no such engine, there are: {', '.join(named)}")
        member = named[name]
        others = [m for m in self.membership.engines if m.serves and m.spec.is_like(member.spec) and m is not member]
        if not others:
            raise RunError(f"remove {name}: no other engine serves the model {member.spec.model.name!r}")
        self.membership = self.membership.without(name)
        self._supervisor.forget(member.called)  # first: it may die meanwhile
        if self._restarts is not None:
            self._restarts.drop(name)
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
            member.called: getattr(member.actor, method).remote(*values)
            for member in self.membership.engines
            if member.spec.beside_trainers or not sleepers
        }

    def call(self, phase: str, method: str, limit: Deadline, *values: Any) -> list[Any]:
        """The answers of all sleepers that live when the call is over."""
        return self._supervisor.wait(self.begin(method, *values, sleepers=True), phase, limit)

    def end(self) -> list[ray.ObjectRef]:
        """Have all end, also those that start again; answers to wait for, not for long."""
        for comeback in self._restarts or ():
            if not comeback.joined:
                ray.kill(comeback.member.actor)  # its other calls would wait for the start
        return list(self.begin("stop").values())

    def metrics(self) -> dict[str, float]:
        """How many of the trained model's live, in a run that has any, and since the last call how often a lost engine
        was started again, and how many seconds the slowest was away of those that serve again."""
        restarted, self._restarted = self._restarted, 0
        recoveries, self._recoveries = self._recoveries, []
        if not self.expects_weights():
            return {}
        figures = {"rollout/engines_alive": float(len(self.membership.trained))}
        figures["rollout/engine_restarts"] = float(restarted)
        return figures | ({"perf/recovery_time": max(recoveries)} if recoveries else {})

    # ---- their weights

    def expects_weights(self) -> bool:
        """Whether there is an engine of the trained model, be it on its way back."""
        return bool(self.membership.trained or self._coming())

    def waiting(self) -> list[Member]:
        """Those of the trained model that live and wait for its weights."""
        return [member for member in self.membership.trained if not member.serves]

    def serves(self) -> bool:
        """Whether an engine of the trained model gets requests."""
        return any(member.serves for member in self.membership.trained)

    def await_one(self, phase: str) -> None:
        """Wait until an engine of the trained model lives, where all are on their way back; each has a deadline."""
        tries = 1 + self._args.engine_restart_limit
        limit = limit_of(self._args, "engine_start_timeout", 2 * MARGIN_S)
        limit = Deadline(tries * limit.seconds, limit.flag)
        self._supervisor.wait_until(lambda: self.membership.trained, phase, limit, "engines that start again")

    def hold_starts(self) -> None:
        """Begin no start on trainers' slots until `allow_starts`, and wait for those under way, which take a share of
        the GPU memory that they find free, and for what still has memory of lives before."""
        restarts = self._restarts
        if restarts is not None:
            restarts.beside_trainers = False
            limit = limit_of(self._args, "engine_start_timeout", 2 * MARGIN_S)
            phase = "start engines again before trainers wake"
            self._supervisor.wait_until(lambda: not restarts.beside(), phase, limit, "engines that start again")

    def allow_starts(self) -> None:
        """Take `hold_starts` back: the trainers are asleep."""
        if self._restarts is not None:
            self._restarts.beside_trainers = True

    def push(self, version: int, publish: Publish) -> dict[str, float]:
        """Have ``publish`` push weights to the trained model's that live, and see to it that they have this version
        then; say once of each other that it was skipped. Those that joined get requests from `admit` on.

        A push during which an engine dies leaves the others paused, with weights of two versions: it is made again as a
        whole, without that engine. RunError where it failed although no engine died, or none is left, NoEngineError
        where all that there are start again.
        """
        return self._publish(version, publish, lambda: self.membership.trained)

    def catch_up(self, version: int, publish: Publish) -> None:
        """Have ``publish`` push weights to those that wait for them alone; the others go on. One that cannot be given
        them is lost again."""
        phase = f"push of version {version} to engines that came back"
        try:
            self._publish(version, publish, self.waiting)
        except RayDownError:
            raise
        except RunError as error:
            for member in self.waiting():
                self._supervisor.forget(member.called)
                self._go_on_without(member.name, phase, f"{phase}: {member.called} did not get them: {error}")

    def _publish(self, version: int, publish: Publish, whom: Callable[[], list[Member]]) -> dict[str, float]:
        phase = f"push of version {version}"
        while True:
            before, given = self.membership, whom()
            for skipped in self._losses.take_skipped({member.name for member in given}):
                warn(f"{phase}: skipped {skipped}")
            try:
                if not given and self._coming():
                    raise RunError("none is there to get it")
                figures = publish([self._address(member) for member in given])
                break
            except RunError as error:
                if self.membership is before:
                    self._examine(f"{phase}: {error}".splitlines()[0])
                if not self.membership.trained and self._coming():
                    raise NoEngineError(f"{phase}: all engines are starting again: {error}") from error
                if self.membership is before or not whom():
                    raise
        self._given = given, phase
        return figures

    def reached(self) -> list[Member]:
        """Those that the latest push has reached, of those that live; until `admit`."""
        return [member for member in self._given[0] if member in self.membership.engines]

    def admit(self) -> None:
        """Register those that joined and have the weights of the latest push. Requests may be waiting for them, and
        come at once: all of their memory must be there."""
        (given, phase), self._given = self._given, ([], "")
        there = self.membership.engines
        joined = [replace(member, serves=True) for member in given if not member.serves and member in there]
        if joined:
            self.membership = self.membership.having(*joined)
            self._tell(self._manager, f"register {' and '.join(member.name for member in joined)}")
        for member in joined:
            if member in self.membership.engines:  # else it died meanwhile
                self._is_back(member, phase)

    def _address(self, member: Member) -> EngineAddress:
        generate_key, admin_key = self._actors.keys_of(member.spec) or (None, None)
        first = self._placement.number(member.slots[0]) if member.slots else len(self._placement.slots)
        apart = not member.spec.beside_trainers
        return EngineAddress(member.url, member.spec.width, generate_key, admin_key, first, apart, member.life)

    def _examine(self, because: str) -> None:
        """Find out whether one hangs, which is then dead: who waits for its answer knows only that there is none."""
        name = "rollout_health_check_timeout"
        limit = limit_of(self._args, name, getattr(self._args, name) + MARGIN_S)  # it is asked twice
        calls = {m.called: m.actor.examine.remote(because, paused=True) for m in self.membership.trained}
        self._supervisor.wait(calls, "examine the engines", limit)

    def _tell(self, manager: Any, phase: str, opened: ray.ObjectRef | None = None) -> None:
        calls = {"the rollout manager": manager.serve.remote(self.membership, opened)}
        self._supervisor.wait(calls, phase, limit_of(self._args, "engine_start_timeout", MARGIN_S))

    # ---- those that are lost

    def _go_on_without(self, name: str, phase: str, cause: str) -> None:
        member = self._members[name]
        lines = cause.splitlines()
        self._losses.note(member, cause)
        if self._manager is None:
            raise RunError(cause)
        if member in self.membership.engines:  # without its address yet
            self._leave_out(member)  # `add`, which waits for it, says so
            return
        self.membership = self.membership.without(name)
        is_ours = not member.spec.urls
        returns = is_ours and self._restarts is not None and self._restarts.take(member)
        action = "it is started again" if returns else "the run goes on without it"
        self._losses.tell("engine_hangs" if " hangs: " in lines[0] else "engine_died", member, phase, cause, action)
        if is_ours and self._restarts is not None and not returns:
            self._losses.tell("engine_given_up", member, phase, cause, self._why_given_up())
        self._check_enough(member, phase, cause)
        if not returns:
            self._free(member)
        self._losses.will_be_skipped(name)
        removed = self._manager.serve.remote(self.membership, None)
        self._supervisor.expect("the rollout manager", removed, f"deregister {name}")
        alive, lost = (len(found(member.spec)) for found in (self._alive, self._losses.of))
        requests = ", which get its requests" if alive else ": requests wait"
        requests += ", and it is started again" if returns else ""
        log = f" (log: {self._args.run_dir}/logs/{name.replace(' ', '_')}.log)" if is_ours else ""
        warn(f"{lines[0]}; going on with {alive} of {alive + lost} engines{requests}{log}")

    def next_life(self, member: Member) -> Member:
        """Make its actor again, on the same slots."""
        _, actor = self._actors.make(member.spec, member.slots, member.rank)
        self._restarted += 1
        following = replace(member, url="", actor=actor, serves=False, life=member.life + 1)
        self._members[member.name] = following
        return following

    def came_up(self, comeback: Comeback, url: str) -> None:
        """It answers at ``url``, and gets requests at once if it needs no weights of the trainers'."""
        member = comeback.member
        waits = member.spec.model.trained and self._trains
        self.membership = self.membership.having(replace(member, url=url, serves=not waits))
        self._supervisor.watch(member.called, member.actor, functools.partial(self._go_on_without, member.name))
        if waits:
            return
        told, phase = self._manager.serve.remote(self.membership, None), f"register {member.name}"
        self._supervisor.expect("the rollout manager", told, phase)
        self._is_back(member, phase)

    def did_not_start(self, comeback: Comeback, phase: str, cause: str) -> None:
        """Start it once more, as long as its budget lasts."""
        assert self._restarts is not None
        member, line = comeback.member, cause.splitlines()[0]
        pause = self._restarts.again(comeback)
        if pause is not None:
            action = f"it is started again in {pause:g} s"
            self._losses.tell("engine_died", member, f"start {member.name}", cause, action)
            warn(f"{phase}: {member.called} did not start: {line}; it is tried again in {pause:g} s")
            return
        self._losses.note(member, cause)
        self._placement.give_back(list(member.slots))
        given_up = self._why_given_up()
        self._losses.tell("engine_given_up", member, f"start {member.name}", cause, given_up)
        self._check_enough(member, phase, f"{phase}: {member.called} did not start: {cause}")
        warn(f"{phase}: {member.called} did not start: {line}; {given_up}")

    def _why_given_up(self) -> str:
        limit = self._args.engine_restart_limit
        return f"it is given up, after {limit} starts within an hour (--engine-restart-limit)"

    def _is_back(self, member: Member, phase: str) -> None:
        comeback = self._restarts.drop(member.name) if self._restarts is not None else None
        if comeback is None:  # it was added
            return
        seconds = time.monotonic() - comeback.noticed
        self._recoveries.append(seconds)
        self._losses.forget(member.name)
        self._losses.tell("engine_back", member, phase, "", f"{member.called} serves", seconds)
        say(f"{member.name} serves again, {seconds:.0f} s after it was found to be lost")

    def _coming(self, like: EngineSpec | None = None) -> list[str]:
        """Who of the trained models, or of those like one, is lost and on the way back."""
        coming = [each.member for each in self._restarts or () if not each.joined]
        return [m.name for m in coming if (m.spec.model.trained if like is None else m.spec.is_like(like))]

    def _alive(self, like: EngineSpec) -> list[Member]:
        return [member for member in self.membership.engines if member.spec.is_like(like)]

    def _check_enough(self, member: Member, phase: str, cause: str) -> None:
        coming = None if self._restarts is None else self._coming(member.spec)
        self._losses.check(member, phase, cause, self._alive(member.spec), coming, self._args.min_engines)
