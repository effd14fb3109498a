"""Runs the drivers as users do, watches its whole process tree, and reads what it wrote."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.proxy import RecordingProxy
from tests.waiting import command_line
from tools.website.registry import SPANS, unregistered

ROOT = Path(__file__).resolve().parents[2]
RUN_S = 600
_PR_SET_CHILD_SUBREAPER = 36


class TrainProcess:
    """One run of a driver; every process that it starts stays findable, because this process adopts orphans."""

    def __init__(
        self, flags: Sequence[str], log: Path, env: dict[str, str] | None = None, driver: str = "train.py"
    ) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.log = log
        self._before = {p.pid for p in psutil.Process().children(recursive=True)}
        environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._proxy = RecordingProxy()
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)} | self._proxy.variables
        environment |= env or {}
        with open(log, "w") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(ROOT / driver), *flags],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                cwd=log.parent,
                start_new_session=True,
                preexec_fn=_heed_interrupts,
            )
        self.pid = self._process.pid

    def __enter__(self) -> TrainProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        """End what a failed test has left; of what a run asks nothing went through the host's proxy."""
        for process in self.descendants():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                process.kill()
        asked = self._proxy.close()
        assert exc[0] is not None or not asked, asked

    def wait(self, timeout: float) -> int:
        """The exit status; AssertionError with the log's end when it takes longer than ``timeout`` seconds."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the driver ran longer than {timeout} s:\n{self.tail()}") from None

    def kill(self, signum: int = signal.SIGKILL, to: str = "driver") -> None:
        """Send a signal to the driver alone, to its process ``group``, or to ``all`` processes of the run."""
        if to == "group":
            os.killpg(self.pid, signum)
            return
        for process in self.descendants() if to == "all" else [self._process]:
            process.send_signal(signum)

    def tail(self, characters: int = 6000) -> str:
        """The end of the driver's output."""
        return self.log.read_text(errors="replace")[-characters:]

    def descendants(self) -> list[psutil.Process]:
        """Live processes of this run, wherever they were re-parented."""
        found = []
        for process in psutil.Process().children(recursive=True):
            try:
                if process.pid in self._before:
                    continue
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
                elif process.ppid() == os.getpid() and process.pid != self.pid:
                    os.waitpid(process.pid, os.WNOHANG)
            except (psutil.NoSuchProcess, ChildProcessError):
                continue
        return found

    def find(self, *words: str, without: str = "slime.processes.supervisor") -> psutil.Process:
        """The one process of this run whose command line holds every word, and not ``without``."""

        lines = {p: command_line(p) for p in self.descendants()}
        found = [p for p, line in lines.items() if all(word in line for word in words) and without not in line]
        assert len(found) == 1, f"{words}: {[lines[p] for p in found]}"
        return found[0]

    def runs(self, word: str) -> bool:
        """Whether the command line of a live process of this run holds ``word``."""
        return any(word in command_line(process) for process in self.descendants())

    def wait_until(self, condition: Callable[[], Any], timeout: float, what: str, poll: float = 0.2) -> Any:
        """Poll every ``poll`` seconds until ``condition()`` is true while the driver lives; its value."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if value := condition():
                return value
            assert self._process.poll() is None, f"the driver ended before {what}:\n{self.tail()}"
            time.sleep(poll)
        raise AssertionError(f"{what} not seen within {timeout} s:\n{self.tail()}")

    def assert_no_process_left(self, timeout: float = 60, ignore: Sequence[str] = ()) -> None:
        """Every process of the run, but those with a word of ``ignore`` in their command, ends within ``timeout`` s."""

        def live() -> list[psutil.Process]:
            return [p for p in self.descendants() if not any(word in command_line(p) for word in ignore)]

        deadline = time.monotonic() + timeout
        while (left := live()) and time.monotonic() < deadline:
            time.sleep(0.5)
        lines = [(p.pid, command_line(p)[:150]) for p in left if p.is_running()]
        for process in left:
            process.kill()
        assert not lines, f"processes left {timeout} s after the run: {lines}"


def run_well(flags: Sequence[str], log: Path, *, driver: str = "train.py") -> None:
    """A run that comes to a good end and leaves no process."""
    with TrainProcess(flags, log, driver=driver) as process:
        assert process.wait(RUN_S) == 0, process.tail()
        process.assert_no_process_left()


def kill_after_checkpoint(process: TrainProcess, run_dir: Path, rollout_id: int) -> int:
    """Kill the driver once there is a checkpoint after that rollout or a later one; the rollout that a resume begins
    with."""
    latest = run_dir / "latest_checkpointed_iteration.txt"
    process.wait_until(lambda: latest.exists() and int(latest.read_text()) >= rollout_id, RUN_S, "a checkpoint")
    process.kill()
    process.wait(10)
    process.assert_no_process_left()
    return int(latest.read_text()) + 1


def _heed_interrupts() -> None:
    """A shell's background job ignores SIGINT, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; none when it is not there yet."""
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def series(run_dir: Path, key: str) -> list[float]:
    """The values of one metric, in order of writing."""
    return [line[key] for line in read_metrics(run_dir) if key in line]


def read_traces(run_dir: Path) -> dict[str, list[dict[str, Any]]]:
    """The spans of each process by its role; all of them stand in the registry, as those of such a process."""
    known = {(span.role, span.name) for span in SPANS}
    traces = {}
    for path in sorted((run_dir / "trace").iterdir()):
        lines = traces[path.stem] = [json.loads(line) for line in path.read_text().splitlines()]
        role = re.sub(r"^[a-z]+_engine", "engine", re.sub(r"_\d+", "_<rank>", path.stem))
        assert {(role, line["name"]) for line in lines} <= known
        assert all(line["role"] == path.stem and line["seconds"] >= 0 for line in lines)
    return traces


def assert_registered(run_dir: Path) -> None:
    """Whatever stands in a run's metrics.jsonl has a row in the registry of metrics."""
    names = {name for line in read_metrics(run_dir) for name in line}
    assert names, f"{run_dir} has no metrics"
    missing = unregistered(names)
    assert not missing, f"slime/observability/metrics.toml has no row for {', '.join(missing)}"
