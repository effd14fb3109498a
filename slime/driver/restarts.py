"""How often parts of a run are made anew before it ends, and what each rollout of it was worth."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable

from slime.options.flags.schema import flag_named
from slime.ray.budget import Budget
from slime.ray.supervision import RunError


class Restarts:
    """Those of the trainers, and of the rollout manager: a budget an hour for each, and no third try at what fails
    twice in a row in the same way, which another restart would not mend either."""

    def __init__(self, args: argparse.Namespace, clock: Callable[[], float] = time.monotonic) -> None:
        self._args, self._clock = args, clock
        self._last: dict[str, str] = {}
        """In which phase each failed last, and of which rollout."""
        self._rollout = 0
        """The one after the last whose step was complete."""
        self.seconds = 0.0
        """What they took, and engines that were away, since somebody last made this 0."""

    def allow(self, name: str, phase: str, cause: str) -> None:
        """Count one more restart of ``name``, after a failure in ``phase``; RunError with the cause if it is one too
        many."""
        # Most phases name their rollout, or its version; of the others, those of another rollout are another failure.
        way = phase if any(map(str.isdigit, phase)) else f"{phase}, rollout {self._rollout}"
        if self._last.get(name) == way:
            raise RunError(f"{cause}\n{name}: failed in the same way when made anew, so that it is not tried again")
        if not self._budget.take(name):
            flag = flag_named("trainer_restart_limit")
            raise RunError(f"{cause}\n{name}: made anew {self._budget.limit} times within an hour already ({flag})")
        self._last[name] = way

    @functools.cached_property
    def _budget(self) -> Budget:
        return Budget(self._args.trainer_restart_limit, self._clock)

    def step_is_complete(self, rollout_id: int) -> None:
        """Which one: it may have been made again, behind which a run has gone back."""
        self._rollout = rollout_id + 1


class Goodput:
    """Tokens that were trained and not gone back behind, a second of the driver's life since it began to start."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began = clock, clock()
        self._tokens: dict[int, float] = {}
        """By rollout."""

    def add(self, rollout_id: int, tokens: float) -> None:
        """Note the response tokens in the loss of a rollout's optimizer steps that were taken."""
        self._tokens[rollout_id] = tokens

    def go_back(self, rollout_id: int) -> None:
        """Forget this rollout and those after it, which are trained again."""
        self._tokens = {other: tokens for other, tokens in self._tokens.items() if other < rollout_id}

    def rate(self) -> float:
        """Tokens a second."""
        return sum(self._tokens.values()) / max(self._clock() - self._began, 1e-9)
