"""Where metrics go: metrics.jsonl always, TensorBoard and Weights & Biases when asked."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from slime.files.storage import why_not_written, writing
from slime.observability.logs import LineFile
from slime.observability.progress import warn
from slime.observability.verdict import Verdict, VerdictFile
from slime.utils.command_line import strike_secrets
from slime.utils.errors import BadInputError
from slime.utils.redaction import redacted

_FINISH_S = 60


class Sink(Protocol):
    """Where lines of metrics go."""

    place: tuple[str, str]
    """The flag that names where it writes, and where that is."""

    def write(self, metrics: dict[str, float], step_key: str, step: int) -> None: ...

    def close(self) -> None: ...


class MetricsLogger:
    """Gives every line of metrics to all sinks that the options ask for; owned by the driver process."""

    def __init__(self, args: argparse.Namespace) -> None:
        """BadInputError if Weights & Biases does not take the run, StorageError if a file cannot be made."""
        self._lost: Counter[tuple[str, str]] = Counter()
        """Lines that a sink could not write, by its place."""
        lines = _JsonLines(_lines(args))
        self._verdict = VerdictFile(args)  # before the lines: what it reads of them is of earlier runs
        self._sinks: list[Sink] = [self._verdict, lines]
        if args.use_tensorboard:
            self._sinks.append(_TensorBoard(args))
        if args.use_wandb:
            self._sinks.append(_Wandb(args))

    def add(self, sink: Sink) -> None:
        """Give lines to another one as well, from now on."""
        self._sinks.append(sink)

    def log(self, metrics: Mapping[str, Any], step_key: str, step: int) -> None:
        """Log one line of scalars by name (numbers, numpy scalars, tensors of one element), at ``step`` of the x axis
        ``step_key``, such as ``"rollout/step"``. TypeError names a metric that is not a scalar."""
        scalars = {name: _scalar(name, value) for name, value in metrics.items()}
        for sink in self._sinks:
            self._go_on(sink, lambda sink=sink: sink.write(scalars, step_key, step))  # type: ignore[misc]

    @property
    def verdict(self) -> Verdict:
        """Whether the run learns, after what was logged so far."""
        return self._verdict.verdict

    def close(self) -> None:
        """Flush and close every sink; calling it again does nothing."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            self._go_on(sink, sink.close)
            if lost := self._lost[sink.place]:
                warn(f"{' '.join(sink.place)}: {lost} lines of metrics are lost")

    def _go_on(self, sink: Sink, do: Callable[[], None]) -> None:
        """Let a sink do something; a run does not end of what it cannot write there, and says so once."""
        try:
            do()
        except Exception as error:  # wandb's have no type in common
            self._lost[sink.place] += 1
            if self._lost[sink.place] == 1:
                why = why_not_written(error, *sink.place) or f"{' '.join(sink.place)}: {type(error).__name__}: {error}"
                warn(f"{why}; the run goes on, and metrics are lost there until that is mended")


def evaluated_versions(args: argparse.Namespace) -> set[int]:
    """The weight versions that a run's directory has evaluations of."""
    versions = set()
    file = _lines(args)
    for line in file.read_text().splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError):  # half a line, of a host that went down
            versions.add(json.loads(line).get("eval/step"))
    return versions - {None}


def _lines(args: argparse.Namespace) -> Path:
    return Path(args.run_dir, "metrics.jsonl")


def _scalar(name: str, value: Any) -> float:
    if hasattr(value, "item"):
        try:
            value = value.item()
        except (RuntimeError, ValueError) as error:
            raise TypeError(f"metric {name!r} is a {type(value).__name__} of not exactly one element") from error
    if not isinstance(value, (bool, int, float)):
        raise TypeError(f"metric {name!r} is a {type(value).__name__}; log scalars")
    return value


class _JsonLines:
    """One JSON object a line: the metrics, the step key and ``time`` (seconds since the epoch). JSON has no NaN and no
    infinity: they are the strings "NaN", "Infinity" and "-Infinity", which ``float()`` reads."""

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path).open()
        self.place = self._file.place

    def write(self, metrics: dict[str, float], step_key: str, step: int) -> None:
        line: dict[str, Any] = {step_key: step, "time": time.time()}
        others = {name: value for name, value in metrics.items() if name not in line}
        line |= {name: value if math.isfinite(value) else json.dumps(value) for name, value in others.items()}
        self._file.append(json.dumps(line, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


class _TensorBoard:
    """Event files in ``<--tb-project-name or the run directory>/<--tb-experiment-name or "tensorboard">``."""

    def __init__(self, args: argparse.Namespace) -> None:
        from torch.utils.tensorboard import SummaryWriter

        directory = Path(args.tb_project_name or args.run_dir) / (args.tb_experiment_name or "tensorboard")
        self.place = "--tb-project-name" if args.tb_project_name else "--run-dir", str(directory)
        with writing(*self.place):
            self._writer = SummaryWriter(str(directory))

    def write(self, metrics: dict[str, float], step_key: str, step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, args: argparse.Namespace) -> None:
        import wandb

        strike_secrets()  # W&B records the command line
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
        plain = (str, int, float, bool, type(None), list, tuple, dict)
        config = {name: v if isinstance(v, plain) else str(v) for name, v in redacted(vars(args)).items()}
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
                config=config,
                settings=wandb.Settings(**settings),
            )
        except wandb.errors.Error as error:
            raise BadInputError(
                f"--use-wandb: {' '.join(str(error).split())} (see --wandb-key, --wandb-host, --wandb-mode offline)"
            ) from error
        self._axes: set[str] = set()
        self._train_steps_per_rollout = args.num_steps_per_rollout if args.wandb_always_use_train_step else 1

    def write(self, metrics: dict[str, float], step_key: str, step: int) -> None:
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
        self._run.finish()
