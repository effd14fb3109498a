"""The verbs of the drivers: start a run's parts, generate, train, push weights, save, evaluate, stop."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import secrets
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayError

from slime.driver.memory_scheduler import MemoryScheduler
from slime.driver.preflight.places import place_warnings, room_warnings
from slime.driver.process import acquire_run_lock, exit_status, interrupt_on_sigterm
from slime.driver.pushes import Pushes
from slime.driver.rollout_manager import create_manager
from slime.driver.schedule import check_remaining, missing_exports, scores_start
from slime.entry.arguments import describe
from slime.files.storage import write_text, writing
from slime.fleet.engines import START_ROUTER, Engines
from slime.fleet.placement import Placement, core_shortage, place
from slime.fleet.spec import ModelSpec, fleet_of
from slime.fleet.train_group import Saver, TrainGroup
from slime.observability import events, logs, trace
from slime.observability.metrics import MetricsLogger
from slime.observability.progress import done_line, program, say, step_line, warn
from slime.observability.trace import span
from slime.options.checks.checkpoint_rules import starting_point
from slime.ray import janitor
from slime.ray.cluster import connect, leaving_after, running_address
from slime.ray.supervision import LOAD_DATA, MARGIN_S, Deadline, RayDownError, Supervisor, limit_of

_STOP_S = 20.0
_SHUTDOWN_S = 10.0
"""What Ray's own end takes at most, as far as seen."""
logger = logging.getLogger(__name__)


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
        self._manager: Any = None
        self._placement: Placement | None = None
        self._metrics: MetricsLogger | None = None
        self._run_locks: list[int] = []
        self._janitor: int | None = None
        self._ended_well, self._ray_is_down = False, False
        self._rollouts: dict[int, tuple[ray.ObjectRef, float]] = {}
        """Those under way or waiting, and when they were begun."""
        self._evaluation: tuple[ray.ObjectRef, int] | None = None
        """The one under way, and of which version."""
        self._saver = Saver(args, self._trainers)
        self._pushes: Pushes | None = None
        self._step: dict[str, float] = {}
        self._step_started = time.monotonic()

    # ---- life

    def __enter__(self) -> Run:
        interrupt_on_sigterm()
        args = self.args
        self._warn([core_shortage(args), *([] if running_address() else place_warnings())])
        try:
            named = ((args.run_dir, "--run-dir"), (args.save, "--save"))
            places = {os.path.realpath(each): flag for each, flag in named if each}
            for directory in sorted(places):
                self._run_locks.append(acquire_run_lock(directory, places[directory]))
            with writing("--run-dir", args.run_dir):
                Path(args.run_dir, "logs").mkdir(exist_ok=True)
            logs.begin(args, "driver")
            trace.begin(args.run_dir, "driver")
            events.begin(args.run_dir, "driver")
            self._metrics = MetricsLogger(args)
            self._janitor = connect(fleet_of(args).total)
            # Again: Ray has put its own in the place of ours.
            interrupt_on_sigterm()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._ended_well, self._ray_is_down = error is None, isinstance(error, RayDownError)
        if not isinstance(error, (KeyboardInterrupt, SystemExit)):
            self._stop()
            if self._ended_well and self.args.start_rollout_id is not None:  # else nothing was started
                say(done_line(self.args))
            return
        seconds = _STOP_S + _SHUTDOWN_S
        say(f"{program()}: interrupted: stopping engines and trainers (up to {seconds:.0f} s)", sys.stderr)
        with leaving_after(seconds, exit_status(error)):
            self._stop()

    def start(self) -> argparse.Namespace:
        """Start data, engines, router and trainers, in parallel where they can; the run's options, with the numbers of
        the first rollout and of all that follow from checkpoint and data. NothingLeftError if the run is over."""
        args, began = self.args, time.monotonic()
        say(f"run directory: {args.run_dir}; loading the data")
        if begins := starting_point(args):
            say(begins)
        # Hexadecimal: a key may end up behind a flag, and must not look like one.
        keys = None if args.no_api_keys else (secrets.token_hex(24), secrets.token_hex(24))
        logs.hide(keys or ())
        fleet = fleet_of(args)
        with span("driver/load_data"):
            self._load_data(keys, fleet.models if fleet.engines else ())
        args = self.args
        placement = self._placement = place(args, fleet)
        slots = sum(map(len, placement.engines))
        say(
            f"{args.num_rollout} rollouts; starting {fleet.trainers} training ranks and engines on {slots} slots "
            "(logs in the run directory)"
        )
        shared = placement.on_gpus and any(spec.beside_trainers for spec in fleet.engines)
        offloads = {
            name: shared if getattr(args, name) is None else getattr(args, name)
            for name in ("offload_train", "offload_rollout")
        }
        limit = limit_of(args, "weight_update_timeout", MARGIN_S)
        self._memory = MemoryScheduler(self._trainers, self.engines, limit, **offloads)
        self._pushes = Pushes(self._trainers, self.engines, self._memory, limit)
        # Not waited for: a router imports for many seconds, while engines and trainers start.
        opened = self._manager.open_routers.remote() if fleet.engines else None
        if opened is not None:
            self._supervisor.expect("the rollout manager", opened, START_ROUTER)
        with span("driver/start"):
            self.engines.create(fleet, placement, keys)
            self._start_together(placement, shared)
        if opened is not None:
            self.engines.serve(self._manager, opened)
        going_on = f", going on after rollout {self.args.start_rollout_id}" if self.args.start_rollout_id else ""
        say(f"started in {time.monotonic() - began:.0f} s{going_on}")
        return self.args

    def _load_data(self, keys: tuple[str, str] | None, models: Sequence[ModelSpec]) -> None:
        args = self.args
        self._manager = create_manager(args, keys, models)
        self._supervisor.watch("the rollout manager", self._manager)
        limit = limit_of(args, "data_load_timeout")
        rollouts = self._answer(self._manager.load_data.remote(), LOAD_DATA, limit)
        args = self.args = argparse.Namespace(**vars(args) | {"num_rollout": rollouts})
        if left := check_remaining(args):  # again: --num-epoch has become a number of rollouts
            say(left)
        self._warn(room_warnings(args))
        write_text("--run-dir", Path(args.run_dir, "config.yaml"), describe(args))

    def _start_together(self, placement: Placement, shared: bool) -> None:
        if shared:
            # One after the other: an engine takes a share of the GPU memory that it finds free.
            for name, prepared in self.engines.begin("prepare").items():
                self._supervisor.expect(name, prepared, "prepare engines")
            self._start_trainers(placement)
            starts = self.engines.begin("start")
        else:
            starts = self.engines.begin("start")
            self._start_trainers(placement)
        limit = limit_of(self.args, "engine_start_timeout", MARGIN_S)
        self.engines.started(self._supervisor.wait(starts, "start engines", limit))

    def _start_trainers(self, placement: Placement) -> None:
        args, first = self.args, 0
        if placement.train:
            self._trainers.create(placement)
            first = self._trainers.start(args.num_rollout)
        if args.start_rollout_id is None:
            args = self.args = argparse.Namespace(**vars(args) | {"start_rollout_id": first})
        if self._trainers.restore(self._manager) and (missing := missing_exports(args, first)):
            self._saver.export(first - 1, missing, "export what is missing")
            places = " and ".join(missing.values())
            say(f"nothing is left to train; wrote {places}, missing after rollout {first}")
        self._memory.make_room()

    def _stop(self) -> None:
        """Orderly where it works, by force where it does not; supervisors and the janitor see to the rest."""
        try:
            if not self._ray_is_down:
                self._stop_actors()
            if self._metrics is not None:
                self._metrics.close()
            if not self._ray_is_down:
                ray.shutdown()
            self._warn(self._saver.clean_up())
        finally:
            if self._janitor is not None:
                janitor.dismiss(self._janitor, ended_well=self._ended_well)
            for held in self._run_locks:
                os.close(held)

    def _stop_actors(self) -> None:
        others = [actor for actor in (*self._trainers.actors, self._manager) if actor is not None]
        calls = [actor.stop.remote() for actor in others] + self.engines.end()
        if calls:
            with contextlib.suppress(RayError):
                ray.wait(calls, num_returns=len(calls), timeout=_STOP_S)
        if self._placement is not None:
            with contextlib.suppress(RayError):
                self._placement.release()

    # ---- the loop's verbs

    def generate(self, rollout_id: int) -> list[ray.ObjectRef]:
        """One rollout; a reference to one batch for each data-parallel rank."""
        self.begin_rollout(rollout_id)
        return self.take_rollout(rollout_id)

    def begin_rollout(self, rollout_id: int) -> None:
        """Have a rollout generated in the background; its failure ends whatever the driver then waits for."""
        drawn = self._manager.draw.remote(rollout_id)
        call = self._manager.generate.remote(rollout_id, self._trainers.dp_size, drawn)
        self._supervisor.expect("the rollout manager", call, f"rollout {rollout_id}")
        self._rollouts[rollout_id] = call, time.monotonic()

    def take_rollout(self, rollout_id: int) -> list[ray.ObjectRef]:
        """A rollout that was begun, for training: what `generate` gives. A step begins here."""
        self._step, self._step_started = {}, time.monotonic()
        call, begun = self._rollouts.pop(rollout_id)
        phase = f"rollout {rollout_id}"
        limit = limit_of(self.args, "rollout_timeout", MARGIN_S)
        if self.args.asynchronous:  # an evaluation comes before it, and stale groups are generated again after it
            limit = Deadline(3 * self.args.rollout_timeout + MARGIN_S, limit.flag)
        with span("driver/wait_for_rollout", rollout=rollout_id) as waiting:
            batches, metrics = self._answer_of_engines(call, phase, limit)
        metrics["perf/wait_for_rollout_time"] = waiting.seconds
        metrics["perf/rollout_ahead_time"] = self._step_started - begun
        handed = self._manager.hand_over.remote(rollout_id)
        # No quick answer where a user's data source takes its time over the next rollout's prompts.
        with span("driver/hand_over", rollout=rollout_id):
            prompts = self._answer(handed, f"hand over {phase}, after the prompts that are being drawn", limit)
        self._log(metrics | prompts | self.engines.metrics(), "rollout/step", rollout_id)
        return batches

    def pause_generation(self) -> None:
        """Keep rollouts under way from sending requests."""
        self._in_time_for_weights(self._manager.pause_generation.remote(), "pause generation for a weight update")

    def resume_generation(self, version: int) -> None:
        """Let them go on, under weights of ``version``."""
        self._in_time_for_weights(self._manager.resume_generation.remote(version), "resume generation")

    def _in_time_for_weights(self, call: ray.ObjectRef, what: str) -> None:
        self._answer(call, what, limit_of(self.args, "weight_update_timeout", MARGIN_S))

    def train(self, rollout_id: int, batches: list[ray.ObjectRef]) -> None:
        """Train on one rollout's batches, and log one line of metrics an optimizer step."""
        self._memory.to_trainers()
        with span("driver/train", rollout=rollout_id) as training:
            steps = self._trainers.train(rollout_id, batches, limit_of(self.args, "train_timeout"))
        if steps:
            # The call less what rank 0 did in it: batches on their way, and ranks that began later.
            steps[-1]["perf/transfer_time"] = training.seconds - steps[-1]["perf/train_time"]
        for metrics in steps:
            self._log(metrics, "train/step", self._trainers.optimizer_steps)
            self._trainers.optimizer_steps += 1
        if self._pushes is not None:
            self._pushes.trained = rollout_id + 1

    def push_weights(self, version: int) -> None:
        """Give every engine the trainers' weights; ``version`` is the number of rollouts they were trained on."""
        if self._pushes is None or not (self.engines.expects_weights() and self._trainers.actors):
            return
        with span("driver/push_weights", version=version):
            metrics = self._pushes.push(version)
        self._supervisor.version = str(version)
        self._log(metrics | self._memory.figures(), "rollout/step", max(version - 1, 0))

    def evaluate(self, version: int) -> None:
        """Score the engines' weights, which were trained on ``version`` rollouts."""
        self.begin_evaluation(version)
        self.finish_evaluation()

    def begin_evaluation(self, version: int) -> None:
        """As `evaluate`, in the background; its failure ends whatever the driver then waits for. The engines must keep
        these weights until `finish_evaluation`."""
        call = self._manager.evaluate.remote(version, self._manager.num_cancels.remote())
        self._supervisor.expect("the rollout manager", call, f"evaluation of weight version {version}")
        self._evaluation = call, version

    def finish_evaluation(self) -> None:
        """Wait for the evaluation that was begun, if any is under way, and log its scores."""
        if self._evaluation is None:
            return
        (call, version), self._evaluation = self._evaluation, None
        limit = limit_of(self.args, "rollout_timeout", MARGIN_S)
        with span("driver/wait_for_eval", version=version) as waiting:
            metrics = self._answer_of_engines(call, f"evaluation of weight version {version}", limit)
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
            state = self._answer(self._manager.state.remote(rollout_id), "save the data source", self._saver.limit)
            self._saver.save(rollout_id, state | {"optimizer_steps": self._trainers.optimizer_steps})
        self._log({"perf/save_model_time": saving.seconds}, "rollout/step", rollout_id)

    def end_step(self, rollout_id: int) -> None:
        """Print the step's line."""
        seconds = time.monotonic() - self._step_started
        self._log({"perf/step_time": seconds}, "rollout/step", rollout_id)
        say(step_line(rollout_id, self.args.num_rollout, self._step))

    # ---- helpers

    def _warn(self, warnings: Iterable[str | None]) -> None:
        for warning in filter(None, warnings):
            warn(warning)

    def _answer(self, call: ray.ObjectRef, phase: str, limit: Deadline) -> Any:
        return self._supervisor.wait({"the rollout manager": call}, phase, limit)[0]

    def _answer_of_engines(self, call: ray.ObjectRef, phase: str, limit: Deadline) -> Any:
        """`_answer` of a call that engines work for: trainers are idle, and can give weights to one that came back."""
        until = None if self._pushes is None else self._pushes.may_catch_up
        while not (answers := self._supervisor.wait({"the rollout manager": call}, phase, limit, until)):
            assert self._pushes is not None
            self._catch_up(self._pushes)
        return answers[0]

    def _catch_up(self, pushes: Pushes) -> None:
        is_newer = pushes.is_ahead
        if is_newer:
            self.pause_generation()
        with span("driver/push_weights", version=pushes.trained):
            version = pushes.catch_up()
        if is_newer:
            say(f"no engine served: those that came back have the weights of version {version} before their time")
            self.resume_generation(version)
        self._supervisor.version = str(version)

    def _log(self, metrics: dict[str, float], step_key: str, step: int) -> None:
        assert self._metrics is not None
        self._step = self._step | metrics
        self._metrics.log(metrics, step_key, step)
