"""What a run has of its host from its first line to its last: its directories, logs, metrics, Ray, and a janitor."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import ray

from slime.driver.process import acquire_run_lock, interrupt_on_sigterm
from slime.files.storage import writing
from slime.observability import events, logs, trace
from slime.observability.metrics import MetricsLogger
from slime.observability.prometheus.exposition import State
from slime.observability.prometheus.server import Prometheus
from slime.observability.verdict import NO_VERDICT, Verdict
from slime.ray import janitor
from slime.ray.cluster import connect


class Session:
    """Opened once; what was opened of it is closed, however far it came."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._metrics: MetricsLogger | None = None
        self._run_locks: list[int] = []
        self._janitor: int | None = None

    def open(self, num_slots: int, state: Callable[[], State]) -> None:
        """Take the directories, which no other run then has, begin to log and to tell of the run's ``state``, and
        connect to a Ray of ``num_slots``."""
        args = self._args
        interrupt_on_sigterm()
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
        self._metrics.add(Prometheus(args, state))
        self._janitor = connect(num_slots)
        # Again: Ray has put its own in the place of ours.
        interrupt_on_sigterm()

    @property
    def metrics(self) -> MetricsLogger:
        """Where the run logs figures, while it is open."""
        assert self._metrics is not None
        return self._metrics

    @property
    def verdict(self) -> Verdict:
        """Whether the run learns, so far; empty before it is opened."""
        return NO_VERDICT if self._metrics is None else self._metrics.verdict

    @contextlib.contextmanager
    def closing(self, *, ended_well: bool) -> Iterator[None]:
        """Within, the actors are ended; then the janitor sees to those that did not, and the directories are free."""
        try:
            yield
        finally:
            if self._janitor is not None:
                janitor.dismiss(self._janitor, ended_well=ended_well)
            for held in self._run_locks:
                os.close(held)

    def disconnect(self, *, ray_is_down: bool) -> None:
        """End the metrics' log, and this process's part in Ray."""
        if self._metrics is not None:
            self._metrics.close()
        if not ray_is_down:
            ray.shutdown()
