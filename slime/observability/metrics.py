"""Where metrics go: metrics.jsonl and the verdict always, trackers when asked."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slime.files.storage import why_not_written
from slime.observability.logs import LineFile
from slime.observability.progress import warn
from slime.observability.trackers import Sink, trackers
from slime.observability.verdict import Verdict, VerdictFile


class MetricsLogger:
    """Gives every line of metrics to all sinks that the options ask for; owned by the driver process."""

    def __init__(self, args: argparse.Namespace) -> None:
        """BadInputError if Weights & Biases does not take the run, StorageError if a file cannot be made."""
        self._lost: Counter[tuple[str, str]] = Counter()
        """Lines that a sink could not write, by its place."""
        lines = _JsonLines(_lines(args))
        self._verdict = VerdictFile(args)  # before the lines: what it reads of them is of earlier runs
        self._sinks: list[Sink] = [self._verdict, lines]
        self._sinks += trackers(args)

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
