"""Scores of evaluations: which metrics they are, and how far two may be apart by chance."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SCORE = re.compile(r"eval/(?!step$)[^/]+$")
_DETAIL = re.compile(r"-(truncated_ratio|no_reward|avg@\d+|pass@\d+)$")
_SPREAD = ("prompts", "standard_error", "max_reward")


def is_eval_score(key: str) -> bool:
    """Whether a metric is the score of an evaluation's dataset, and no detail of it."""
    return _SCORE.match(key) is not None and not _DETAIL.search(key)


@dataclass(frozen=True)
class Score:
    """Of one evaluation on one dataset."""

    value: float
    prompts: float = 0.0
    """Prompts with a reward; 0 where that is not known, of fewer than two, or of a run of an earlier release."""
    error: float = 0.0
    """Standard error of ``value``, over prompts."""
    highest: float = math.inf
    """The highest reward of a response."""

    def noise(self, other: Score) -> float:
        """Standard error of the difference of two scores of equally good weights; infinite where it is not known.

        Both have the variance between prompts of all of them together, so that ten right answers of ten are not free
        of noise: the score test of two proportions, where rewards are 0 and 1 (Agresti, Categorical Data Analysis, 3rd
        edition, section 3.5). Prompts count as drawn anew, which is more noise than there is on the same ones.
        """
        mine, others = self.prompts, other.prompts
        if min(mine, others) < 1:
            return math.inf
        both = mine + others
        within = ((mine * self.error) ** 2 + (others * other.error) ** 2) / both
        between = mine * others / both**2 * (self.value - other.value) ** 2
        return math.sqrt((within + between) * (1 / mine + 1 / others))

    def is_above(self, other: Score, sigmas: float) -> bool:
        """By more than ``sigmas`` standard errors."""
        return self.value - other.value > max(sigmas * self.noise(other), 1e-12)


def scores_of(metrics: Mapping[str, Any]) -> dict[str, Score]:
    """Of a line of metrics, by key."""
    found = {}
    for key in filter(is_eval_score, metrics):
        spread = [float(metrics[f"{key}/{name}"]) for name in _SPREAD if f"{key}/{name}" in metrics]
        found[key] = Score(float(metrics[key]), *(spread if len(spread) == len(_SPREAD) else ()))
    return found
