"""A step: its phases, one after another or beside each other, and what comes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from slime.batching.flops import forward_flops
from slime.driver.pipeline import first_to_wait
from tools.simulating import generation, handing, training
from tools.simulating.memory import Memory, memory
from tools.simulating.plan import Phase, Plan, summary

_WARM_UP, _COUNTED = 2, 5
"""Steps of an asynchronous run."""
_BUFFER = 1
"""Complete rollouts that may wait for the trainer: `--async-buffer-size`, by default."""


@dataclass(frozen=True)
class Step:
    """What is predicted."""

    plan: Plan
    phases: tuple[Phase, ...]
    seconds: float
    """Of the whole; with phases that overlap it is less than their sum."""
    memory: Memory

    @property
    def tokens_per_s(self) -> float:
        """Trained, over all GPUs."""
        return float(self.plan.lengths.sum()) / self.seconds

    def mfu(self, seconds: float, gpus: int) -> float:
        """Model FLOPs utilisation of the training passes in so many seconds of so many GPUs."""
        flops = 3 * float(forward_flops(self.plan.lengths, self.plan.model.shape).sum())
        return flops / seconds / gpus / self.plan.gpu.flops

    def report(self) -> dict[str, Any]:
        """All of it, for a file."""
        train = next(phase for phase in self.phases if phase.name.startswith("forward"))
        return {
            **summary(self.plan),
            "step_s": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_gpu": self.tokens_per_s / self.plan.gpus,
            "mfu_of_training": self.mfu(train.seconds, self.plan.trainers),
            "mfu_of_step": self.mfu(self.seconds, self.plan.gpus),
            "phases": [asdict(phase) | {"bound": phase.bound} for phase in self.phases],
            "memory_gib": asdict(self.memory) | {"trains": self.memory.trains, "fits": self.memory.fits},
        }


def simulate(plan: Plan, rollouts: Sequence[np.ndarray] = ()) -> Step:
    """A step of a run; ``rollouts`` are the response lengths of several, which an asynchronous one takes in turn."""
    passes = [training.score(plan, "reference log-probs")] if plan.reference else []
    if plan.steps > 1:  # the first one is on-policy by itself
        passes.append(training.score(plan, "log-probs"))
    passes += [training.train(plan), handing.control(plan)]
    push, generated = handing.push(plan), generation.generate(plan)
    if plan.colocate:
        handed = [handing.engines_memory(), handing.wake(plan), handing.sleep(plan)]
        phases = (generated, *passes, *handed, push)
        return Step(plan, phases, sum(phase.seconds for phase in phases), memory(plan))
    phases = (generated, *passes, push)
    if not plan.asynchronous:
        return Step(plan, phases, sum(phase.seconds for phase in phases), memory(plan))
    busy = sum(phase.seconds for phase in passes)
    return Step(plan, phases, _overlapping(plan, rollouts, busy, push.seconds), memory(plan))


def _overlapping(plan: Plan, rollouts: Sequence[np.ndarray], busy: float, push: float) -> float:
    """Seconds between two steps of train_async.py, in the mean: as `slime.driver.pipeline` begins rollouts."""
    costs = generation.TokenCosts(plan)
    engines = [generation.Engine(costs) for _ in range(plan.engines)]
    rng = np.random.default_rng(0)
    now, begun, ends = 0.0, 0, []

    def begin(front: int, version: int) -> None:
        nonlocal begun
        limit = first_to_wait(front, version, buffer_size=_BUFFER, max_staleness=plan.staleness)
        for rollout in range(begun, min(limit, _WARM_UP + _COUNTED + 1)):
            own = rollouts[rollout % len(rollouts)] if rollouts else _shuffled(plan, rng)
            each = replace(plan, responses=own)
            for engine, responses in zip(engines, generation.deal(own, plan.group, plan.engines), strict=True):
                engine.begin(rollout, responses, now + generation.ramp(each))
            begun = rollout + 1

    for step in range(_WARM_UP + _COUNTED):
        begin(step, step)
        now = max(now, *(engine.finish(step) for engine in engines)) + busy
        for engine in engines:
            engine.go_until(now)
            engine.interrupt(push)
        now += push
        begin(step, step + 1)
        ends.append(now)
    return max((ends[-1] - ends[_WARM_UP - 1]) / _COUNTED, generation.manager_seconds(plan))


def _shuffled(plan: Plan, rng: np.random.Generator) -> np.ndarray:
    """The rollout's lengths, in other groups."""
    groups = np.asarray(plan.responses).reshape(-1, plan.group)
    return groups[rng.permutation(len(groups))].ravel()
