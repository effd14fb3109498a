"""The engines of a run: who of them lives, calling those, going on without one that has died until it is back; one
joins, one leaves."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray

from slime.fleet.arrivals import Arrival, Arrivals, Told
from slime.fleet.joining import RefusedError, check_leaves, external, one_more, refusing
from slime.fleet.losses import Losses
from slime.fleet.membership import Member, Registrar
from slime.fleet.placement import Slot
from slime.fleet.roster import Roster
from slime.fleet.spec import EngineSpec
from slime.observability.progress import say, warn
from slime.ray.supervision import MARGIN_S, CallError, Deadline, LostError, RayDownError, RunError, Supervisor, limit_of
from slime.weights import EngineAddress


class NoEngineError(RunError):
    """No engine is there for now: all are on their way back."""


_LEAVE_S = 60.0
START_ROUTER = "start router"
Publish = Callable[[list[EngineAddress]], dict[str, float]]


def _say_so(name: str, why_not: str) -> None:
    if why_not:
        warn(f"{name} does not join: {why_not}")


class Engines(Roster):
    """The engines of a run. Until `serve` the death of any of them ends the run. From then on one that dies is started
    again on its slots, and the run ends when too few are left for good: less than ``--min-engines`` of the trained
    model, none of another, or any where its model wants all. One that hangs is ended, and is then dead.

    The slots of an engine that is given up are free. Its requests are tried again by whoever sent them.
    """

    def __init__(self, args: argparse.Namespace, supervisor: Supervisor) -> None:
        super().__init__(args, supervisor)
        self._losses = Losses(supervisor)
        self._arrivals = Arrivals(self, args)
        self._registrar = Registrar(args, supervisor)
        self._given: tuple[list[Member], int | None] = ([], None)
        """Whom the latest push reached, and its version, until `admit`."""
        self._restarted = 0
        self._recoveries: list[float] = []
        """Since they were asked for: starts of lost engines, and seconds until one served again."""

    # ---- their lives

    def serve(self, manager: Any, opened: ray.ObjectRef | None) -> None:
        """Have the rollout manager send them requests, when ``opened``, its call that opens the routers, has returned.
        From now on go on without one that dies, and start it again, with ``--no-use-fault-tolerance`` only where its
        model tolerates that and has another."""
        begins = not self._registrar.has_begun
        self._registrar.begin(manager, self.membership, START_ROUTER, opened)
        if begins:
            self._supervisor.attend(self._attend)

    def manager_is_away(self) -> None:
        """Tell it nothing until `serve`, which tells the next one who is there."""
        self._registrar.is_away = True

    def add(
        self,
        model: str | None = None,
        url: str | None = None,
        slots_within: float | None = None,
        told: Told = _say_so,
    ) -> str:
        """Begin to start one more engine like the first of ``model``, by default of the one that samples are generated
        by, or to take in the external one at ``url``; its name. It starts while the run goes on, and ``told`` is called
        when it has joined, or did not start, which leaves the engines those of before. One of the trained model gets no
        request before `push`, or `catch_up`, has brought it the weights.

        RefusedError where it does not fit the others, or no slot is free within ``slots_within`` seconds
        (``--placement-timeout``)."""
        known, slots = list(self._members.values()), list[Slot]()
        if url is None:
            spec = one_more(known, model)
            with refusing():
                slots = self._placement.take(spec, slots_within or self._args.placement_timeout)
        else:
            members = [*self.membership.engines, *(arrival.member for arrival in self._arrivals)]
            taken = {at for member in members for at in (member.url, *member.spec.urls)}
            on_loopback = self._trains and self._placement.meets_on_loopback
            spec = external(self._args, url, known, taken, on_loopback=on_loopback)
        member = self._make(spec, slots)
        self._arrivals.join(member, told)
        return member.name

    def remove(self, name: str) -> None:
        """End an engine, or leave an external one to itself; its requests go on at others. One that starts does not
        come. RefusedError if there is none, or too few others."""
        there = {member.name: member for member in self.membership.engines}
        known = {each.member.name: each.member for each in self._arrivals} | there
        if name not in known:
            raise RefusedError(f"remove {name}: there is no such engine, there are: {', '.join(known)}")
        member = known[name]
        check_leaves(member, self.membership, self._args.min_engines)
        arrival = self._arrivals.drop(name)
        self._losses.forget(name)
        if name in there:
            self.membership = self.membership.without(name)
            self._supervisor.forget(member.called)  # first: it may die meanwhile
            self._registrar.tell(self.membership, f"deregister {name}")
            ray.wait([member.actor.leave.remote()], timeout=_LEAVE_S)
            self._free(member)
            return
        self._placement.give_back(list(member.slots))
        if arrival is not None and arrival.told is not None:
            arrival.told(name, f"remove {name}: it was removed before it had started")

    def describe(self) -> list[dict[str, str]]:
        """Of each the ``name``, ``url``, ``model``, ``kind`` and ``state``: serves, is being registered, waits for
        weights, starts, starts again. May be called from any thread."""
        while True:  # one that joins is on its way until it is a member, and one that is lost before it is none
            membership, arrivals = self.membership, list(self._arrivals)
            if self.membership is membership:
                break
        registered = self._registrar.registered()
        known: dict[str, tuple[Member, str]] = {}
        for member in membership.engines:
            state = "serves" if member.called in registered else "is being registered"
            known[member.name] = member, state if member.serves else "waits for weights"
        for arrival in arrivals:
            known.setdefault(arrival.member.name, (arrival.member, "starts" if arrival.told else "starts again"))
        return [
            {"name": member.name, "url": member.url, "model": member.spec.model.name}
            | {"kind": member.spec.worker_type + (", external" if member.spec.urls else "")}
            | {"state": state}
            for member, state in known.values()
        ]

    # ---- calling them

    def end(self) -> list[ray.ObjectRef]:
        """Have all end, also those that start again; answers to wait for, not for long."""
        for arrival in self._arrivals:
            if not arrival.joined:
                ray.kill(arrival.member.actor)  # its other calls would wait for the start
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
        self._arrivals.beside_trainers = False
        limit = limit_of(self._args, "engine_start_timeout", 2 * MARGIN_S)
        phase = "start engines again before trainers wake"
        self._supervisor.wait_until(lambda: not self._arrivals.beside(), phase, limit, "engines that start again")

    def allow_starts(self) -> None:
        """Take `hold_starts` back: the trainers are asleep."""
        self._arrivals.beside_trainers = True

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
        them, which the failure then names, is lost again; RunError of any other failure."""
        phase = f"push of version {version} to engines that came back"
        try:
            self._publish(version, publish, self.waiting)
        except (RayDownError, LostError):
            raise
        except RunError as error:
            waiting = self.waiting()
            blamed = [member for member in waiting if re.search(rf"{re.escape(member.url)}(?!\d)", str(error))]
            if waiting and not blamed:
                raise
            for member in blamed:
                self._supervisor.forget(member.called)
                refused = RunError(f"{phase}: {member.called} did not get them: {error}")
                self._go_on_without(member.name, phase, refused)

    def _publish(self, version: int, publish: Publish, whom: Callable[[], list[Member]]) -> dict[str, float]:
        phase = f"push of version {version}"
        while True:
            before, given = self.membership, whom()
            for skipped in self._losses.take_skipped({member.name for member in given}):
                warn(f"{phase}: skipped {skipped}")
            if not given and self._coming():
                raise NoEngineError(f"{phase}: all that are to get it are starting again")
            try:
                figures = publish([self._address(member) for member in given])
                break
            except (RayDownError, LostError):  # of trainers: no engine is to blame
                raise
            except RunError as error:
                if self.membership is before:
                    self._examine(f"{phase}: {error}".splitlines()[0])
                if not self.membership.trained and self._coming():
                    raise NoEngineError(f"{phase}: all engines are starting again: {error}") from error
                if self.membership is before or not whom():
                    raise
        self._given = given, version
        return figures

    def reached(self) -> list[Member]:
        """Those that the latest push has reached, of those that live; until `admit`."""
        return self._still_there(self._given[0])

    def _still_there(self, given: list[Member]) -> list[Member]:
        there = {member.name: member for member in self.membership.engines}
        return [member for member in given if there.get(member.name) == member]

    def admit(self) -> None:
        """Note the version of the latest push, and register those that joined and have its weights. Requests may be
        waiting for them, and come at once: all of their memory must be there."""
        (given, version), self._given = self._given, ([], None)
        if version is None:
            return
        self._supervisor.version = str(version)
        joined = [replace(member, serves=True) for member in self._still_there(given) if not member.serves]
        if joined:
            self.membership = self.membership.having(*joined)
            self._registrar.tell(self.membership, f"register {' and '.join(member.name for member in joined)}")
        self._note_those_back(f"push of version {version}")

    def _examine(self, because: str) -> None:
        """Find out whether one hangs, which is then dead: who waits for its answer knows only that there is none."""
        name = "rollout_health_check_timeout"
        limit = limit_of(self._args, name, getattr(self._args, name) + MARGIN_S)  # it is asked twice
        calls = {m.called: m.actor.examine.remote(because, paused=True) for m in self.membership.trained}
        self._supervisor.wait(calls, "examine the engines", limit)

    # ---- those that are lost

    def _go_on_without(self, name: str, phase: str, failure: RunError) -> None:
        member, cause = self._members[name], str(failure)
        lines = cause.splitlines()
        self._losses.note(member, cause)
        if not self._registrar.has_begun:
            raise RunError(cause)  # not the LostError that it may be: nothing is made in its place
        is_ours = not member.spec.urls
        returns = is_ours and self._args.use_fault_tolerance and self._arrivals.take(member)
        self.membership = self.membership.without(name)
        action = "it is started again" if returns else "the run goes on without it"
        hangs = isinstance(failure, CallError) and failure.hangs
        self._losses.tell("engine_hangs" if hangs else "engine_died", member, phase, cause, action)
        if is_ours and self._args.use_fault_tolerance and not returns:
            self._losses.tell("engine_given_up", member, phase, cause, self._why_given_up())
        self._check_enough(member, phase, cause)
        if not returns:
            self._free(member)
        self._losses.will_be_skipped(name)
        self._registrar.tell_later(self.membership, f"deregister {name}")
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

    def came_up(self, arrival: Arrival, url: str) -> None:
        """It answers at ``url``, and gets requests at once if it needs no weights of the trainers'."""
        member = arrival.member
        waits = member.spec.model.trained and self._trains
        self.membership = self.membership.having(replace(member, url=url, serves=not waits))
        self._watch(member)
        if arrival.told is not None:
            self._arrivals.drop(member.name)
            arrival.told(member.name, "")
        if not waits:
            self._registrar.tell_later(self.membership, f"register {member.name}")

    def did_not_start(self, arrival: Arrival, phase: str, cause: str) -> None:
        """Start it once more, as long as its budget lasts; one that was never there is left out at once."""
        member, line = arrival.member, cause.splitlines()[0]
        starting = f"start {member.name}"
        if arrival.told is not None:
            self._arrivals.drop(member.name)
            self._placement.give_back(list(member.slots))
            arrival.told(member.name, f"{starting}: {cause}")
            self._check_enough(member, phase, f"{phase}: {member.called} did not start: {cause}")
            return
        pause = self._arrivals.again(arrival)
        if pause is not None:
            action = f"it is started again in {pause:g} s"
            self._losses.tell("engine_died", member, starting, cause, action)
            warn(f"{phase}: {member.called} did not start: {line}; it is tried again in {pause:g} s")
            return
        self._losses.note(member, cause)
        self._placement.give_back(list(member.slots))
        given_up = self._why_given_up()
        self._losses.tell("engine_given_up", member, starting, cause, given_up)
        self._check_enough(member, phase, f"{phase}: {member.called} did not start: {cause}")
        warn(f"{phase}: {member.called} did not start: {line}; {given_up}")

    def _why_given_up(self) -> str:
        limit = self._args.engine_restart_limit
        return f"it is given up, after {limit} starts within an hour (--engine-restart-limit)"

    def _attend(self, phase: str) -> None:
        """What the supervisor has done in every wait."""
        self._arrivals.tick(phase)
        self._registrar.hear()
        self._note_those_back(phase)

    def _note_those_back(self, phase: str) -> None:
        """Those that were lost, and that requests reach again."""
        registered = self._registrar.registered()
        for arrival in self._arrivals:
            member, seconds = arrival.member, time.monotonic() - arrival.noticed
            if arrival.joined and member.called in registered:
                self._arrivals.drop(member.name)
                self._losses.forget(member.name)
                self._recoveries.append(seconds)
                self._losses.tell("engine_back", member, phase, "", f"{member.called} serves", seconds)
                say(f"{member.name} serves again, {seconds:.0f} s after it was found to be lost")

    def _coming(self, like: EngineSpec | None = None) -> list[str]:
        """Who of the trained models, or of those like one, is on the way: lost, or new."""
        coming = [each.member for each in self._arrivals if not each.joined]
        return [m.name for m in coming if (m.spec.model.trained if like is None else m.spec.is_like(like))]

    def _alive(self, like: EngineSpec) -> list[Member]:
        return [member for member in self.membership.engines if member.spec.is_like(like)]

    def _check_enough(self, member: Member, phase: str, cause: str) -> None:
        coming = self._coming(member.spec) if self._args.use_fault_tolerance else None
        self._losses.check(member, phase, cause, self._alive(member.spec), coming, self._args.min_engines)
