"""One fixed prompt, scored by trainers and engines after each push: the whole way of the weights, in one number.

Both make its log-probs while the run goes on, trainers before they sleep; whoever needs the number waits for it later.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from slime.fleet.membership import Member
from slime.fleet.train_group import TrainGroup
from slime.observability.progress import warn
from slime.observability.trace import span
from slime.options.serving.sglang_config import REGULAR
from slime.ray.supervision import MARGIN_S, RunError, Supervisor, limit_of


@dataclass
class _Asked:
    version: int
    ours: dict[str, ray.ObjectRef]
    theirs: dict[str, ray.ObjectRef] = field(default_factory=dict)


class Probe:
    """The prompt of a run, who was asked for its log-probs, and what became of that."""

    def __init__(
        self,
        args: argparse.Namespace,
        supervisor: Supervisor,
        trainers: TrainGroup,
        make: Callable[[], list[int]],
    ) -> None:
        """``make`` gives the prompt, as the model has it; it is called once."""
        self._args, self._supervisor, self._trainers, self._make = args, supervisor, trainers, make
        self._tokens: list[int] | None = None
        self._asked: list[_Asked] = []

    def ask_trainers(self, version: int) -> None:
        """Have trainers, whose weights are awake, score the weights that they have just pushed, before whatever they
        are asked next."""
        if self._tokens is None:
            self._tokens = self._make()
        self._asked.append(_Asked(version, self._trainers.begin("score", self._tokens)))

    def ask_engines(self, members: Sequence[Member]) -> None:
        """Have engines do so that were given these weights, and are ready for requests. Of prefill and decode, neither
        answers alone."""
        asked = [member for member in members if member.spec.worker_type == REGULAR]
        self._asked[-1].theirs |= {member.called: member.actor.score.remote(self._tokens) for member in asked}

    def forget(self) -> None:
        """Trainers are made anew: those that were asked are no more."""
        self._asked = []

    def finish(self) -> float | None:
        """The mean difference of the log-probs of all that was asked for, of the push and engine of which it is the
        largest; None where nobody has told any.

        One above ``--mismatch-threshold`` is warned of, or ends the run by a RunError (``--stop-on-mismatch``).
        """
        asked, self._asked = self._asked, []
        found: list[float] = []
        for each in asked:
            with span("driver/probe", version=each.version):
                differences = self._differences(each)
            if differences:
                worst = max(differences, key=lambda name: _order(differences[name]))
                self._judge(each.version, worst, differences[worst])
                found.append(differences[worst])
        return max(found, key=_order, default=None)

    def _differences(self, asked: _Asked) -> dict[str, float]:
        phase = f"probe weights of version {asked.version}"
        limit = limit_of(self._args, "weight_update_timeout", MARGIN_S)
        ranks: list[Any] = self._supervisor.wait(asked.ours, phase, limit)
        scores = next((scores for scores in ranks if scores is not None), None)
        if scores is None:  # the model takes more than text
            return {}
        answers = self._supervisor.answers(asked.theirs, phase, limit)  # of those that have not died
        return {name: mean_difference(scores, theirs) for name, theirs in answers.items()}

    def _judge(self, version: int, name: str, difference: float) -> None:
        if difference <= self._args.mismatch_threshold:
            return
        message = (
            f"push of version {version}: the trainer's and {name}'s log-probs of the probe prompt differ by "
            f"{difference:.4g} in the mean (--mismatch-threshold {self._args.mismatch_threshold}): look at their "
            f"precision and kernels, and with --check-weight-update-equal at the weights"
        )
        if self._args.stop_on_mismatch:
            raise RunError(message)
        warn(message)


def _order(difference: float) -> float:
    return math.inf if math.isnan(difference) else difference


def mean_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The mean of the absolute differences; NaN where one side has none, or another number of them."""
    if len(ours) != len(theirs) or not ours:
        return math.nan
    return sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(ours)
