"""A run's directory as a site: what its page asks for."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slime.observability.phases import STEP
from slime.observability.scores import is_eval_score
from slime.utils.errors import BadInputError
from tools.viewing.curves import Curve, Curves, about, points
from tools.viewing.dumps import Dumps, options_of, rewards
from tools.viewing.faults import Faults
from tools.viewing.steps import Steps, bound_by
from tools.viewing.tail import Tail, object_of
from tools.viewing.traces import Traces, lanes, memory

_HERE = Path(__file__).parent
_MOST_BUCKETS, _MOST_KEYS = 2000, 400
_READER = frozenset({"/api/rollouts", "/api/samples", "/api/sample"})
_SIGNS = ("config.yaml", "run.lock", "trace", "logs")
"""What a run's directory has before it has metrics."""
_HEAD = ("rollout/raw_reward", "train/loss", "perf/step_time", "rollout/weight_staleness_mean", "train/grad_norm")


class Metrics:
    """What metrics.jsonl of a run's directory has."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._tail = Tail(run_dir / "metrics.jsonl")
        self.curves, self.steps = Curves(), Steps()
        self.lines = self.broken = 0

    def refresh(self) -> None:
        """Read what is new."""
        for _, _, raw in self._tail.new():
            line = object_of(raw)
            if line is not None and self.curves.add(line):
                self.steps.add(line)
                self.lines += 1
            else:
                self.broken += 1

    def check(self, *, may_begin: bool) -> None:
        """BadInputError where there is nothing to show; ``may_begin``: of a run nothing yet is enough."""
        if not self.run_dir.is_dir():
            raise BadInputError(f"{self.run_dir}: no such directory")
        if self.lines or (may_begin and not self.broken and any((self.run_dir / sign).exists() for sign in _SIGNS)):
            return
        file = self.run_dir / "metrics.jsonl"
        if self.broken:
            raise BadInputError(f"{file}: none of its {self.broken} lines is one of a run's metrics")
        if file.exists():
            raise BadInputError(f"{file}: no line is complete yet; --follow waits for the first one")
        raise BadInputError(f"{self.run_dir}: no metrics.jsonl in it: name a run's directory, --run-dir of the run")


class RunSite:
    """One run, perhaps with another one to compare it to; with ``follow`` it is read on whenever the page asks."""

    pages: Mapping[str, Path] = MappingProxyType(
        {
            "/": _HERE / "page.html",
            "/page.js": _HERE / "page.js",
            "/charts.js": _HERE / "charts.js",
            "/rollouts": _HERE.parent / "samples" / "page.html",
        }
    )

    def __init__(
        self,
        run_dir: Path,
        *,
        other: Path | None = None,
        follow: bool = False,
        dumps: list[Path] | None = None,
        checkpoint: str | None = None,
    ) -> None:
        """BadInputError where a directory is none of a run, or has nothing to show."""
        self._metrics, self._other = Metrics(run_dir), Metrics(other) if other else None
        self._run_dir, self._follow = run_dir, follow
        for metrics in filter(None, (self._metrics, self._other)):
            metrics.refresh()
            metrics.check(may_begin=follow)
        self._given = dumps or [], checkpoint
        self._find_dumps()
        self._traces, self._faults = Traces(run_dir), Faults(run_dir)
        self._read: set[str] = set()
        # Metrics are not held up by a trace that takes seconds to read.
        self._locks = {name: threading.Lock() for name in ("metrics", "traces", "faults", "dumps")}
        self._answers: dict[str, tuple[str, Callable[[dict[str, str]], Any]]] = {
            "/api/run": ("metrics", self._run),
            "/api/curves": ("metrics", self._curves),
            "/api/phases": ("metrics", self._phases),
            "/api/step": ("metrics", self._step),
            "/api/traces": ("traces", self._trace_summary),
            "/api/lanes": ("traces", self._lanes),
            "/api/memory": ("traces", self._memory),
            "/api/faults": ("faults", self._fault_lists),
            "/api/rewards": ("dumps", self._rewards),
        }
        self.routes = frozenset(self._answers) | _READER

    def answer(self, route: str, values: dict[str, str]) -> Any:
        """What the page, or the reader of rollouts, asks for."""
        if route in _READER:
            with self._locks["dumps"]:
                library = self._dumps.library()
            return library.answer(route, values)
        part, answer = self._answers[route]
        with self._locks[part]:
            if self._follow or part not in self._read:
                self._refresh(part)
                self._read.add(part)
            return answer(values)

    def _refresh(self, part: str) -> None:
        if part == "metrics":
            for metrics in filter(None, (self._metrics, self._other)):
                metrics.refresh()
            if not self._dumps.paths:  # a run that has only begun may not have written its options
                self._find_dumps()
        elif part == "traces":
            self._traces.refresh()
        elif part == "faults":
            self._faults.refresh()

    def _find_dumps(self) -> None:
        self._options = options_of(self._run_dir)
        self._dumps = Dumps(self._run_dir, self._options, *self._given)

    # ---- metrics

    def _run(self, values: dict[str, str]) -> dict[str, Any]:
        curves, steps = self._metrics.curves, self._metrics.steps
        head = [{"key": key, "value": curves.last(key), **about(key)} for key in _heads(curves)]
        return {
            "path": str(self._run_dir.resolve()),
            **self._names(),
            "follow": self._follow,
            "lines": self._metrics.lines + (self._other.lines if self._other else 0),
            "broken": self._metrics.broken,
            "steps": [steps.x[0], steps.x[-1], len(steps.x)] if steps.x else None,
            "of": self._options.get("num_rollout"),
            "head": [each for each in head if each["value"] is not None],
            "charts": curves.charts(),
            "verdict": self._verdict(),
            "dumps": len(self._dumps.paths),
        }

    def _names(self) -> dict[str, str | None]:
        """As short as tells both runs apart."""
        own = self._run_dir.resolve()
        other = self._other.run_dir.resolve() if self._other else None
        if other is None or other.name != own.name:
            return {"name": own.name, "compare": other.name if other else None}
        return {"name": f"{own.parent.name}/{own.name}", "compare": f"{other.parent.name}/{other.name}"}

    def _verdict(self) -> dict[str, Any] | None:
        """What verdict.json says; None where there is none, or something else."""
        try:
            verdict = json.loads((self._run_dir / "verdict.json").read_text(encoding="utf-8"))
            sentences = [
                {"sentence": str(each["sentence"]), "keys": list(map(str, each["keys"]))}
                for each in verdict["sentences"]
            ]
            return {"verdict": str(verdict["verdict"]), "sentences": sentences}
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _curves(self, values: dict[str, str]) -> dict[str, Any]:
        """Points of the metrics ``keys``, separated by commas, of the run and of the other."""
        first, last, buckets = _range(values)
        smoothing = _number(values, "smoothing", 0.0, 0.0, 0.999)
        keys = values.get("keys", "").split(",")[:_MOST_KEYS]

        def of(metrics: Metrics | None) -> dict[str, Any]:
            known = metrics.curves.by_key if metrics else {}
            return {key: points(known[key], buckets, first, last, smoothing) for key in keys if key in known}

        return {"run": of(self._metrics), "other": of(self._other)}

    def _phases(self, values: dict[str, str]) -> dict[str, Any]:
        first, last, buckets = _range(values)
        return self._metrics.steps.bands(buckets, first, last, self._traces.idle)

    def _step(self, values: dict[str, str]) -> dict[str, Any]:
        step = int(_number(values, "step", 0, 0, 1e12))
        seconds = self._metrics.steps.seconds(step)
        if seconds is None:
            raise BadInputError(f"there is no step {step}, or it is not complete")
        seconds |= self._traces.idle.get(step, {})
        return {"step": step, "seconds": seconds, "whole": seconds[STEP], "sentence": bound_by(seconds)[1]}

    # ---- traces, faults, rollouts

    def _trace_summary(self, values: dict[str, str]) -> dict[str, Any]:
        rollouts = self._traces.rollouts
        return {
            "rollouts": [min(rollouts), max(rollouts)] if rollouts else None,
            "memory": len(self._traces.memory),
            "broken": self._traces.broken,
        }

    def _lanes(self, values: dict[str, str]) -> dict[str, Any]:
        first, last, _ = _range(values)
        return lanes(self._traces.recording(int(max(first, 0)), int(min(last, 1e12))))

    def _memory(self, values: dict[str, str]) -> dict[str, Any]:
        first, last, buckets = _range(values)
        curves: dict[str, Curve] = memory(self._traces)
        return {"run": {key: points(curve, buckets, first, last) for key, curve in curves.items()}}

    def _fault_lists(self, values: dict[str, str]) -> dict[str, Any]:
        return {
            "events": list(self._faults.events),
            "count": self._faults.count,
            "warnings": self._faults.warnings,
        }

    def _rewards(self, values: dict[str, str]) -> dict[str, Any]:
        """The names of saved rollouts, and the rewards of one of them, the last one unless told."""
        library = self._dumps.library()
        names = list(library.files())
        name = values.get("rollout") or next((n for n in reversed(names) if not n.startswith("eval_")), names[-1])
        return {"names": names, "name": name, **rewards(library.rollout(name), values.get("reward_key"))}


def _heads(curves: Curves) -> list[str]:
    """The metrics that are above everything else: the usual ones, and scores of evaluations."""
    scores = [key for key in sorted(curves.by_key) if is_eval_score(key)]
    return [*_HEAD, *scores[:3]]


def _range(values: dict[str, str]) -> tuple[float, float, int]:
    first = _number(values, "first", -math.inf, -math.inf, math.inf)
    last = _number(values, "last", math.inf, -math.inf, math.inf)
    return first, last, int(_number(values, "buckets", 200, 1, _MOST_BUCKETS))


def _number(values: dict[str, str], name: str, default: float, least: float, most: float) -> float:
    word = values.get(name, "")
    try:
        number = float(word) if word else default
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        raise BadInputError(f"{name}={word!r} is not a number from {least:g} to {most:g}")
    return number
