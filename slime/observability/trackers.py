"""Experiment trackers that take every line of metrics beside ``metrics.jsonl``: one small class each."""

from __future__ import annotations

import argparse
import math
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from slime.files.storage import writing
from slime.observability.progress import warn
from slime.utils.command_line import strike_secrets
from slime.utils.errors import BadInputError
from slime.utils.redaction import redacted

_FINISH_S = 60
_MOST_LINES = 10_000
"""That wait for a tracker which does not answer; later ones are lost."""


class Sink(Protocol):
    """Where lines of metrics go."""

    place: tuple[str, str]
    """The flag that names where it writes, and where that is."""

    def write(self, metrics: dict[str, float], step_key: str, step: int) -> None:
        """Take a line."""

    def close(self) -> None:
        """Finish what is under way."""


def trackers(args: argparse.Namespace) -> list[Sink]:
    """Those that the options ask for. BadInputError if Weights & Biases does not take the run, StorageError if a
    directory cannot be made; what the others cannot do is a warning."""
    asked = [make for option, make in _TRACKERS.items() if getattr(args, option, False)]
    if asked:
        strike_secrets()  # several record the command line
    return [make(args) for make in asked]


def _plain(args: argparse.Namespace) -> dict[str, Any]:
    """The run's options without secrets, as values that every tracker takes."""
    plain = (str, int, float, bool, type(None), list, tuple, dict)
    return {name: v if isinstance(v, plain) else str(v) for name, v in redacted(vars(args)).items()}


class InThread:
    """A tracker that lives in a thread of its own, so that no server of it holds a run up: neither at its start nor
    later. What fails there is said once."""

    def __init__(self, flag: str, make: Callable[[], Sink]) -> None:
        """``make`` begins it, in the thread."""
        self.place = flag, ""
        self._make = make
        self._lines: queue.Queue[tuple[dict[str, float], str, int] | None] = queue.Queue(_MOST_LINES)
        self._failed = False
        self._thread = threading.Thread(target=self._work, name=flag, daemon=True)
        self._thread.start()

    def write(self, metrics: dict[str, float], step_key: str, step: int) -> None:
        """Have a line written; it is lost where it cannot be."""
        try:
            self._lines.put_nowait((metrics, step_key, step))
        except queue.Full:
            self._say(f"it has not taken {_MOST_LINES} lines")

    def close(self) -> None:
        """Wait a minute for what is left."""
        try:
            self._lines.put(None, timeout=_FINISH_S)
        except queue.Full:
            return
        self._thread.join(_FINISH_S)
        if self._thread.is_alive():
            self._say(f"it did not finish within {_FINISH_S} s")

    def _work(self) -> None:
        try:
            sink = self._make()
        except Exception as error:  # of any server, in no type in common
            return self._give_up(error)
        while (line := self._lines.get()) is not None:
            self._try(lambda line=line: sink.write(*line))  # type: ignore[misc]
        self._try(sink.close)

    def _try(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:
            self._say(f"{type(error).__name__}: {error}")

    def _give_up(self, error: Exception) -> None:
        self._say(f"{type(error).__name__}: {error}")
        while self._lines.get() is not None:
            pass

    def _say(self, why: str) -> None:
        if not self._failed:
            self._failed = True
            warn(f"{self.place[0]}: {' '.join(why.split())}; the run goes on, and metrics are lost there")


class TensorBoard:
    """Event files, each metric over its own step."""

    def __init__(self, args: argparse.Namespace) -> None:
        from torch.utils.tensorboard import SummaryWriter

        directory = Path(args.tb_project_name or args.run_dir) / (args.tb_experiment_name or "tensorboard")
        self.place = "--tb-project-name" if args.tb_project_name else "--run-dir", str(directory)
        with writing(*self.place):
            self._writer = SummaryWriter(str(directory))

    def write(self, metrics: dict[str, float], step_key: str, step: int) -> None:
        """Take a line."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, whose own service does what waits for the network."""

    def __init__(self, args: argparse.Namespace) -> None:
        import wandb

        group = args.wandb_group
        if group and not args.disable_wandb_random_suffix:
            group = f"{group}_{secrets.token_hex(4)}"
        directory = Path(args.wandb_dir or args.run_dir)
        self.place = "--wandb-dir" if args.wandb_dir else "--run-dir", str(directory)
        with writing(*self.place):
            directory.mkdir(parents=True, exist_ok=True)
        settings: dict[str, Any] = {"finish_timeout": _FINISH_S, "finish_timeout_raises": False}
        if args.wandb_host:
            settings["base_url"] = args.wandb_host
        if args.wandb_key:
            # Unlike wandb.login, this leaves the key out of ~/.netrc.
            settings["api_key"] = args.wandb_key
        try:
            self._run = wandb.init(
                project=args.wandb_project or "slime",
                entity=args.wandb_team,
                group=group,
                name=group,
                id=args.wandb_run_id,
                resume="allow" if args.wandb_run_id else None,
                dir=str(directory),
                mode=args.wandb_mode,
                config=_plain(args),
                settings=wandb.Settings(**settings),
            )
        except wandb.errors.Error as error:
            raise BadInputError(
                f"--use-wandb: {' '.join(str(error).split())} (see --wandb-key, --wandb-host, --wandb-mode offline)"
            ) from error
        self._axes: set[str] = set()
        self._train_steps_per_rollout = args.num_steps_per_rollout if args.wandb_always_use_train_step else 1

    def write(self, metrics: dict[str, float], step_key: str, step: int) -> None:
        """Take a line."""
        if step_key != "train/step":
            step *= self._train_steps_per_rollout
        if step_key not in self._axes:
            self._axes.add(step_key)
            self._run.define_metric(step_key, hidden=True)
        for name in metrics:
            if name not in self._axes:
                self._axes.add(name)
                self._run.define_metric(name, step_metric=step_key)
        self._run.log(metrics | {step_key: step})

    def close(self) -> None:
        """Wait for its service."""
        self._run.finish()


class _Mlflow:
    """A run of MLflow, by its client: the fluent functions keep theirs by thread."""

    _NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")
    _MOST_PARAMS, _LONGEST = 100, 500

    def __init__(self, args: argparse.Namespace) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        default = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path(args.run_dir, 'mlflow.db').resolve()}"
        uri = args.mlflow_tracking_uri or default
        self.place = "--mlflow-tracking-uri", uri
        self._client, self._metric = MlflowClient(tracking_uri=uri), Metric
        name = args.mlflow_experiment_name or "slime"
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        self._run = self._client.create_run(experiment, run_name=args.mlflow_run_name).info.run_id
        params = [Param(key, str(value)[: self._LONGEST]) for key, value in _plain(args).items()]
        for first in range(0, len(params), self._MOST_PARAMS):
            self._client.log_batch(self._run, params=params[first : first + self._MOST_PARAMS])

    def write(self, metrics: dict[str, float], step_key: str, step: int) -> None:
        now = int(time.time() * 1000)
        names = {self._NOT_IN_NAMES.sub("_", name): value for name, value in metrics.items()}
        points = [self._metric(name, float(value), now, step) for name, value in names.items()]
        self._client.log_batch(self._run, metrics=points)

    def close(self) -> None:
        self._client.set_terminated(self._run)


class _SwanLab:
    def __init__(self, args: argparse.Namespace) -> None:
        import swanlab

        self.place = "--run-dir", str(Path(args.run_dir, "swanlab"))
        self._package = swanlab
        swanlab.init(
            project=args.swanlab_project or "slime",
            workspace=args.swanlab_workspace,
            experiment_name=args.swanlab_experiment_name,
            config=_plain(args),
            logdir=self.place[1],
            mode=args.swanlab_mode,
        )

    def write(self, metrics: dict[str, float], step_key: str, step: int) -> None:
        self._package.log({name: float(v) for name, v in metrics.items() if math.isfinite(v)}, step=step)

    def close(self) -> None:
        self._package.finish()


class _Trackio:
    def __init__(self, args: argparse.Namespace) -> None:
        import trackio

        self.place = "--use-trackio", args.trackio_project or "slime"
        self._run = trackio.init(
            project=self.place[1], name=args.trackio_run_name, space_id=args.trackio_space_id, config=_plain(args)
        )

    def write(self, metrics: dict[str, float], step_key: str, step: int) -> None:
        self._run.log({name: float(value) for name, value in metrics.items()} | {step_key: step}, step=step)

    def close(self) -> None:
        self._run.finish()


_TRACKERS: dict[str, Callable[[argparse.Namespace], Sink]] = {
    "use_tensorboard": TensorBoard,
    "use_wandb": Wandb,
    "use_mlflow": lambda args: InThread("--use-mlflow", lambda: _Mlflow(args)),
    "use_swanlab": lambda args: InThread("--use-swanlab", lambda: _SwanLab(args)),
    "use_trackio": lambda args: InThread("--use-trackio", lambda: _Trackio(args)),
}
"""By the option that asks for it."""
