"""The actor of the data side: it owns the routers, the data source and the rollout function."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import ray

from slime.backends.sglang.router import KEY_VARIABLES, RouterKeys
from slime.data import Group, Sample
from slime.data.rows.dataset import data_warnings
from slime.data.rows.tokenizer import probe_tokens
from slime.data.source.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.data.source.prompts import as_groups, put_back
from slime.data.source.rollout_context import rollout_context
from slime.data.source.users_class import (
    check_going_on,
    make_data_source,
    num_rollout,
    restore_source,
    source_state,
    state_by_value,
)
from slime.driver.rates import operations
from slime.fleet.membership import Membership
from slime.fleet.routers import Routers
from slime.fleet.spec import ModelSpec
from slime.observability import events, logs
from slime.observability.trace import span
from slime.options.rollout import DEFAULT_ROLLOUT, generates_itself
from slime.options.training import check_schedule
from slime.ray.cluster import actor_environment, as_actor, enter_actor, on_this_host
from slime.rollout.base_types import train_output
from slime.rollout.batches.debug_data import check_recorded, load_samples, save_evaluation, save_samples
from slime.rollout.batches.metrics import accounting, sample_metrics
from slime.rollout.batches.reward_log import RewardLog
from slime.rollout.batches.staleness import renew_stale, staleness_metrics
from slime.rollout.batches.train_data import to_train_batches
from slime.rollout.batches.warmup_log import WarmupLog
from slime.rollout.engine.loop import background_loop
from slime.rollout.evaluation import eval_metrics, evaluation_output, load_eval_prompts, warn_of_unscored
from slime.rollout.runtime import RolloutRuntime
from slime.rollout.sglang_rollout import draw_first_groups, generate_groups
from slime.rollout.user.hooks import accepted, logs_evaluation, logs_rollout
from slime.utils.errors import CancelledRolloutError, DeadlineError, SlimeError
from slime.utils.misc import load_function
from slime.utils.user_functions import naming

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_CANCEL_S = 60.0
"""More than rollouts take to end: filters, then groups, then connections."""
ROLLOUTS, EVALUATION, ROUTERS = "rollouts", "evaluation", "routers"
"""Ray's concurrency groups, threads of their own: a rollout under way keeps no other call from being answered."""


class RolloutManager:
    """Turns prompts into training batches, and checkpoints into scores.

    Several rollouts may be under way: `draw` gives each its prompts, in order, `generate` makes the samples, and
    `hand_over` notes that the trainers take them.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        api_keys: tuple[str, str] | None,
        models: Sequence[ModelSpec] = (),
        running_keys: RouterKeys = (None, None),
    ) -> None:
        enter_actor(args, "rollout_manager")
        logs.hide((*(api_keys or ()), *filter(None, running_keys)))
        self._runtime = RolloutRuntime(args)
        self._runtime.own_process()
        self._routers = Routers(args, api_keys, self._runtime, models, running_keys)
        self._args = args = argparse.Namespace(**vars(args) | self._routers.options())
        self._data_source: Any = None
        self._first_state: dict[str, Any] = {}
        """That of the data source before any prompt was drawn."""
        self._drawn: dict[int, list[Group]] = {}
        self._made: dict[int, list[Sample]] = {}
        """Rollouts that no trainer has taken yet."""
        self._reward_log, self._warmup_log = RewardLog(), WarmupLog()
        self._under_way: dict[object, str] = {}
        """What each call is about."""
        self._num_cancels = 0
        self._rollout = load_function(args.rollout_function_path, flag="--rollout-function-path")
        self._evaluate = load_function(args.eval_function_path, flag="--eval-function-path")

    def load_data(self) -> int:
        """Read the prompts, which recorded rollouts do without, and the evaluation's; how many rollouts the run has."""
        load_eval_prompts(self._args)
        if self._args.load_debug_rollout_data:
            check_recorded(self._args)
            return self._args.num_rollout
        self._data_source = make_data_source(self._args)
        self._first_state = state_by_value(self._data_source) or {}
        rollouts = num_rollout(self._args, self._data_source)
        self._args = argparse.Namespace(**vars(self._args) | {"num_rollout": rollouts})
        check_schedule(self._args)
        check_going_on(self._args, self._data_source)  # before a model is loaded; `restore` tells what it warns of
        for warning in data_warnings(self._args, self._data_source):
            logger.warning(warning)
        return rollouts

    @ray.method(concurrency_group=ROUTERS)
    def open_routers(self) -> None:
        """Start the router of each model."""
        self._routers.open()

    @ray.method(concurrency_group=ROUTERS)
    def serve(self, membership: Membership, opened: None) -> None:
        """Send requests to the engines that are there now; Ray waits for ``opened``, the answer of `open_routers`."""
        self._routers.serve(membership)

    @ray.method(concurrency_group=ROUTERS)
    def confirm_routers(self, membership: Membership) -> None:
        """Raise EngineError where a router has other engines."""
        self._routers.confirm(membership)

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Return, by raising, when a router dies or hangs."""
        while True:
            self._routers.check(" and ".join(self._under_way.copy().values()) or "between rollouts")
            time.sleep(_POLL_S)

    def draw(self, rollout_id: int) -> int:
        """Take the prompts of slime's own rollout from the data source, in order; how often `cancel` was called. A
        rollout function of the user's takes them by itself, and is never called for two rollouts at the same time."""
        if rollouts_overlap(self._args):
            with rollout_context(rollout_id), span("rollout/draw", rollout=rollout_id):
                self._drawn[rollout_id] = draw_first_groups(self._args, self._data_source)
        return self._num_cancels

    @ray.method(concurrency_group=ROLLOUTS)
    def generate(self, rollout_id: int, dp_size: int, drawn: int) -> list[Any]:
        """One rollout: its metrics, and one TrainBatch for each data-parallel rank. Who calls it has them returned one
        by one, and owns them: they outlive this process.

        Ray waits for ``drawn``, the answer of `draw`; CancelledRolloutError if `cancel` was called meanwhile.
        """
        args = self._args
        with self._cancellable(drawn, f"rollout {rollout_id}"), rollout_context(rollout_id):
            with span("rollout/samples", rollout=rollout_id) as generated, self._routers.working():
                samples, metrics = self._samples(rollout_id)
            self._made[rollout_id] = samples
            self._warmup_log.check(args, rollout_id, metrics)
            metrics.setdefault("perf/rollout_time", generated.seconds)
            with span("rollout/convert", rollout=rollout_id) as converted:
                metrics |= sample_metrics(args, samples)
                if logs_rollout(args, rollout_id, samples, metrics, generated.seconds):
                    metrics = {"perf/rollout_time": generated.seconds}
                if args.save_debug_rollout_data:
                    save_samples(args, rollout_id, samples)
                batches, batch_metrics = to_train_batches(args, samples, dp_size)
                self._reward_log.check(args, rollout_id, samples, batches, batch_metrics)
        metrics["perf/convert_time"] = converted.seconds
        batch_metrics |= operations(args, batches)
        return [metrics | batch_metrics | self._routers.resends(rollout_id), *batches]

    def _samples(self, rollout_id: int) -> tuple[list[Sample], dict[str, Any]]:
        args = self._args
        if args.load_debug_rollout_data:
            return load_samples(args, rollout_id), {}
        if rollouts_overlap(args):
            output = train_output(generate_groups(args, rollout_id, self._data_source, self._drawn.pop(rollout_id)))
        else:
            with _naming("--rollout-function-path", args.rollout_function_path):
                output = train_output(self._rollout(args, rollout_id, self._data_source))
        samples, metrics = output.samples, dict(output.metrics or {})
        if args.asynchronous:
            samples, counts = renew_stale(args, rollout_id, samples, self._data_source)
            metrics |= counts
        if args.asynchronous or args.over_sampling_batch_size:
            metrics |= staleness_metrics(rollout_id, samples)
        return samples, metrics

    @contextlib.contextmanager
    def _cancellable(self, num_cancels: int, what: str) -> Iterator[None]:
        """Within, `cancel` waits for the call, which then raises whatever it has done by then."""

        def check() -> None:
            if num_cancels != self._num_cancels:
                raise CancelledRolloutError(f"{what} was cancelled")

        call = object()
        self._under_way[call] = what
        try:
            check()
            yield
            check()
        finally:
            del self._under_way[call]

    def cancel(self) -> None:
        """End rollouts and evaluations under way, whose calls raise CancelledRolloutError, and all requests at engines.

        Prompts that no trainer has taken are handed out again, in their order, as if a run had been resumed.
        DeadlineError if a user's function goes on all the same.
        """
        self._end_work()
        drawn, made, self._drawn, self._made = self._drawn, self._made, {}, {}
        if isinstance(self._data_source, RolloutDataSource):
            self._data_source.hand_out_again()
        elif self._data_source is not None:
            groups = chain(*drawn.values(), *(as_groups(self._args, samples) for samples in made.values()))
            put_back(self._data_source, list(groups))

    def _end_work(self) -> None:
        self._num_cancels += 1
        deadline = time.monotonic() + _CANCEL_S
        while True:
            background_loop().cancel(_CANCEL_S)
            background_loop().run(self._runtime.abort_requests(None), timeout=_CANCEL_S, what="ending requests")
            if not self._under_way:
                break
            if time.monotonic() > deadline:
                raise DeadlineError(f"{_CANCEL_S:.0f} s after they were cancelled rollouts or evaluations still go on")
            time.sleep(_POLL_S)

    def rewind(self, rollout_id: int, state: dict[str, Any] | None) -> None:
        """End all that is under way, as `cancel` does, and go back to where the data was after a rollout (`state`), or
        before the first of a run. A user's data source is made anew for that, as in a run that is resumed."""
        self._end_work()
        self._drawn, self._made = {}, {}
        if type(self._data_source) in (RolloutDataSource, RolloutDataSourceWithBuffer):
            self.restore(rollout_id, state or self._first_state)
            return
        if self._data_source is not None:
            self._data_source = make_data_source(self._args)
        if state is not None:
            self.restore(rollout_id, state)

    def hand_over(self, rollout_id: int) -> tuple[tuple[dict[str, float], bool], dict[str, Any]]:
        """Note that the trainers take a rollout; where all prompts are then, whether another manager could go on from
        the state that this one has now, and that state."""
        samples, source = self._made.pop(rollout_id), self._data_source
        figures: dict[str, float] = {}
        if isinstance(source, RolloutDataSource):
            with source.lock:
                source.count_trained(samples)
                figures = accounting(self._args, source, in_flight=source.num_in_flight(after=rollout_id))
        # Of a large buffer it takes a second: only where somebody may go on from it.
        state = state_by_value(source) if self._args.use_fault_tolerance else None
        return (figures, state is not None), state or {}

    def pause_generation(self) -> None:
        """Send engines no new requests while weights are pushed."""
        self._routers.hold(True)
        self._runtime.pause_generation()

    def resume_generation(self, version: int) -> None:
        """Send them requests again, under weights of ``version``."""
        self._routers.hold(False)
        resumed, timeout = self._runtime.resume_generation(version), self._args.weight_update_timeout
        background_loop().run(resumed, timeout=timeout, what="resuming generation after a weight update")

    def probe_tokens(self) -> list[int]:
        """A fixed text, as the model has it."""
        return probe_tokens(self._args.hf_checkpoint)

    def note_version(self, version: str) -> None:
        """Tell of faults at this version of the engines' weights from now on."""
        events.at_version(version)

    def num_cancels(self) -> int:
        """How often `cancel` was called so far."""
        return self._num_cancels

    @ray.method(concurrency_group=EVALUATION)
    def evaluate(self, rollout_id: int, num_cancels: int) -> dict[str, float]:
        """Score the engines' weights on every evaluation dataset, unless cancelled after `num_cancels`; its metrics."""
        args, named = self._args, _naming("--eval-function-path", self._args.eval_function_path)
        call = self._cancellable(num_cancels, f"the evaluation of weight version {rollout_id}")
        with span("rollout/evaluate", version=rollout_id) as timed, named, call, self._routers.working():
            wanted = accepted(self._evaluate, evaluation=True)
            output = evaluation_output(self._evaluate(args, rollout_id, self._data_source, **wanted))
        if args.save_debug_rollout_data:
            save_evaluation(args, rollout_id, output.data)
        extra = dict(output.metrics or {})
        seconds = {"perf/eval_time": extra.pop("perf/eval_time", timed.seconds)}
        logged = logs_evaluation(args, rollout_id, output.data, extra | seconds)
        # Of functions of a user's own for both, only the user knows the form.
        if not logged or generates_itself(args.eval_function_path):
            warn_of_unscored(rollout_id, output)
        if logged:
            return seconds
        return eval_metrics(output) | seconds

    def state(self, rollout_id: int) -> dict[str, Any]:
        """What a checkpoint needs of the data side; what a user's class has to `save` by itself lies beside it."""
        return source_state(self._data_source, rollout_id)

    def restore(self, rollout_id: int, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        restore_source(self._data_source, rollout_id, state)

    def stop(self) -> None:
        """End the routers."""
        self._routers.stop()


def create_manager(args: argparse.Namespace, api_keys: tuple[str, str] | None, models: Sequence[ModelSpec]) -> Any:
    """The rollout manager, on the driver's host: there are the files that the driver has checked."""
    running = bool(models) and args.sglang_router_ip is not None
    running_keys = tuple(os.environ.get(name) if running else None for name in KEY_VARIABLES)
    options = {"runtime_env": actor_environment(), **on_this_host()}
    overlap = args.async_buffer_size + 2 if args.asynchronous and rollouts_overlap(args) else 1
    # Of routers two: while one waits for a router to find an engine healthy, the other takes that away if it dies.
    threads = {ROLLOUTS: overlap, EVALUATION: 1, ROUTERS: 2}
    return as_actor(RolloutManager, **threads).options(**options).remote(args, api_keys, models, running_keys)


def _naming(flag: str, path: str) -> contextlib.AbstractContextManager[None]:
    """Within the block a user's function runs; our own errors say enough by themselves."""
    return naming(f"{flag} {path}", passes=SlimeError)


def rollouts_overlap(args: argparse.Namespace) -> bool:
    """Whether several rollouts may be generated at the same time: users' functions are called for one at a time."""
    return args.rollout_function_path == DEFAULT_ROLLOUT and not args.load_debug_rollout_data
