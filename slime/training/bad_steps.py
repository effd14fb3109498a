"""Optimizer steps that are better not taken: of a loss or gradients that are not finite, or far larger than before.

Every rank has the same reduced losses and gradient norms, so that all decide alike.
"""

from __future__ import annotations

import logging
import math
from argparse import Namespace
from collections import deque
from collections.abc import Mapping
from statistics import median

from slime.training.checks import TrainingError

logger = logging.getLogger(__name__)

BAD_STEPS = "bad_steps"
"""Of the actor ``train/bad_steps``; of the critic with its prefix."""
_RECENT, _FEWEST = 32, 8
"""Steps whose norms are compared with, and how many there must be."""


class NormGuard:
    """Whether a gradient norm is bad: not finite, or above ``--bad-step-factor`` times the median of recent ones."""

    def __init__(self, args: Namespace) -> None:
        self._factor: float | None = args.bad_step_factor
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def why_bad(self, norm: float) -> str | None:
        """What is wrong with this one, in words; one that is good counts among the recent ones."""
        if not math.isfinite(norm):
            return f"the gradient norm is {norm}"
        if self._factor is not None and len(self._recent) >= _FEWEST:
            usual = median(self._recent)
            if norm > self._factor * usual:
                return (
                    f"the gradient norm is {norm:.4g}, of recent steps {usual:.4g} (--bad-step-factor {self._factor:g})"
                )
        self._recent.append(norm)
        return None


def guards_steps(args: Namespace) -> bool:
    """Whether norms are to be judged before a step is taken; otherwise only finite ones go on, after it."""
    return bool(args.on_bad_step != "stop" or args.bad_step_factor is not None)


def leave_out(args: Namespace, where: str, why: str) -> None:
    """Log that a step is not taken, ``where`` and ``why``; TrainingError under ``--on-bad-step stop``."""
    if args.on_bad_step == "stop":
        raise TrainingError(f"{where}: {why}. The step was not taken (--on-bad-step skip goes on without such steps)")
    logger.info("%s: %s: the step is not taken (--on-bad-step %s)", where, why, args.on_bad_step)


def bad_loss(args: Namespace, metrics: Mapping[str, float]) -> str | None:
    """What is wrong with a step's losses, in words; None under ``--on-bad-step stop``, whose check raises by itself."""
    if args.on_bad_step == "stop":
        return None
    wrong = [name for name, value in metrics.items() if name.endswith("loss") and not math.isfinite(value)]
    return f"{wrong[0]} is {metrics[wrong[0]]}" if wrong else None
