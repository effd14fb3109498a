"""The verbs of the drivers: start a run's parts, generate, train, push weights, save, evaluate, stop."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayError

from slime.driver.data_side import DataSide
from slime.driver.meanwhile import Meanwhile
from slime.driver.preflight.places import place_warnings
from slime.driver.process import exit_status, interrupt_on_sigterm
from slime.driver.pushes import Pushes
from slime.driver.rates import flop_rates, step_figures
from slime.driver.recovery import Recovery
from slime.driver.restarts import Goodput, Restarts
from slime.driver.schedule import is_due, scores_start
from slime.driver.session import Session
from slime.driver.start import Start
from slime.fleet.engines import Engines
from slime.fleet.placement import core_shortage
from slime.fleet.spec import fleet_of
from slime.fleet.train_group import Saver, TrainGroup
from slime.observability.progress import done_line, program, say, step_line, warn_of
from slime.observability.prometheus.exposition import State
from slime.observability.trace import span
from slime.observability.verdict import verdict_lines
from slime.ray.cluster import leaving_after, running_address
from slime.ray.supervision import MARGIN_S, Deadline, LostError, RayDownError, Supervisor, limit_of

_STOP_S = 20.0
_SHUTDOWN_S = 10.0
"""What Ray's own end takes at most, as far as seen."""


class Run:
    """A run's actors; as a context manager it ends every process that it started, however the block is left.

    A part that ``args.placement`` does without (no trainers, no engines) is an empty list: its verbs do nothing.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self._supervisor = Supervisor()
        self.engines = Engines(args, self._supervisor)
        """Once the run has started, `Engines.add` has one more, and `Engines.remove` ends one."""
        self._trainers = TrainGroup(args, self._supervisor)
        self._restarts, self._goodput = Restarts(args), Goodput()
        self._data = DataSide(args, self._supervisor, self.engines, self._restarts)
        self._recovery: Recovery | None = None
        """Once the run has started."""
        self._next = 0
        """The next rollout to train."""
        self._go_back: Callable[[int], None] | None = None
        self._session = Session(args)
        self.scored: set[int] = set()
        """Versions that this driver has had scored."""
        self._saver = Saver(args, self._trainers)
        self._start = Start(args, self._supervisor, self.engines, self._trainers, self._data, self._saver)
        self._pushes: Pushes | None = None
        self._meanwhile: Meanwhile | None = None
        self._step: dict[str, float] = {}
        self._step_started = time.monotonic()

    # ---- life

    def __enter__(self) -> Run:
        interrupt_on_sigterm()
        warn_of([core_shortage(self.args), *([] if running_address() else place_warnings())])
        try:
            self._session.open(fleet_of(self.args).total, self._state)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not isinstance(error, (KeyboardInterrupt, SystemExit)):
            self._stop(error)
            if error is None and self.args.start_rollout_id is not None:  # else nothing was started
                for line in (done_line(self.args), *verdict_lines(self._session.verdict)):
                    say(line)
            return
        seconds = _STOP_S + _SHUTDOWN_S
        say(f"{program()}: interrupted: stopping engines and trainers (up to {seconds:.0f} s)", sys.stderr)
        with leaving_after(seconds, exit_status(error)):
            self._stop(error)

    def start(self) -> argparse.Namespace:
        """Start data, engines, router and trainers, in parallel where they can; the run's options, with the numbers of
        the first rollout and of all that follow from checkpoint and data. NothingLeftError if the run is over."""
        start = self._start
        start.run()
        args = self.args = start.args
        self._memory, self._pushes, self._meanwhile = start.memory, start.pushes, start.meanwhile
        parts = (self._trainers, start.placement, self._data, self._memory, self._pushes, self._saver, self._restarts)
        self._recovery = Recovery(args, self, self._supervisor, *parts)
        return args

    def _stop(self, error: BaseException | None) -> None:
        """Orderly where it works, by force where it does not; supervisors and the janitor see to the rest."""
        ray_is_down = isinstance(error, RayDownError)
        with self._session.closing(ended_well=error is None):
            if self._start.control is not None:
                self._start.control.close()
            if not ray_is_down:
                self._stop_actors()
            self._session.disconnect(ray_is_down=ray_is_down)
            warn_of(self._saver.clean_up())

    def _stop_actors(self) -> None:
        others = [actor for actor in (*self._trainers.actors, self._data.actor) if actor is not None]
        calls = [actor.stop.remote() for actor in others] + self.engines.end()
        if calls:
            with contextlib.suppress(RayError):
                ray.wait(calls, num_returns=len(calls), timeout=_STOP_S)
        with contextlib.suppress(RayError):
            self._start.placement.release()

    # ---- the loop, and going back in it

    def rollouts(self) -> Iterator[int]:
        """The rollouts to train, in order, and again those behind which trainers that were made anew have gone back."""
        self._next = self.args.start_rollout_id
        while True:
            while self._next < self.args.num_rollout:
                self._next += 1
                yield self._next - 1
            with self._recovering():
                self.finish_evaluation()
                if self._pushes is not None and (probed := self._pushes.probed()):
                    self._log(probed, "rollout/step", self._next - 1)
            if self._next >= self.args.num_rollout:
                return

    @contextlib.contextmanager
    def step(self, rollout_id: int) -> Iterator[None]:
        """Within, a rollout is trained, of which a line is printed. Where trainers die there, they come back, and
        `rollouts` goes on with the rollout that they come back to."""
        with self._recovering():
            yield
            self._end_step(rollout_id)

    def first_push(self) -> contextlib.AbstractContextManager[None]:
        """Within, engines get the weights that the run begins with; trainers that die there come back as in `step`."""
        return self._recovering()

    def when_going_back(self, go_back: Callable[[int], None]) -> None:
        """Have this called with the rollout to go on with, when trainers have come back: no other is under way then."""
        self._go_back = go_back

    @contextlib.contextmanager
    def _recovering(self) -> Iterator[None]:
        try:
            yield
        except LostError as lost:
            if self._recovery is None:
                raise
            self._next = self._recovery.bring_back(lost)
            self._goodput.go_back(self._next)
            if self._go_back is not None:
                self._go_back(self._next)

    # ---- the loop's verbs

    def generate(self, rollout_id: int) -> list[ray.ObjectRef]:
        """One rollout; a reference to one batch for each data-parallel rank."""
        self.begin_rollout(rollout_id)
        return self.take_rollout(rollout_id)

    def begin_rollout(self, rollout_id: int) -> None:
        """Have a rollout generated in the background; its failure ends whatever the driver then waits for."""
        self._data.begin_rollout(rollout_id, self._trainers.dp_size)

    def take_rollout(self, rollout_id: int) -> list[ray.ObjectRef]:
        """A rollout that was begun, for training: what `generate` gives. A step begins here."""
        self._step, self._step_started = {}, time.monotonic()
        if self._meanwhile is not None and self._meanwhile.is_due():
            self._meanwhile.do()
        limit = limit_of(self.args, "rollout_timeout", MARGIN_S)
        if self.args.asynchronous:  # an evaluation comes before it, and stale groups are generated again after it
            limit = Deadline(3 * self.args.rollout_timeout + MARGIN_S, limit.flag)
        accounts = None
        while accounts is None:
            with span("driver/wait_for_rollout", rollout=rollout_id) as waiting:
                batches, metrics, begun = self._data.wait_for_rollout(rollout_id, limit)
            # No quick answer where a user's data source takes its time over the next rollout's prompts.
            with span("driver/hand_over", rollout=rollout_id):
                accounts = self._data.hand_over(rollout_id, limit)
        metrics["perf/wait_for_rollout_time"] = waiting.seconds
        metrics["perf/rollout_ahead_time"] = self._step_started - begun
        metrics |= accounts | self.engines.metrics() | (self._pushes.probed() if self._pushes is not None else {})
        self._restarts.seconds += metrics.pop("perf/recovery_time", 0.0)  # one figure a step, at its end
        self._log(metrics, "rollout/step", rollout_id)
        return batches

    def pause_generation(self) -> None:
        """Keep rollouts under way from sending requests."""
        self._data.pause_generation()

    def resume_generation(self, version: int) -> None:
        """Let them go on, under weights of ``version``."""
        self._data.resume_generation(version)

    def train(self, rollout_id: int, batches: list[ray.ObjectRef]) -> None:
        """Train on one rollout's batches, and log one line of metrics an optimizer step."""
        self._memory.to_trainers()
        with span("driver/train", rollout=rollout_id) as training:
            steps = self._trainers.train(rollout_id, batches, limit_of(self.args, "train_timeout"))
        if steps:
            # The call less what rank 0 did in it: batches on their way, and ranks that began later.
            steps[-1]["perf/transfer_time"] = training.seconds - steps[-1]["perf/train_time"]
            steps[-1] |= flop_rates(self.args, steps[-1], self._step)
        for metrics in steps:
            self._log(metrics, "train/step", self._trainers.optimizer_steps)
            self._trainers.optimizer_steps += 1
        if self._pushes is not None:
            self._pushes.trained = rollout_id + 1
        self._goodput.add(rollout_id, sum(metrics.get("perf/trained_tokens", 0.0) for metrics in steps))
        if self._recovery is not None and (gone_back := self._recovery.leave_out(rollout_id, steps)) is not None:
            self._goodput.go_back(gone_back + 1)
        if (directory := self._start.snapshots) is not None and self._takes_snapshot(rollout_id):
            with span("driver/snapshot", rollout=rollout_id):
                self._saver.snapshot(rollout_id, self._whole_state(rollout_id), directory)

    def _takes_snapshot(self, rollout_id: int) -> bool:
        """Whether one is due, and no checkpoint that would do as well."""
        args = self.args
        saves = args.save and is_due(rollout_id, args.save_interval, last=args.num_rollout)
        return is_due(rollout_id, args.trainer_snapshot_interval) and not saves

    def _whole_state(self, rollout_id: int) -> dict[str, Any]:
        """What a resumed run needs besides the trainers' own."""
        state: dict[str, Any] = self._data.ask("save the data source", self._saver.limit, "state", rollout_id)
        return state | {"optimizer_steps": self._trainers.optimizer_steps}

    def push_weights(self, version: int) -> None:
        """Give every engine the trainers' weights; ``version`` is the number of rollouts they were trained on."""
        if self._pushes is None or not (self.engines.expects_weights() and self._trainers.actors):
            return
        with span("driver/push_weights", version=version):
            metrics = self._pushes.push(version)
        self._data.confirm_push(version)
        self._log(metrics | self._memory.figures(), "rollout/step", max(version - 1, 0))

    def evaluate(self, version: int) -> None:
        """Score the engines' weights, which were trained on ``version`` rollouts."""
        self.begin_evaluation(version)
        self.finish_evaluation()

    def begin_evaluation(self, version: int) -> None:
        """As `evaluate`, in the background; its failure ends whatever the driver then waits for. The engines must keep
        these weights until `finish_evaluation`."""
        self._data.begin_evaluation(version)

    def finish_evaluation(self) -> None:
        """Wait for the evaluation that was begun, if any is under way, and log its scores."""
        if (version := self._data.evaluates) is None:
            return
        with span("driver/wait_for_eval", version=version) as waiting:
            metrics = self._data.finish_evaluation(limit_of(self.args, "rollout_timeout", MARGIN_S))
        self.scored.add(version)
        waited = {"perf/wait_for_eval_time": waiting.seconds}
        step = self._step
        self._log(metrics | waited, "eval/step", version)
        if self.args.asynchronous or version == self.args.start_rollout_id:
            # The step that it follows is over, or there was none: the line of another one is not the place for it.
            self._step = step | waited
            say(step_line(version - 1, self.args.num_rollout, metrics))

    def scores_its_start(self) -> bool:
        """Whether the weights that the run starts from are to be scored; not again those at which it is resumed."""
        return scores_start(self.args, self.args.start_rollout_id)

    def save(self, rollout_id: int) -> None:
        """Write a checkpoint, an HF directory and adapters, whichever is asked for."""
        if not self._trainers.actors or not (self.args.save or self.args.save_hf or self.args.save_lora):
            return
        with span("driver/save", rollout=rollout_id) as saving:
            self._saver.save(rollout_id, self._whole_state(rollout_id))
        self._log({"perf/save_model_time": saving.seconds}, "rollout/step", rollout_id)

    def _end_step(self, rollout_id: int) -> None:
        """Print the step's line."""
        figures = step_figures(self._step, time.monotonic() - self._step_started)
        if self._trainers.actors:
            figures["perf/goodput"] = self._goodput.rate()
        if recovering := self._restarts.seconds:
            figures["perf/recovery_time"], self._restarts.seconds = recovering, 0.0
        self._restarts.step_is_complete(rollout_id)
        self._log(figures, "rollout/step", rollout_id)
        say(step_line(rollout_id, self.args.num_rollout, self._step, self._session.verdict.short))

    # ---- helpers

    def _state(self) -> State:
        """What ``/metrics`` and ``/healthz`` show."""
        return State(*self._supervisor.state(), self.engines.describe(), self._session.verdict.word)

    def _log(self, metrics: dict[str, float], step_key: str, step: int) -> None:
        self._step = self._step | metrics
        self._session.metrics.log(metrics, step_key, step)
