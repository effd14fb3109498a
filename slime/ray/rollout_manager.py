"""The actor of the data side: it owns the router, the data source and the rollout function."""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path
from typing import Any

import ray
import torch

from slime.backends.sglang.router import Router
from slime.ray.cluster import enter_actor
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, flatten_samples
from slime.rollout.data_source import RolloutDataSource
from slime.rollout.evaluation import eval_metrics
from slime.rollout.train_data import to_train_batches
from slime.utils import aside
from slime.utils.misc import load_function
from slime.utils.types import Sample

_POLL_S = 0.5


class RolloutManager:
    """Turns prompts into training batches, and checkpoints into scores."""

    def __init__(self, args: argparse.Namespace, api_keys: tuple[str, str] | None) -> None:
        enter_actor(args)
        self._args = args
        self._api_keys = api_keys
        self._router: Router | None = None
        self._data_source: Any = None
        self._rollout = load_function(args.rollout_function_path, flag="--rollout-function-path")
        self._evaluate = load_function(args.eval_function_path, flag="--eval-function-path")

    def load_data(self) -> int:
        """Read the prompts, which recorded rollouts do without; how many rollouts the run has."""
        if self._args.load_debug_rollout_data:
            return self._args.num_rollout
        self._data_source = make_data_source(self._args)
        self._args.num_rollout = num_rollout(self._args, self._data_source)
        return self._args.num_rollout

    def start(self, engine_urls: list[str]) -> None:
        """Start the router, register the engines at it, and make it known to hooks."""
        args = self._args
        host = "127.0.0.1" if self._api_keys is None else ray.util.get_node_ip_address()
        self._router = Router(args, host=host, api_keys=self._api_keys, log_path=f"{args.run_dir}/logs/router.log")
        self._router.start()
        for url in engine_urls:
            self._router.add(url)
        self._router.wait_registered(engine_urls, timeout=args.engine_start_timeout)
        args.sglang_router_ip, port = self._router.url.removeprefix("http://").rsplit(":", 1)
        args.sglang_router_port = int(port)
        args.sglang_router_api_key = self._api_keys[0] if self._api_keys else None
        if self._api_keys:
            # For programs that hooks start: `http_utils.post` there adds the key for this address only.
            os.environ |= {"SLIME_ROUTER_URL": self._router.url, "SLIME_ROUTER_API_KEY": self._api_keys[0]}

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Return, by raising, when the router dies."""
        while True:
            if self._router is not None:
                self._router.check()
            time.sleep(_POLL_S)

    def generate(self, rollout_id: int, dp_size: int) -> tuple[list[ray.ObjectRef], dict[str, float]]:
        """One rollout: a reference to one TrainBatch for each data-parallel rank, and the rollout's metrics."""
        args = self._args
        started = time.monotonic()
        if args.load_debug_rollout_data:
            samples, metrics = _load_samples(args.load_debug_rollout_data, rollout_id), {}
        else:
            output = self._rollout(args, rollout_id, self._data_source)
            if not isinstance(output, RolloutFnTrainOutput):
                output = RolloutFnTrainOutput(samples=output)
            samples, metrics = flatten_samples(output.samples), dict(output.metrics or {})
        metrics.setdefault("perf/rollout_time", time.monotonic() - started)
        if args.save_debug_rollout_data:
            _save_samples(args.save_debug_rollout_data, rollout_id, samples)
        batches, batch_metrics = to_train_batches(args, samples, dp_size)
        return [ray.put(batch) for batch in batches], metrics | batch_metrics

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Score the engines' present weights on every evaluation set."""
        output = self._evaluate(self._args, rollout_id, self._data_source, evaluation=True)
        if not isinstance(output, RolloutFnEvalOutput):
            output = RolloutFnEvalOutput(data=output)
        return eval_metrics(output)

    def state(self, rollout_id: int) -> dict[str, Any]:
        """What a checkpoint needs of the data side; a user's own data source saves itself beside it."""
        if isinstance(self._data_source, RolloutDataSource):
            return {"data_source": self._data_source.state_dict()}
        if self._data_source is not None:
            self._data_source.save(rollout_id)
        return {}

    def restore(self, rollout_id: int, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        if isinstance(self._data_source, RolloutDataSource):
            self._data_source.load_state_dict(state["data_source"])
        elif self._data_source is not None:
            self._data_source.load(rollout_id)

    def stop(self) -> None:
        """End the router."""
        if self._router is not None:
            router, self._router = self._router, None
            router.stop()


def make_data_source(args: argparse.Namespace) -> Any:
    """The run's data source, of the user's class where ``--data-source-path`` names one.

    Raises:
        ValueError: a file or row that cannot be read.
    """
    return load_function(args.data_source_path, flag="--data-source-path")(args)


def num_rollout(args: argparse.Namespace, data_source: Any) -> int:
    """``--num-rollout``, or what ``--num-epoch`` makes of the number of prompts; a last, partial batch wraps."""
    if args.num_rollout is not None:
        return args.num_rollout
    return math.ceil(args.num_epoch * len(data_source) / args.rollout_batch_size)


def _save_samples(template: str, rollout_id: int, samples: list[Sample]) -> None:
    path = Path(template.format(rollout_id=rollout_id))
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"rollout_id": rollout_id, "samples": [s.to_dict() for s in samples]}
    aside.write_file(path, lambda unfinished: torch.save(content, unfinished))


def _load_samples(template: str, rollout_id: int) -> list[Sample]:
    path = Path(template.format(rollout_id=rollout_id))
    if not path.is_file():
        raise ValueError(f"--load-debug-rollout-data: no file {path} for rollout {rollout_id}")
    return [Sample.from_dict(d) for d in torch.load(path, weights_only=False)["samples"]]
