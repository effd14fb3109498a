"""Injects faults into a run, one after the other, and matches each to what the run tells of it."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slime.processes.kernel import Process
from tools.soaking import hooks
from tools.soaking.external import External
from tools.soaking.plan import ANY, BESIDE, EXTERNAL, KINDS, Fault
from tools.soaking.processes import OverError, Run, limit_files, strike
from tools.soaking.watching import Event, Lines, Moment, Watcher, noticed, returned, wait_for

_POLL_S = 0.005
_FULL_AT = 1 << 16
"""Bytes of a file beyond which a trainer's disk is full: a checkpoint's are larger."""
_PORT_HELD_S = 30.0
_NEXT_LIFE_S = 90.0
_LONGEST_DEPTH_S = 3.0
_CALM_S, _PHASE_S, _BACK_S = 600.0, 180.0, 600.0
"""Until a run is ready for the next fault; until it comes to a phase; until all is well again after a fault."""
_SWITCH_S = 30.0


@dataclass(frozen=True)
class Outcome:
    """What became of one fault; times are in seconds since the epoch.

    Attributes:
        subject: whom it struck; None where there was nobody.
        seen: the phase in which the driver was then, "train on rollout 7".
        struck: when.
        told: the events of the run that are about it; none where it has not bitten.
        back: when all was well again; None where it has not bitten.
    """

    fault: Fault
    subject: str | None
    seen: str
    struck: float
    told: tuple[Event, ...] = ()
    back: float | None = None

    @property
    def bit(self) -> bool:
        """Whether the run has noticed it, and all is well again."""
        return self.back is not None

    def as_line(self) -> str:
        """For the injector's log."""
        kinds = [f"{event['kind']} {event['subject']}" for event in self.told]
        told = self.told[0]["time"] - self.struck if self.told else None
        back = None if self.back is None else round(self.back - self.struck, 3)
        line = {**self.fault.as_dict(), "subject": self.subject, "seen": self.seen, "struck": self.struck}
        return json.dumps(line | {"bit": self.bit, "told": kinds, "noticed_s": told and round(told, 3), "back_s": back})


class Injector:
    """Strikes one run."""

    def __init__(
        self,
        run: Run,
        watcher: Watcher,
        switches: Path,
        check: Callable[[], None],
        external: External | None = None,
    ) -> None:
        """``check``, called all the time, raises OverError where the run has ended, or what else is to end a wait.
        ``external`` is the run's external engine, if it has one."""
        self._external = external
        self._external_name: str | None = None
        """As the run calls it, when it was looked for last."""
        self._run, self._watcher, self._switches, self._check = run, watcher, switches, check
        self._open: list[Outcome] = []
        """Engines' faults that were told of: the run goes on without the engine until it is back."""
        self._struck: Outcome | None = None
        """What was done last, until it is told of and, unless it is among those, mended."""
        self._taken = Lines(switches / hooks.TAKEN)
        self._taken.new()

    def choose(self, left: Sequence[Fault], in_haste: bool) -> Fault | None:
        """The first of these that can be done now: while an engine is on its way back, or where there is no time for
        one to come back (``in_haste``), only those that may be done beside that."""
        under_way = {outcome.fault.number for outcome in self._open}
        beside = in_haste or bool(self._open)
        return next((f for f in left if f.number not in under_way and (not beside or f.kind in BESIDE)), None)

    def inject(self, fault: Fault) -> Outcome | None:
        """Wait until the run is calm and comes to the fault's phase, strike, and wait until all is well again, or None
        where that is an engine's return, which `settled` tells of.

        OverError where the run ends, or does not come that far within generous limits.
        """
        self._wait(lambda: self._is_calm(fault), _CALM_S, "a whole step without a fault")
        if fault.kind == EXTERNAL and self._external is not None:
            self._external_name = self._external.name()  # before the phase begins: the run is asked for it
        moment = self._wait(lambda: self._in_phase(fault), _PHASE_S, f"the phase {fault.phase!r}")
        time.sleep(fault.depth * min(moment.lasted, _LONGEST_DEPTH_S))
        seen, struck = f"{fault.phase} of {moment.rollout}", time.time()
        subject = self._strike(fault)
        outcome = Outcome(fault, subject, seen, struck)
        if subject is None:
            return outcome
        self._struck = outcome
        first = self._wait_for(lambda: self._noticed(outcome), KINDS[fault.kind].within)
        if first is None:
            done: Outcome | None = outcome
            self._let_go(fault)
        elif KINDS[fault.kind].back == "engine_back":
            self._open.append(replace(outcome, told=(first,)))
            done = None
        elif fault.kind == EXTERNAL:
            assert self._external is not None
            self._external.join_again()
            self._watcher.forget(subject)
            done = replace(outcome, told=(first,), back=time.time())
        else:
            told = replace(outcome, told=(first,))
            what = f"{outcome.subject} to be well again after {fault.kind}"
            done = self._wait(lambda: self._mended(told), _BACK_S, what)
        self._struck = None
        return done

    def settled(self) -> list[Outcome]:
        """The engines' faults that are mended since this was last called. OverError where one takes too long."""
        self._check()
        self._watcher.look()
        found = {outcome.fault.number: mended for outcome in self._open if (mended := self._mended(outcome))}
        self._open = [outcome for outcome in self._open if outcome.fault.number not in found]
        late = [outcome for outcome in self._open if time.time() > outcome.told[0]["time"] + _BACK_S]
        if late:
            raise OverError(f"{late[0].subject} is not back {_BACK_S:g} s after {late[0].fault.kind}")
        return list(found.values())

    def unfinished(self) -> list[Outcome]:
        """What was struck, and is neither known not to have bitten nor mended."""
        return [*self._open, *filter(None, [self._struck])]

    def _noticed(self, outcome: Outcome) -> Event | None:
        assert outcome.subject is not None
        self._watcher.look()
        return noticed(outcome.fault, outcome.subject, outcome.struck, self._watcher.events)

    def _mended(self, outcome: Outcome) -> Outcome | None:
        assert outcome.subject is not None
        self._watcher.look()
        first, told = outcome.told[0], self._watcher.events
        when = returned(outcome.fault, outcome.subject, first, told, self._watcher)
        if when is None:
            return None
        its = [event for event in told if event is not first and outcome.struck <= event["time"] <= when]
        return replace(outcome, told=(first, *its), back=when)

    # ---- waiting

    def _is_calm(self, fault: Fault) -> bool:
        """Nothing is lost but what has a fault under way, and a whole step is behind the last event, or the start."""
        self._watcher.look()
        steps, events = self._watcher.steps_since, self._watcher.events
        has_begun = len(steps(self._watcher.began)) > 1  # the first push is of the weights that it begins with
        away = {outcome.subject for outcome in self._open} if fault.kind in BESIDE else set[str]()
        is_whole = away.issuperset(self._watcher.lost())
        return has_begun and is_whole and bool(steps(events[-1]["time"] if events else 0.0))

    def _in_phase(self, fault: Fault) -> Moment | None:
        """Where the run is, if the phase has begun just now."""
        before = self._watcher.look()
        begun = self._wait_for(lambda: self._watcher.look() != before, _PHASE_S, _POLL_S)
        now = self._watcher.look()
        return now if begun and now.phase == fault.phase else None

    def _wait_for(self, condition: Callable[[], Any], seconds: float, poll: float = 0.05) -> Any:
        def checked() -> Any:
            self._check()
            return condition()

        return wait_for(checked, seconds, poll)

    def _wait(self, condition: Callable[[], Any], seconds: float, what: str) -> Any:
        found = self._wait_for(condition, seconds)
        if found is None or found is False:
            raise OverError(f"waited {seconds:g} s in vain for {what}")
        return found

    # ---- striking

    def _strike(self, fault: Fault) -> str | None:
        """Do it; whom it has struck, or None where there was nobody to strike."""
        name, _, what = fault.kind.rpartition("_")
        signals = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
        if fault.kind == EXTERNAL:
            return self._external_name if self._external is not None and self._external.kill() else None
        if fault.kind == "engine_killed_in_push":
            return self._signal(fault, self._run.server(fault.subject), signal.SIGKILL)
        if fault.kind == "engine_killed_as_it_starts":
            return self._kill_twice(fault)
        if fault.kind == "router_port_taken":
            return self._take_port(fault)
        if fault.kind == "disk_full":
            return fault.subject if self._limit_files(fault, _FULL_AT) else None
        if fault.subject == ANY:
            return self._switch(fault)
        return self._signal(fault, self._find(name, fault.subject), signals[what])

    def _limit_files(self, fault: Fault, size: int | None) -> bool:
        trainer = self._find("trainer", fault.subject)
        return trainer is not None and limit_files(trainer, size)

    def _let_go(self, fault: Fault) -> None:
        """Undo what would go on: one that has not bitten must not bite, unseen, with a later fault."""
        if fault.kind == "disk_full":
            self._limit_files(fault, None)

    def _find(self, name: str, subject: str) -> Process | None:
        finders: dict[str, Callable[[], Process | None]] = {
            "engine": lambda: self._run.server(subject),
            "scheduler": lambda: self._run.scheduler(subject),
            "router": self._run.router,
            "trainer": lambda: self._run.of_log(subject.replace(" ", "_")),
            "manager": lambda: self._run.of_log("rollout_manager"),
            "driver": self._run.driver,
        }
        return finders[name]()

    def _signal(self, fault: Fault, process: Process | None, number: int) -> str | None:
        return fault.subject if process is not None and strike(process, number) else None

    def _kill_twice(self, fault: Fault) -> str | None:
        """Kill an engine, and what is started in its place before it answers."""
        first = self._run.server(fault.subject)
        if first is None or not strike(first, signal.SIGKILL):
            return None
        second = self._wait_for(lambda: self._run.newer_server(fault.subject, first), _NEXT_LIFE_S)
        self._signal(fault, second, signal.SIGKILL)
        return fault.subject

    def _take_port(self, fault: Fault) -> str | None:
        """Kill the router, and listen in its place until the run has told that it could not start another."""
        process, address, struck = self._run.router(), self._run.router_address(), time.time()
        if process is None or address is None or not strike(process, signal.SIGKILL):
            return None
        with listening_at(address) as held:

            def told() -> Event | None:
                self._watcher.look()
                return noticed(fault, fault.subject, struck, self._watcher.events)

            if held:
                self._wait_for(told, _PORT_HELD_S)
        return fault.subject

    def _switch(self, fault: Fault) -> str | None:
        """Have the next sample of the run that comes by take the fault; which one it was."""
        self._taken.new()
        switch = self._switches / fault.kind
        switch.touch()

        def taken() -> str | None:
            lines = [line for line in self._taken.new() if line["kind"] == fault.kind]
            return f"sample {lines[0]['sample']}" if lines else None

        found: str | None = self._wait_for(taken, _SWITCH_S)
        switch.unlink(missing_ok=True)
        return found


@contextlib.contextmanager
def listening_at(address: tuple[str, int], seconds: float = 5.0) -> Iterator[bool]:
    """Within, somebody else listens at ``address``; false where its owner has not left it within ``seconds``."""
    taken = socket.socket()
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def bound() -> bool:
        with contextlib.suppress(OSError):
            taken.bind(address)
            taken.listen()
            return True
        return False

    with taken:
        yield bool(wait_for(bound, seconds, 0.01))
