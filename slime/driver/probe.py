"""One fixed prompt, scored by trainers and engines after each push: the whole way of the weights, in one number."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence

import ray

from slime.fleet.membership import Member
from slime.observability.progress import warn
from slime.options.serving.sglang_config import REGULAR
from slime.ray.supervision import MARGIN_S, RunError, Supervisor, limit_of

DIFFERENCE = "rollout/push_probe_abs_diff"


class Probe:
    """The prompt of a run, and what engines make of it."""

    def __init__(self, args: argparse.Namespace, supervisor: Supervisor, make: Callable[[], list[int]]) -> None:
        """``make`` gives the prompt, as the model has it; it is called once."""
        self._args, self._supervisor, self._make = args, supervisor, make
        self._tokens: list[int] | None = None

    @property
    def tokens(self) -> list[int]:
        """The prompt's."""
        if self._tokens is None:
            self._tokens = self._make()
        return self._tokens

    def compare(self, version: int, scores: Sequence[float], members: Sequence[Member]) -> dict[str, float]:
        """Ask engines, which have gone on after a push, for the prompt's log-probs, of which trainers have made
        ``scores``: the mean difference, of the engine of which it is the largest. Nothing where none can be asked: of
        prefill and decode, neither answers alone.

        One above ``--mismatch-threshold`` is warned of, or ends the run by a RunError (``--stop-on-mismatch``).
        """
        asked = {member.called: member for member in members if member.spec.worker_type == REGULAR}
        answers: dict[str, ray.ObjectRef] = {
            name: member.actor.score.remote(self.tokens) for name, member in asked.items()
        }
        if not answers:
            return {}
        phase = f"probe weights of version {version}"
        limit = limit_of(self._args, "weight_update_timeout", MARGIN_S)
        scored = {}
        for name, answer in answers.items():
            if theirs := self._supervisor.wait({name: answer}, phase, limit):  # else it has died
                scored[name] = mean_difference(scores, theirs[0])
        if not scored:
            return {}
        worst = max(scored, key=lambda name: math.inf if math.isnan(scored[name]) else scored[name])
        self._judge(phase, worst, scored[worst])
        return {DIFFERENCE: scored[worst]}

    def _judge(self, phase: str, name: str, difference: float) -> None:
        if difference <= self._args.mismatch_threshold:
            return
        message = (
            f"{phase}: the trainer's and {name}'s log-probs of the probe prompt differ by {difference:.4g} in the mean "
            f"(--mismatch-threshold {self._args.mismatch_threshold}): look at their precision and kernels, and with "
            f"--check-weight-update-equal at the weights"
        )
        if self._args.stop_on_mismatch:
            raise RunError(message)
        warn(message)


def mean_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The mean of the absolute differences; NaN where one side has none, or another number of them."""
    if len(ours) != len(theirs) or not ours:
        return math.nan
    return sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(ours)
