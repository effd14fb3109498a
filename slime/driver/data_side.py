"""The rollout manager as the driver has it: what it was asked for, and its state, by which another goes on."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from slime.driver.restarts import Restarts
from slime.driver.rollout_manager import create_manager
from slime.fleet.engines import START_ROUTER, Engines
from slime.fleet.external import Keys
from slime.fleet.spec import ModelSpec
from slime.observability import events
from slime.observability.progress import warn
from slime.ray.supervision import LOAD_DATA, MARGIN_S, RESTORE_DATA, CallError, Deadline, RunError, Supervisor, limit_of

MANAGER = "the rollout manager"


@dataclass
class _Rollout:
    """One that was begun."""

    figures: ray.ObjectRef
    batches: list[ray.ObjectRef]
    """One a data-parallel rank; the driver owns them, so that they outlive the manager that made them."""
    dp_size: int
    begun: float


@dataclass
class _Death:
    phase: str
    cause: str
    noticed: float


class DataSide:
    """The rollout manager. One that dies is made anew, with the state that it had when the last rollout was handed
    over, and what it was asked for then is asked again: rollouts and evaluations under way are generated anew. Engines
    stay."""

    def __init__(self, args: argparse.Namespace, supervisor: Supervisor, engines: Engines, restarts: Restarts) -> None:
        self._args, self._supervisor, self._engines, self._restarts = args, supervisor, engines, restarts
        self.actor: Any = None
        self._plan: tuple[Keys, Sequence[ModelSpec]] = None, ()
        self._rollouts: dict[int, _Rollout] = {}
        """Those under way or waiting."""
        self._evaluation: tuple[ray.ObjectRef, int] | None = None
        """The one under way, and of which version."""
        self._state: tuple[int, ray.ObjectRef] | None = None
        """What it had when trainers took a rollout, which, and what is restored; None before the first of a run."""
        self._may_catch_up: Callable[[], object] | None = None
        self._catch_up: Callable[[], None] = lambda: None
        self._keeps_state, self._serves = True, False
        self._death: _Death | None = None

    # ---- its life

    def start(self, keys: Keys, models: Sequence[ModelSpec]) -> int:
        """Make it, and have it read the data; how many rollouts the run has."""
        self._plan = keys, models
        return self._make()

    def _make(self) -> int:
        self.actor = create_manager(self._args, *self._plan)
        self._supervisor.watch(MANAGER, self.actor, self._died)
        return int(self._once(LOAD_DATA, limit_of(self._args, "data_load_timeout"), "load_data"))

    def open_routers(self) -> ray.ObjectRef | None:
        """Begin to start them, in a run that has engines. Not waited for: a router imports for many seconds."""
        if not self._plan[1]:
            return None
        opened: ray.ObjectRef = self.actor.open_routers.remote()
        self._supervisor.expect(MANAGER, opened, START_ROUTER)
        return opened

    def serve(self, opened: ray.ObjectRef | None) -> None:
        """Have engines get its requests, when ``opened``, of `open_routers`. From now on it may be made anew."""
        if opened is not None:
            self._engines.serve(self.actor, opened)
        self._serves = True

    def restore(self, rollout_id: int, state: dict[str, Any]) -> None:
        """Go on after a rollout, of whose checkpoint ``state`` is."""
        self._state = rollout_id, ray.put(state)
        self._once(RESTORE_DATA, limit_of(self._args, "checkpoint_timeout"), "restore", *self._state)

    def _died(self, phase: str, failure: RunError) -> None:
        """What the supervisor calls, during any wait, which then goes on."""
        cause, is_alive = str(failure), isinstance(failure, CallError)  # one of its routers is what died
        if is_alive or not self._serves or not self._args.use_fault_tolerance:
            raise RunError(cause)  # not the LostError that it may be: nothing is made in its place
        if not self._keeps_state:
            raise RunError(f"{cause}; its data source keeps its state by itself, which only a checkpoint has whole")
        self._restarts.allow(MANAGER, phase, cause)
        self._death = _Death(phase, cause, time.monotonic())
        warn(f"{cause.splitlines()[0]}; another is made in its place")

    def _bring_back(self) -> None:
        """Make another, which does again what the dead one had not done."""
        assert self._death is not None
        death, rollouts, evaluation = self._death, dict(self._rollouts), self._evaluation
        self._engines.manager_is_away()
        self._supervisor.forget(MANAGER)
        ray.kill(self.actor)  # it may be one that was not finished, as trainers died meanwhile
        try:
            self._make()
            self.note_version()
            opened = self.open_routers()
            if self._state is not None:
                self._once(RESTORE_DATA, limit_of(self._args, "checkpoint_timeout"), "restore", *self._state)
            self.serve(opened)
            # Engines may still work on what the dead one had asked them for.
            self._once("end its requests", limit_of(self._args, "rollout_timeout"), "cancel")
            if self._args.asynchronous and self._supervisor.version.isdecimal():
                self._once("resume generation", self._update_limit, "resume_generation", int(self._supervisor.version))
        except _GoneError:
            return
        for rollout_id, rollout in sorted(rollouts.items()):
            self.begin_rollout(rollout_id, rollout.dp_size, rollout.begun)
        if evaluation is not None:
            self.begin_evaluation(evaluation[1])
        self._death = None
        seconds = time.monotonic() - death.noticed
        self._restarts.seconds += seconds
        after = "as the run began" if self._state is None else f"after rollout {self._state[0]}"
        events.add(
            "manager_died",
            MANAGER,
            phase=death.phase,
            version=self._supervisor.version,
            cause=death.cause,
            action=f"made anew with its state {after}; rollouts under way: {sorted(rollouts)}",
            seconds=seconds,
        )

    def catches_up(self, may: Callable[[], object], catch_up: Callable[[], None]) -> None:
        """While rollouts and evaluations are waited for, call ``catch_up`` whenever ``may()`` holds."""
        self._may_catch_up, self._catch_up = may, catch_up

    def note_version(self) -> None:
        """Have it know which weights engines have, for the events that it tells of."""
        call = self.actor.note_version.remote(self._supervisor.version)
        self._supervisor.expect(MANAGER, call, "note the engines' version")

    def confirm_push(self, version: int) -> None:
        """Have it know of a push of this version, and ask routers whether they have the engines that there are; one
        that has others ends whatever the driver then waits for."""
        self.note_version()
        if self._plan[1]:
            call = self.actor.confirm_routers.remote(self._engines.membership)
            self._supervisor.expect(MANAGER, call, f"check the routers' engines after the push of version {version}")

    # ---- asking it

    def ask(self, phase: str, limit: Deadline, method: str, *values: Any) -> Any:
        """Its answer; of another, where it dies before it has given one. What could not be finished of another, because
        somebody else died then, is finished first."""
        while True:
            if self._death is None:
                with contextlib.suppress(_GoneError):
                    return self._once(phase, limit, method, *values)
            self._bring_back()

    def _once(self, phase: str, limit: Deadline, method: str, *values: Any) -> Any:
        return self._answer(getattr(self.actor, method).remote(*values), phase, limit)

    def _answer(self, call: ray.ObjectRef, phase: str, limit: Deadline) -> Any:
        answers = self._supervisor.wait({MANAGER: call}, phase, limit)
        if not answers:  # its death was noticed, and is survived
            raise _GoneError
        return answers[0]

    def _answer_of_engines(self, call: ray.ObjectRef, phase: str, limit: Deadline) -> Any:
        """`_answer` of a call that engines work for: engines that came back may catch up meanwhile."""
        answers = self._supervisor.wait({MANAGER: call}, phase, limit, self._may_catch_up)
        if answers:
            return answers[0]
        if self._death is None:
            self._catch_up()
            raise _AgainError
        raise _GoneError

    # ---- rollouts

    def begin_rollout(self, rollout_id: int, dp_size: int, begun: float | None = None) -> None:
        """Have one generated in the background; its failure ends whatever the driver then waits for."""
        drawn = self.actor.draw.remote(rollout_id)
        call = self.actor.generate.options(num_returns=1 + dp_size).remote(rollout_id, dp_size, drawn)
        self._supervisor.expect(MANAGER, call[0], f"rollout {rollout_id}")
        self._rollouts[rollout_id] = _Rollout(call[0], call[1:], dp_size, begun or time.monotonic())

    def wait_for_rollout(self, rollout_id: int, limit: Deadline) -> tuple[list[ray.ObjectRef], dict[str, float], float]:
        """One that was begun: its batches, its metrics, and when it was begun."""
        while True:
            rollout = self._rollouts[rollout_id]
            try:
                figures: dict[str, float] = self._answer_of_engines(rollout.figures, f"rollout {rollout_id}", limit)
                return rollout.batches, figures, rollout.begun
            except _AgainError:
                continue
            except _GoneError:
                self._bring_back()

    def hand_over(self, rollout_id: int, limit: Deadline) -> dict[str, float] | None:
        """Note that the trainers take it; where all prompts are then. None where its manager has died first: another
        generates it again."""
        figures, state = self.actor.hand_over.options(num_returns=2).remote(rollout_id)
        phase = f"hand over rollout {rollout_id}, after the prompts that are being drawn"
        try:
            accounts: dict[str, float]
            accounts, self._keeps_state = self._answer(figures, phase, limit)
        except _GoneError:
            self._bring_back()
            return None
        del self._rollouts[rollout_id]
        self._state = rollout_id, state
        return accounts

    # ---- evaluations

    def begin_evaluation(self, version: int) -> None:
        """Have the engines' weights scored in the background, as `begin_rollout`."""
        call = self.actor.evaluate.remote(version, self.actor.num_cancels.remote())
        self._supervisor.expect(MANAGER, call, f"evaluation of weight version {version}")
        self._evaluation = call, version

    @property
    def evaluates(self) -> int | None:
        """The version of which an evaluation was begun and not waited for."""
        return None if self._evaluation is None else self._evaluation[1]

    def finish_evaluation(self, limit: Deadline) -> dict[str, float]:
        """Wait for the evaluation that was begun; its metrics."""
        while True:
            assert self._evaluation is not None
            call, version = self._evaluation
            try:
                phase = f"evaluation of weight version {version}"
                figures: dict[str, float] = self._answer_of_engines(call, phase, limit)
            except _AgainError:
                continue
            except _GoneError:
                self._bring_back()
                continue
            self._evaluation = None
            return figures

    # ---- pauses

    def pause_generation(self) -> None:
        """Keep rollouts under way from sending requests."""
        self.ask("pause generation for a weight update", self._update_limit, "pause_generation")

    def resume_generation(self, version: int) -> None:
        """Let them go on, under weights of ``version``."""
        self.ask("resume generation", self._update_limit, "resume_generation", version)

    @property
    def _update_limit(self) -> Deadline:
        return limit_of(self._args, "weight_update_timeout", MARGIN_S)

    # ---- going back

    def cancel(self) -> None:
        """Give up all rollouts and evaluations under way; engines are then idle."""
        under_way = [rollout.figures for rollout in self._rollouts.values()]
        under_way += [self._evaluation[0]] if self._evaluation is not None else []
        for call in under_way:
            self._supervisor.dismiss(call)
        self._rollouts, self._evaluation = {}, None
        self.ask("end rollouts under way", limit_of(self._args, "checkpoint_timeout"), "cancel")

    def rewind(self, rollout_id: int, state: dict[str, Any] | None) -> None:
        """Go back to where the data was after a rollout; without a state, to where it was when the run began."""
        self._keeps_state = True
        self._state = None if state is None else (rollout_id, ray.put(state))
        self.ask(RESTORE_DATA, limit_of(self._args, "checkpoint_timeout"), "rewind", rollout_id, state)


class _GoneError(Exception):
    """The manager has died, and may be made anew."""


class _AgainError(Exception):
    """Something was done meanwhile: the call may be another one now."""
