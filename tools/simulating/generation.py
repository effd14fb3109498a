"""An engine's batch, which shrinks as responses end: each token's time, step for step, without making the steps."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tools.simulating.constants import cost
from tools.simulating.model import BF16, Model
from tools.simulating.plan import Phase, Plan
from tools.simulating.training import layer_flops


def weights_read(model: Model, batch: int) -> float:
    """Bytes of the model that a step reads: of experts those that one of ``batch`` tokens takes, chosen evenly."""
    dense = model.dense_parameters - (0 if model.tied else model.head_parameters)  # a row of the embedding each
    shape = model.shape
    taken = 1 - (1 - shape.moe_router_topk / shape.num_experts) ** batch if shape.num_experts else 0.0
    return BF16 * (dense + taken * model.expert_parameters)


@dataclass(frozen=True)
class TokenCosts:
    """Of one engine: seconds that a step takes, in which every running request gets a token."""

    plan: Plan

    def parts(self, batch: int, live: float) -> dict[str, float]:
        """By what they are spent on, of ``batch`` requests with ``live`` tokens in the cache."""
        plan, gpu, shape = self.plan, self.plan.gpu, self.plan.model.shape
        width = plan.engine_gpus
        weights = weights_read(plan.model, batch) / width / (gpu.bandwidth * cost("weights read"))
        flops = batch * self._flops / width / (gpu.flops * cost("products"))
        cached = live * plan.model.cached_bytes / self._cut / (gpu.bandwidth * cost("cache read"))
        found = {"weights or products": max(weights, flops), "cache": cached}
        found["launches"] = cost("decode step") + shape.num_layers * cost("decode layer")
        if width > 1:
            found["reductions"] = 2 * shape.num_layers * cost("reduction")
        return found

    @property
    def _flops(self) -> float:
        return layer_flops(self.plan) + 2 * self.plan.model.head_parameters

    @property
    def _cut(self) -> int:
        """GPUs that a token's cache is divided over; latents are whole on each."""
        shape = self.plan.model.shape
        return 1 if shape.latent is not None else min(self.plan.engine_gpus, shape.num_query_groups)

    def seconds(self, batch: int, live: float, steps: int) -> float:
        """Of so many steps, in which the cache grows by ``batch`` tokens each."""
        parts = self.parts(batch, live + batch * (steps - 1) / 2)
        return steps * sum(parts.values())

    def prefill(self, tokens: float) -> float:
        """Of prompts of so many tokens together."""
        return tokens * self._flops / self.plan.engine_gpus / (self.plan.gpu.flops * cost("products"))

    def places(self) -> int:
        """Requests that run at once: as many as may be in flight, and as the cache has room for in the mean."""
        plan, gib = self.plan, 2**30
        weights = BF16 * plan.model.parameters / plan.engine_gpus
        room = plan.static * plan.gpu.memory_gib * gib - weights
        tokens = room * self._cut / plan.model.cached_bytes
        fits = int(tokens / float(np.mean(plan.lengths)))
        if fits < 1:
            raise ValueError(
                f"an engine of {plan.engine_gpus} {plan.gpu.name} has no room for {plan.model.name}: "
                f"{weights / gib:.0f} GiB of weights a GPU, of {plan.static * plan.gpu.memory_gib:.0f} GiB: raise "
                f"--rollout-num-gpus-per-engine"
            )
        return min(plan.concurrency, fits)


@dataclass
class Engine:
    """One engine's time; requests are numbered by their rollout."""

    costs: TokenCosts
    now: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)
    """Seconds of the steps made, by what they went to."""
    _steps: int = 0
    _live: float = 0.0
    _running: list[tuple[int, int, int]] = field(default_factory=list)
    """A heap: the step after which one ends, tokens that it then has, its rollout."""
    _waiting: deque[tuple[int, int, int]] = field(default_factory=deque)
    """Prompt, response and rollout of each."""
    _left: dict[int, int] = field(default_factory=dict)
    """Requests of each rollout that have not ended."""
    _places: int = 0

    def __post_init__(self) -> None:
        self._places = self.costs.places()

    def begin(self, rollout: int, responses: Iterable[int], at: float) -> None:
        """Requests come, not before ``at``; those that came first are first in line."""
        if not self._running:
            self.now = max(self.now, at)
        prompt = self.costs.plan.prompt
        lengths = list(responses)
        self._waiting += [(prompt, int(length), rollout) for length in lengths]
        if lengths:
            self._left[rollout] = len(lengths)
        self._admit()

    def _admit(self) -> None:
        prompts = 0
        while self._waiting and len(self._running) < self._places:
            prompt, response, rollout = self._waiting.popleft()
            heapq.heappush(self._running, (self._steps + response, prompt + response, rollout))
            self._live += prompt
            prompts += prompt
        self._take(self.costs.prefill(prompts), "prompts")

    def _take(self, seconds: float, what: str) -> None:
        self.now += seconds
        self.spent[what] = self.spent.get(what, 0.0) + seconds

    def finish(self, rollout: int) -> float:
        """Go on until a rollout's requests have ended; when that is."""
        while self._left.get(rollout):
            self._go(math.inf)
        return self.now

    def go_until(self, at: float) -> None:
        """Go on to a point in time, or a step beyond it."""
        while self._running and self.now < at:
            self._go(at)
        self.now = max(self.now, at)

    def _go(self, at: float) -> None:
        """Make the steps up to the next end of a request, or to ``at``."""
        batch, steps = len(self._running), self._running[0][0] - self._steps
        while steps > 1 and self.now + self.costs.seconds(batch, self._live, steps) > at:
            steps = max(1, steps // 2)
        if steps:
            for what, seconds in self.costs.parts(batch, self._live + batch * (steps - 1) / 2).items():
                self._take(steps * seconds, what)
        self._steps += steps
        self._live += batch * steps
        while self._running and self._running[0][0] == self._steps:
            _, tokens, rollout = heapq.heappop(self._running)
            self._live -= tokens
            self._left[rollout] -= 1
        self._admit()

    def interrupt(self, seconds: float) -> None:
        """Weights are pushed: nothing is generated for so long, and what runs computes its cache anew."""
        self._take(seconds, "push")
        self._take(self.costs.prefill(self._live), "prompts")


def deal(responses: np.ndarray, group: int, engines: int) -> list[np.ndarray]:
    """The samples of each engine: groups, in turn."""
    of_group = np.asarray(responses).reshape(-1, group)
    return [of_group[first::engines].ravel() for first in range(engines)]


def generate(plan: Plan) -> Phase:
    """A rollout that begins with idle engines, and ends with its last response."""
    costs, slowest = TokenCosts(plan), None
    for responses in deal(plan.responses, plan.group, plan.engines):
        engine = Engine(costs)
        engine.begin(0, responses, 0.0)
        engine.finish(0)
        if slowest is None or engine.now > slowest.now:
            slowest = engine
    assert slowest is not None
    parts = dict(slowest.spent) | {"requests begun and ended": ramp(plan)}
    if (behind := manager_seconds(plan) - sum(parts.values())) > 0:
        parts["one process that sends all requests"] = behind
    return Phase("generation and reward", sum(parts.values()), parts)


def ramp(plan: Plan) -> float:
    """Seconds of a rollout in which its first requests are on their way, or its last rewards."""
    return cost("rollout") + cost("request") * len(plan.responses) / plan.engines


def manager_seconds(plan: Plan) -> float:
    """Processor time of the one process that sends a rollout's requests."""
    responses: Sequence[int] | np.ndarray = plan.responses
    return len(responses) * cost("manager, request") + float(np.sum(responses)) * cost("manager, token")
