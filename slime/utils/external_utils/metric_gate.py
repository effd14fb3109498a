"""Corridors for the metrics of a run: a test states them, a small committed file has the baselines they are around.

A test file says what its run must show, and checks it at its end::

    CORRIDORS = (
        Corridor("train/ppo_kl", steps=(0,), at_least=0.0, at_most=0.0),
        Corridor("rollout/raw_reward", steps=(-1,), below=0.1),
        Corridor("perf/step_time", steps=(-1,), above_ratio=0.2, timed=True),
    )
    check_metrics(__file__, run_dir, CORRIDORS)

What was seen is kept as ``gate.json`` in the run's directory, from which ``tools/update_baselines.py`` makes baselines.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slime.files import atomic_io
from slime.files.json_file import read_object
from slime.utils.errors import BadInputError

SEEN = "gate.json"
_AXES = ("train/step", "rollout/step", "eval/step")
_CARD_QUERY_S = 30


class MetricGateError(AssertionError):
    """Metrics of a run are missing, not finite or out of their corridor; one line for each."""


@dataclass(frozen=True)
class Corridor:
    """What a metric may be, bounds included; without any bound it must be there and finite.

    ``at_least`` and ``at_most`` are values of the metric. The others are distances from the baseline of the same test,
    scale and step: ``below`` and ``above`` in the metric's unit, ``below_ratio`` and ``above_ratio`` as shares of the
    baseline's magnitude (0.2 is a fifth). Of a side that has several bounds the narrowest holds.
    """

    metric: str
    steps: tuple[int, ...] = (-1,)
    """Positions on the metric's own axis (optimizer steps, rollouts, versions); -1 is the last, -2 the one before."""
    at_least: float | None = None
    at_most: float | None = None
    below: float | None = None
    above: float | None = None
    below_ratio: float | None = None
    above_ratio: float | None = None
    timed: bool = False
    """Seconds, or made of them: always recorded, held against its bounds only with ``SLIME_CI_GATE_TIMES=1`` and on the
    card that the baseline was made on."""

    def needs_baseline(self) -> bool:
        """Whether it is around a baseline."""
        return any(value is not None for value in (self.below, self.above, self.below_ratio, self.above_ratio))

    def bounds(self, baseline: float | None) -> tuple[float, float]:
        """The least and the largest value that it allows."""
        low, high = [self.at_least], [self.at_most]
        if baseline is not None:
            own = (1.0, self.below, self.above), (abs(baseline), self.below_ratio, self.above_ratio)
            for unit, below, above in own:
                low.append(None if below is None else baseline - unit * below)
                high.append(None if above is None else baseline + unit * above)
        return (
            max((value for value in low if value is not None), default=-math.inf),
            min((value for value in high if value is not None), default=math.inf),
        )


@dataclass
class Seen:
    """What a run showed of the metrics that its test has corridors for; also the form of a baseline."""

    card: str
    """The GPU's name, or ``cpu``."""
    values: dict[str, dict[str, float]] = field(default_factory=dict)
    """By metric and step, as the corridor names the step."""


def check_metrics(test_file: str | Path, run_dir: str | Path, corridors: Sequence[Corridor]) -> Seen:
    """Hold the metrics of a run against the corridors of its test, print a line each, and keep what was seen, which it
    returns, as ``gate.json`` in ``run_dir``, where ``metrics.jsonl`` is. Baselines are in ``ci/baselines.json`` beside
    ``test_file``, the test's ``__file__``. BadInputError where a file is missing or damaged; MetricGateError where a
    metric is missing, not finite or out of its corridor, or has no baseline."""
    test, run_dir = baseline_key(test_file), Path(run_dir)
    baseline = read_baselines(baselines_file(test_file)).get(test)
    by_step, card = _by_step(run_dir / "metrics.jsonl"), _card()
    seen, faults = Seen(card), []
    for corridor in corridors:
        for step in corridor.steps:
            value = _value(by_step.get(corridor.metric, {}), step)
            if value is not None and math.isfinite(value):
                seen.values.setdefault(corridor.metric, {})[str(step)] = value
            line, good = _judge(corridor, step, value, baseline, card)
            print(f"[metrics] {'ok' if good else 'FAILED':<6} {line}", flush=True)
            if not good:
                faults.append(line)
    (run_dir / SEEN).write_text(json.dumps({"test": test, **asdict(seen)}, indent=1) + "\n")
    if faults:
        said = [f"{test}: {len(faults)} metrics of {run_dir} are not as they should be:", *faults]
        if any(corridor.needs_baseline() for corridor in corridors):
            said.append(f"(if they are right now: python3 tools/update_baselines.py {run_dir})")
        raise MetricGateError("\n".join(said))
    return seen


def _judge(corridor: Corridor, step: int, value: float | None, baseline: Seen | None, card: str) -> tuple[str, bool]:
    what = f"{corridor.metric} at {'the last step' if step == -1 else f'step {step}'}"
    if value is None:
        return f"{what}: missing", False
    if not math.isfinite(value):
        return f"{what}: {value}", False
    known = None if baseline is None else baseline.values.get(corridor.metric, {}).get(str(step))
    if corridor.timed:
        if os.environ.get("SLIME_CI_GATE_TIMES") != "1":
            return f"{what}: {value:.6g} (recorded; SLIME_CI_GATE_TIMES=1 gates it)", True
        if baseline is None or baseline.card != card:
            there = "there is no baseline" if baseline is None else f"the baseline is of {baseline.card}"
            return f"{what}: {value:.6g} (recorded; this is {card}, {there})", True
    if corridor.needs_baseline() and known is None:
        return f"{what}: {value:.6g}, and there is no baseline to hold it against", False
    low, high = corridor.bounds(known)
    return f"{what}: {value:.6g}, allowed {low:.6g} to {high:.6g}", low <= value <= high


def baseline_key(test_file: str | Path) -> str:
    """Under what a test's baselines are kept: its file's name, and scale and variant as the environment has them."""
    scale = os.environ.get("SLIME_TEST_SCALE") or "full"
    switches = {"SLIME_TEST_USE_DEEPEP": "deepep", "SLIME_TEST_USE_FP8_ROLLOUT": "fp8-rollout"}
    variant = [word for name, word in switches.items() if os.environ.get(name, "0") not in ("", "0")]
    return " ".join([Path(test_file).name, scale, *variant])


def baselines_file(test_file: str | Path) -> Path:
    """Where the baselines of a test are."""
    return Path(test_file).resolve().parent / "ci" / "baselines.json"


def read_baselines(file: Path) -> dict[str, Seen]:
    """Baselines by `baseline_key`, none where there is no file yet; BadInputError if it is damaged."""
    if not file.exists():
        return {}
    try:
        return {key: Seen(**value) for key, value in read_object(file).items()}
    except TypeError as error:
        raise BadInputError(f"{file} is damaged: {error}") from error


def read_seen(run_dir: Path) -> tuple[str, Seen]:
    """What `check_metrics` kept of a run, and the baseline's key; BadInputError if that is missing or damaged."""
    file = run_dir / SEEN
    if not file.exists():
        raise BadInputError(f"{file} is missing: a test's check_metrics writes it at the end of its run")
    found = read_object(file)
    try:
        return found.pop("test"), Seen(**found)
    except (KeyError, TypeError) as error:
        raise BadInputError(f"{file} is damaged: {error}") from error


def write_baselines(file: Path, baselines: Mapping[str, Seen]) -> None:
    """Write baselines, sorted, so that a change of one is a change of its lines."""
    text = json.dumps({key: asdict(baselines[key]) for key in baselines}, indent=1, sort_keys=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_io.write_file(file, lambda unfinished: unfinished.write_text(text + "\n"))


def _by_step(file: Path) -> dict[str, dict[int, float]]:
    """Values by metric and step of ``metrics.jsonl``; what a resumed run writes again wins."""
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise BadInputError(f"{file} cannot be read: {error.strerror}; did the run train?") from error
    found: dict[str, dict[int, float]] = {}
    for number, line in enumerate(lines, 1):
        try:
            entry: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise BadInputError(f"{file}, line {number} is damaged: {error}") from error
        axis = next((name for name in _AXES if name in entry), None)
        if axis is None:
            continue
        for metric, value in entry.items():
            found.setdefault(metric, {})[entry[axis]] = float(value)  # strings too, of what is not finite
    return found


def _value(by_step: Mapping[int, float], step: int) -> float | None:
    if step >= 0:
        return by_step.get(step)
    steps = sorted(by_step)
    return by_step[steps[step]] if len(steps) >= -step else None


def _card() -> str:
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=_CARD_QUERY_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "cpu"
    return " + ".join(sorted({line.strip() for line in told.splitlines() if line.strip()})) or "cpu"
