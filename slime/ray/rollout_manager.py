"""The actor of the data side: it owns the routers, the data source and the rollout function."""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import ray

from slime.backends.sglang.router import Router
from slime.data import Group, Sample
from slime.options.calls import parameters_of
from slime.options.rollout import DEFAULT_ROLLOUT, generates_itself
from slime.options.validate import check_schedule
from slime.ray.cluster import enter_actor, serving_host
from slime.ray.examination import Examiner
from slime.rollout.abort import forget_engine, register_engines
from slime.rollout.base_types import train_output
from slime.rollout.data_source import DataSource, RolloutDataSource
from slime.rollout.data_warnings import data_warnings
from slime.rollout.debug_data import check_recorded, load_samples, save_evaluation, save_samples
from slime.rollout.evaluation import eval_metrics, evaluation_output, load_eval_prompts, warn_of_unscored
from slime.rollout.gate import hold_requests, shared_gate
from slime.rollout.hooks import accepted, naming
from slime.rollout.log_hooks import logs_evaluation, logs_rollout
from slime.rollout.loop import background_loop
from slime.rollout.metrics import accounting
from slime.rollout.model_urls import ACTOR, REWARD
from slime.rollout.resend_log import ResendLog
from slime.rollout.reward_log import RewardLog
from slime.rollout.sample_stats import sample_metrics
from slime.rollout.sglang_rollout import draw_first_groups, generate_groups
from slime.rollout.staleness import renew_stale, staleness_metrics
from slime.rollout.state import concurrency, place_of_request
from slime.rollout.train_data import to_train_batches
from slime.rollout.under_way import under_way
from slime.utils import http_utils
from slime.utils.environment import bypass_proxies
from slime.utils.errors import BadInputError, SlimeError
from slime.utils.misc import attribute_of, load_function

logger = logging.getLogger(__name__)

_POLL_S = 0.5
ROLLOUTS, EVALUATION, ROUTERS = "rollouts", "evaluation", "routers"
"""Ray's concurrency groups, threads of their own: a rollout under way keeps no other call from being answered."""
_SOURCE_STATE, _SOURCE_CLASS = "data_source", "data_source_class"


class RolloutManager:
    """Turns prompts into training batches, and checkpoints into scores.

    Several rollouts may be under way: `draw` gives each its prompts, in order, `generate` makes the samples, and
    `hand_over` notes that the trainers take them.
    """

    def __init__(self, args: argparse.Namespace, api_keys: tuple[str, str] | None) -> None:
        enter_actor(args)
        self._args = args
        self._api_keys = api_keys
        self._routers: dict[str, Router] = {}
        """By the name of the model behind it."""
        self._data_source: Any = None
        self._drawn: dict[int, list[Group]] = {}
        self._made: dict[int, list[Sample]] = {}
        """Rollouts that no trainer has taken yet."""
        self._reward_log = RewardLog()
        self._examiner: Examiner | None = None
        self._engines: set[str] = set()
        """URLs of the actor's engines that get requests."""
        self._removing = threading.Lock()
        self._rollout = load_function(args.rollout_function_path, flag="--rollout-function-path")
        self._evaluate = load_function(args.eval_function_path, flag="--eval-function-path")

    def load_data(self) -> int:
        """Read the prompts, which recorded rollouts do without, and the evaluation's; how many rollouts the run has."""
        load_eval_prompts(self._args)
        if self._args.load_debug_rollout_data:
            check_recorded(self._args)
            return self._args.num_rollout
        self._data_source = make_data_source(self._args)
        self._args.num_rollout = num_rollout(self._args, self._data_source)
        check_schedule(self._args)
        for warning in data_warnings(self._args, self._data_source):
            logger.warning(warning)
        return self._args.num_rollout

    @ray.method(concurrency_group=ROUTERS)
    def open_routers(self, reward: bool) -> None:
        """Start the router, and one for the reward model's engines if there are any; make them known to hooks."""
        args, host = self._args, serving_host(self._api_keys)
        bypass_proxies([host])  # hooks may ask the router by clients of their own
        for model in (ACTOR, REWARD) if reward else (ACTOR,):
            # The user's flags are for the other one.
            its_args = args if model == ACTOR else argparse.Namespace(**vars(args) | {"router_cli": []})
            name = "router" if model == ACTOR else f"{model} router"
            log_path = f"{args.run_dir}/logs/{name.replace(' ', '_')}.log"
            router = self._routers[model] = Router(its_args, host, self._api_keys, log_path, name)
            router.start()
            router.listen()
            if model == ACTOR:
                http_utils.limit_posts(router.url, place_of_request)
                self._resend_log = ResendLog(router.url)
        args.sglang_model_routers = {model: _address(router) for model, router in self._routers.items()}
        args.sglang_router_ip, args.sglang_router_port = args.sglang_model_routers[ACTOR]
        args.sglang_router_api_key = self._api_keys[0] if self._api_keys else None
        if self._api_keys:
            # For programs that hooks start: `http_utils.post` there adds the key for these addresses only.
            os.environ |= {"SLIME_ROUTER_API_KEY": self._api_keys[0]}
            os.environ |= {http_utils.ROUTER_VARIABLES[name]: router.url for name, router in self._routers.items()}

    def register(self, opened: None, engines: dict[str, Any], reward_urls: list[str]) -> None:
        """Make engines known to the router of their model, and those of the actor to hooks.

        Args:
            opened: the answer of `open_routers`, which Ray so waits for.
            engines: the actors of the actor's, by URL.
        """
        engine_urls = list(engines)
        deadline = time.monotonic() + self._args.engine_start_timeout
        bypass_proxies([urlsplit(url).hostname or "" for url in (*engine_urls, *reward_urls)])
        for model, router in self._routers.items():
            urls = engine_urls if model == ACTOR else reward_urls
            for url in urls:
                router.add(url)
            router.wait_registered(urls, timeout=max(0.0, deadline - time.monotonic()))
        register_engines(engine_urls, self._api_keys[1] if self._api_keys else None)
        self._engines = set(engine_urls)
        self._examiner = Examiner(engines, self._args.rollout_health_check_timeout, self.remove_engine)
        http_utils.examine_by(self._routers[ACTOR].url, self._examiner)

    def remove_engine(self, url: str) -> None:
        """Send nothing more to an engine that has died or hangs, and have fewer requests in flight."""
        with self._removing:
            if url not in self._engines:
                return  # it was found to hang before its end was known
            self._routers[ACTOR].remove(url)
            forget_engine(url)
            # Last: where the router fails, the next who finds out tries again.
            self._engines.remove(url)
            self._args.num_engines -= 1
        background_loop().soon(shared_gate, concurrency(self._args))

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Return, by raising, when a router dies or hangs."""
        while True:
            for router in list(self._routers.values()):
                router.check()
            time.sleep(_POLL_S)

    def draw(self, rollout_id: int) -> None:
        """Take the prompts of slime's own rollout from the data source; one call after the other, in their order.

        A rollout function of the user's takes them by itself, and is never called for two rollouts at the same time.
        """
        if rollouts_overlap(self._args):
            with under_way(rollout_id):
                self._drawn[rollout_id] = draw_first_groups(self._args, self._data_source)

    @ray.method(concurrency_group=ROLLOUTS)
    def generate(self, rollout_id: int, dp_size: int, drawn: None) -> tuple[list[ray.ObjectRef], dict[str, float]]:
        """One rollout: a reference to one TrainBatch for each data-parallel rank, and the rollout's metrics.

        Args:
            drawn: the answer of `draw`, which Ray so waits for.
        """
        args = self._args
        started = time.monotonic()
        with under_way(rollout_id), self._generating():
            samples, metrics = self._samples(rollout_id)
        generated = time.monotonic()
        metrics.setdefault("perf/rollout_time", generated - started)
        metrics |= sample_metrics(args, samples)
        if logs_rollout(args, rollout_id, samples, metrics, generated - started):
            metrics = {"perf/rollout_time": generated - started}
        if args.save_debug_rollout_data:
            save_samples(args, rollout_id, samples)
        batches, batch_metrics = to_train_batches(args, samples, dp_size)
        self._reward_log.check(args, rollout_id, samples, batches, batch_metrics)
        self._made[rollout_id] = samples
        references = [ray.put(batch) for batch in batches]
        metrics["perf/convert_time"] = time.monotonic() - generated
        return references, metrics | batch_metrics | self._resends(rollout_id)

    def _resends(self, rollout_id: int) -> dict[str, float]:
        router = self._routers.get(ACTOR)
        return {} if router is None else self._resend_log.metrics(rollout_id, router.failed_tries())

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

    def _generating(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._examiner is None else self._examiner.working()

    def hand_over(self, rollout_id: int) -> dict[str, float]:
        """Note that the trainers take a rollout; where all prompts are then."""
        samples, source = self._made.pop(rollout_id), self._data_source
        if not isinstance(source, RolloutDataSource):
            return {}
        with source.lock:
            source.count_trained(samples)
            return accounting(self._args, source, in_flight=source.num_in_flight(after=rollout_id))

    def hold_requests(self, hold: bool, version: int | None) -> None:
        """Send engines no new requests while weights are pushed, or go on under those of ``version``."""
        timeout = self._args.weight_update_timeout
        if self._examiner is not None:
            self._examiner.forbid() if hold else self._examiner.allow()
        background_loop().run(
            hold_requests(hold, version), timeout=timeout, what="holding requests during a weight update"
        )

    @ray.method(concurrency_group=EVALUATION)
    def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Score the engines' present weights on every evaluation dataset; what there is to log of it."""
        started = time.monotonic()
        args = self._args
        with _naming("--eval-function-path", args.eval_function_path), self._generating():
            wanted = accepted(self._evaluate, evaluation=True)
            output = evaluation_output(self._evaluate(args, rollout_id, self._data_source, **wanted))
        if args.save_debug_rollout_data:
            save_evaluation(args, rollout_id, output.data)
        extra = dict(output.metrics or {})
        seconds = {"perf/eval_time": extra.pop("perf/eval_time", time.monotonic() - started)}
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
        while self._routers:
            self._routers.popitem()[1].stop()


def _naming(flag: str, path: str) -> contextlib.AbstractContextManager[None]:
    """Within the block a user's function runs; our own errors say enough by themselves."""
    return naming(f"{flag} {path}", passes=SlimeError)


def rollouts_overlap(args: argparse.Namespace) -> bool:
    """Whether several rollouts may be generated at the same time: users' functions are called for one at a time."""
    return args.rollout_function_path == DEFAULT_ROLLOUT and not args.load_debug_rollout_data


def _address(router: Router) -> tuple[str, int]:
    """An IPv6 host keeps its brackets, which hooks that put host and port together would forget."""
    address, port = router.url.removeprefix("http://").rsplit(":", 1)
    return address, int(port)


def make_data_source(args: argparse.Namespace) -> Any:
    """The run's data source, of the user's class where ``--data-source-path`` names one.

    One with a parameter ``dataset`` is given that of ``--prompt-data``.

    Raises:
        BadInputError: a file or row that cannot be read, or what was made is no data source.
        HookError: the user's class raised something else.
    """
    flag, path = "--data-source-path", args.data_source_path
    function = load_function(path, flag=flag)
    dataset = [RolloutDataSource(args).dataset] if "dataset" in parameters_of(function) else []
    with _naming(flag, path):
        source = function(*dataset, args)
    if not callable(attribute_of(source, "get_samples", None, f"{flag} {path}")):
        raise BadInputError(
            f"{flag} {path}: it must make an object with get_samples and add_samples, not {type(source).__name__}"
        )
    return source


def source_state(source: Any, rollout_id: int) -> dict[str, Any]:
    """The state of a data source (None: there is none), and its class; a ``save`` of its own is called as well."""
    if source is None:
        return {}
    state: dict[str, Any] = {_SOURCE_CLASS: _class_name(source)}
    if isinstance(source, RolloutDataSource):
        state[_SOURCE_STATE] = source.state_dict()
    if _has_own(source, "save"):
        with naming(f"{type(source).__name__}.save (--data-source-path)", passes=SlimeError):
            source.save(rollout_id)
    return state


def restore_source(source: Any, rollout_id: int, state: dict[str, Any]) -> None:
    """The inverse of `source_state`.

    Raises:
        BadInputError: the state is that of a class of another kind.
    """
    if source is None:
        return
    if isinstance(source, RolloutDataSource) != (_SOURCE_STATE in state):
        made_with = state.get(_SOURCE_CLASS, "no data source (--load-debug-rollout-data)")
        raise BadInputError(
            f"--load: the checkpoint was made with {made_with}, and --data-source-path is now {_class_name(source)}, "
            f"which cannot go on from there: resume with the former"
        )
    if _SOURCE_STATE in state:
        source.load_state_dict(state[_SOURCE_STATE])
    if _has_own(source, "load"):
        with naming(f"{type(source).__name__}.load (--data-source-path)", passes=SlimeError):
            source.load(rollout_id)


def _has_own(source: Any, method: str) -> bool:
    return getattr(type(source), method, None) not in (None, getattr(DataSource, method))


def _class_name(source: Any) -> str:
    return f"{type(source).__module__}.{type(source).__qualname__}"


def num_rollout(args: argparse.Namespace, data_source: Any) -> int:
    """``--num-rollout``, or what ``--num-epoch`` makes of the number of prompts; a last, partial batch wraps.

    Raises:
        BadInputError: the data source does not know how many there are.
    """
    if args.num_rollout is not None:
        return args.num_rollout
    prompts = num_prompts(args, data_source)
    if prompts is None:
        raise BadInputError(
            f"--num-epoch {args.num_epoch}: --data-source-path {args.data_source_path} has no __len__: give "
            "--num-rollout"
        )
    return math.ceil(args.num_epoch * prompts / args.rollout_batch_size)


def num_prompts(args: argparse.Namespace, data_source: Any) -> int | None:
    """Prompts of an epoch; None of a user's source that does not know."""
    if not hasattr(type(data_source), "__len__"):
        return None
    with _naming("--data-source-path", args.data_source_path):
        return len(data_source)
