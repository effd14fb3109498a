"""Starts programs as users start them, each under a deadline, and reads what they wrote."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.quickstart import ROOT, end

_SHOWN = 300
"""Characters of an error in the report; the log has the rest."""
_NO_JSON_NUMBERS = ("NaN", "Infinity", "-Infinity")
"""How metrics.jsonl writes them."""
_KEY_METRICS = ("train/step", "train/loss", "train/grad_norm", "train/train_rollout_logprob_abs_diff")


@dataclass(frozen=True)
class Run:
    """A program that has ended.

    Attributes:
        directory: where it wrote.
        log: its command and what it printed.
        status: None if it was ended at its deadline.
    """

    name: str
    directory: Path
    log: Path
    status: int | None
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether it came to a good end."""
        return self.status == 0

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, with the numbers that JSON does not have."""
        path = self.directory / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        return [{k: float(v) if v in _NO_JSON_NUMBERS else v for k, v in json.loads(line).items()} for line in lines]

    def series(self, key: str) -> list[float]:
        """A metric's values in the order of writing."""
        return [line[key] for line in self.metrics() if key in line]

    def steps(self) -> list[dict[str, float]]:
        """What was logged of every optimizer step, but for times."""
        lines = [line for line in self.metrics() if "train/step" in line]
        return [{k: v for k, v in line.items() if k.startswith("train/")} for line in lines]

    def not_finite(self) -> list[str]:
        """The names of metrics that once were no number or infinite."""
        found = {k for line in self.metrics() for k, v in line.items() if isinstance(v, float) and not math.isfinite(v)}
        return sorted(found)

    def captured(self) -> bool:
        """Whether its log is there and has more than the command."""
        return self.log.is_file() and len(self.log.read_bytes().splitlines()) > 1

    def key_line(self) -> str:
        """How it ended; of a good end what metrics.jsonl has of the last optimizer step, if there was any."""
        if not self.ok:
            return f"{self.why()}, {self.seconds:.0f} s"
        last = (self.steps() or [{}])[-1]
        figures = [f"{key} {last[key]:.6g}" for key in _KEY_METRICS if key in last]
        ok = f"ok, {self.seconds:.0f} s"
        return f"{ok}; {', '.join(figures)}" if figures else ok

    def error(self) -> str:
        """The program's own error line; empty if it has none."""
        lines = map(str.strip, self.log.read_text(errors="replace").splitlines())
        return next((line for line in lines if re.match(r"[\w.]+\.py: error:", line)), "")

    def why(self) -> str:
        """The cause of a bad end: the program's own error line, and the last exception in the log."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        if self.status is None:
            how = f"ended after {self.seconds:.0f} s, the deadline of a launch (--launch-timeout)"
        else:
            how = f"status {self.status}"
        causes = [line for line in [self.error()] if line] + _last_exception(lines)
        return ": ".join([how, *(cause[:_SHOWN] for cause in causes or lines[-1:])])


def _last_exception(lines: list[str]) -> list[str]:
    """None or one, in a line; of one that says nothing the statement that raised it."""
    for number in reversed(range(len(lines))):
        if re.match(r"([A-Za-z_]\w*\.)*[A-Z]\w*(Error|Exception)(:|$)", lines[number]):
            says_nothing = ":" not in lines[number] and number > 0
            statement = next((line for line in reversed(lines[:number]) if set(line) - set("^~ ")), "")
            return [f"{lines[number]} of `{statement}`" if says_nothing else lines[number]]
    return []


class Launcher:
    """Starts programs one after the other; each gets a directory of its own."""

    def __init__(
        self, output: Path, limit_s: float, tree: Path = ROOT, environment: Mapping[str, str] | None = None
    ) -> None:
        """
        Args:
            output: each program's directory is in it.
            limit_s: seconds for one program.
            tree: where programs are, and run.
            environment: of programs, by default this process's.
        """
        self.output, self._limit_s, self._tree, self._environment = output, limit_s, tree, environment
        self.runs: list[Run] = []

    def directory(self, name: str) -> Path:
        """Where the run of this name writes."""
        return self.output / name

    def train(self, name: str, words: Sequence[str]) -> Run:
        """A run of train.py."""
        return self.run(name, "train.py", [*words, "--run-dir", str(self.directory(name))])

    def run(self, name: str, script: str, words: Sequence[str]) -> Run:
        """A Python program of the repository, to its end or to the deadline."""
        directory = self.directory(name)
        directory.mkdir(parents=True, exist_ok=True)
        log, command = directory / "log", [sys.executable, script, *words]
        began = time.monotonic()
        print(f"== {name} ...", file=sys.stderr, flush=True)
        with log.open("w") as output:
            output.write(f"$ {shlex.join(command)}\n")
            output.flush()
            process = subprocess.Popen(
                command,
                cwd=self._tree,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )
            try:
                status: int | None = process.wait(self._limit_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                end(process)
        run = Run(name, directory, log, status, time.monotonic() - began)
        print(f"== {name}: {'ok' if run.ok else run.why()} ({run.seconds:.0f} s)", file=sys.stderr, flush=True)
        self.runs.append(run)
        return run
