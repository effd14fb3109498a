"""What a run has logged of each rollout, folded to one dict each, and the trend of a figure over them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from slime.observability.scores import Score, scores_of

ROLLOUT, TRAIN, EVAL = "rollout/step", "train/step", "eval/step"
REWARD = "rollout/raw_reward"
VARIED = "rollout/varied_groups_ratio"
TRUNCATED = "rollout/truncated_ratio"
TRAINED_TOKENS = "perf/trained_tokens"
RATE = "train/lr-pg_0"
GRAD_NORM = "train/grad_norm"
ENTROPY = "train/entropy_loss"
KL = "train/kl_loss"
STEP_KL = "train/ppo_kl"
CLIPPED = "train/pg_clipfrac"
MISMATCH = "train/train_rollout_logprob_abs_diff"
PROBE = "rollout/push_probe_abs_diff"
PUSH = "perf/update_weights_time"
ENGINES = "rollout/engines_alive"
TEACHER = "train/opd_reverse_kl"
LOSS = "train/loss"
BAD = ("train/bad_steps", "train/loss_scale_skips")
_BEGINS = "rollout/num_samples"
"""What is logged once a rollout, when the trainers take it."""
_KEPT = frozenset(
    (
        *(REWARD, VARIED, TRUNCATED, TRAINED_TOKENS, RATE, GRAD_NORM, ENTROPY, KL, STEP_KL, CLIPPED, MISMATCH),
        *(PROBE, PUSH, ENGINES, TEACHER, LOSS, *BAD),
    )
)
_FIRST, _LAST = 16, 256
"""Rollouts that are kept: enough to say how it began, and for every rule."""


@dataclass
class History:
    """The first 16 and the last 256 rollouts, and all evaluations' scores; by the number of each."""

    rollouts: dict[int, dict[str, float]] = field(default_factory=dict)
    evaluations: dict[int, dict[str, Score]] = field(default_factory=dict)
    trains: bool = False
    """Whether an optimizer step was logged."""
    _now: int | None = None
    _trends: dict[tuple[str, int, tuple[int, int] | None], Trend | None] = field(default_factory=dict)

    def add(self, metrics: Mapping[str, Any], step_key: str, step: int) -> None:
        """One line of metrics, as it is logged. A rollout that is taken anew, by trainers that have gone back, takes
        the place of what came of it and after it."""
        self._trends = {}
        if step_key == EVAL:
            self.evaluations[step] = scores_of(metrics)
            return
        if step_key == ROLLOUT and _BEGINS in metrics:
            self.rollouts = {number: row for number, row in self.rollouts.items() if number < step}
            self.rollouts[step] = {}
            self._now = step
            self._forget()
        if step_key == TRAIN:
            self.trains, step = True, -1 if self._now is None else self._now
        if step in self.rollouts:
            found = {key: float(metrics[key]) for key in metrics if key in _KEPT}
            self.rollouts[step] |= {key: value for key, value in found.items() if math.isfinite(value)}

    def add_lines(self, lines: Iterable[str]) -> History:
        """The lines of a ``metrics.jsonl``; a damaged one is left out."""
        for line in lines:
            try:
                row = json.loads(line)
                axis = next(key for key in (ROLLOUT, TRAIN, EVAL) if key in row)
                self.add(row, axis, int(row[axis]))
            except (ValueError, TypeError, StopIteration):  # half a line, of a host that went down
                continue
        return self

    def column(self, key: str, last: int | None = None) -> list[float]:
        """A figure, of those of the ``last`` rollouts (None: of all) that have it."""
        rows = list(self.rollouts.values())
        return [row[key] for row in (rows if last is None else rows[-last:]) if key in row]

    def trend(self, key: str, *, sign: int = 1, within: tuple[int, int] | None = None) -> Trend | None:
        """That of a figure over the last rollouts, of those ``within`` two numbers alone (None: of all); None of fewer
        than three. ``sign`` is -1 where less is better."""
        which = key, sign, within
        if which not in self._trends:
            rows = ((number, row) for number, row in self.rollouts.items() if key in row)
            points = [(n, row[key]) for n, row in rows if within is None or within[0] <= n <= within[1]]
            first = [value for _, value in points[:_FIRST]]
            self._trends[which] = Trend.of(points[-_LAST:], first, sign) if len(points) > 2 else None
        return self._trends[which]

    def _forget(self) -> None:
        if len(self.rollouts) > _FIRST + _LAST:
            del self.rollouts[list(self.rollouts)[_FIRST]]


def history_of(run_dir: str | Path) -> History:
    """What ``metrics.jsonl`` of a run's directory holds; nothing where there is none."""
    path = Path(run_dir, "metrics.jsonl")
    if not path.exists():
        return History()
    with path.open(errors="replace") as lines:
        return History().add_lines(lines)


@dataclass(frozen=True)
class Trend:
    """A straight line through a figure's values by rollout, fitted by least squares."""

    count: int
    slope: float
    """Change a rollout."""
    error: float
    """The slope's standard error."""
    noise: float
    """Standard deviation of single rollouts around the line."""
    first: float
    """Mean of the first rollouts: a third of them, at most 16."""
    now: float
    """Mean of as many last ones."""
    change_error: float
    """Standard error of ``now - first``."""
    sign: int

    @classmethod
    def of(cls, points: Sequence[tuple[int, float]], first: Sequence[float], sign: int) -> Trend:
        """Of three points or more (rollout, value), and of the run's ``first`` values.

        The slope's standard error is ``sqrt(sum(residual**2) / (n - 2) / sum((x - mean(x))**2))``: Draper and Smith,
        Applied Regression Analysis, 3rd edition, section 1.4. It takes residuals for independent, and a curve's bend
        for noise.
        """
        count = len(points)
        mean_x, mean_y = fmean(x for x, _ in points), fmean(y for _, y in points)
        spread = math.fsum((x - mean_x) ** 2 for x, _ in points)
        slope = math.fsum((x - mean_x) * (y - mean_y) for x, y in points) / spread
        squares = math.fsum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
        variance = squares / (count - 2)
        some = max(1, min(len(first), count // 3))
        begun, ended = fmean(first[:some]), fmean(y for _, y in points[-some:])
        error = math.sqrt(variance / spread)
        return cls(count, slope, error, math.sqrt(variance), begun, ended, math.sqrt(2 * variance / some), sign)

    def beyond_noise(self, factor: float) -> int:
        """1 where it gets better by more than ``factor`` standard errors, -1 where worse, else 0."""
        return _sign(self.slope, factor * self.error) * self.sign

    def changed(self, factor: float) -> int:
        """The same of what it is now, against what it was at first."""
        return _sign(self.now - self.first, factor * self.change_error) * self.sign


def _sign(value: float, bound: float) -> int:
    return 0 if abs(value) <= max(bound, 1e-12) else (1 if value > 0 else -1)
