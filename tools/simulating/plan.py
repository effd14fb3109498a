"""What is simulated: a model, GPUs, who of them does what, and what a rollout is like."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tools.simulating.hardware import Gpu
from tools.simulating.model import Model


@dataclass(frozen=True)
class Layout:
    """How trainers divide a model; the rest of them are data-parallel. Of stages that do not have as many layers, the
    largest counts."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int = 1
    """Virtual stages of each rank in a pipeline."""
    recomputed: float = 0.0
    """Share of the layers whose forward pass is made again in the backward pass."""

    @property
    def dense(self) -> int:
        """Ranks that a parameter outside of experts is cut over."""
        return self.tp * self.pp

    @property
    def experts(self) -> int:
        """Ranks that the experts are cut over; one of them is whole."""
        return self.ep * self.pp


@dataclass(frozen=True)
class Plan:
    """One run. ValueError where its numbers do not fit each other."""

    model: Model
    gpu: Gpu
    trainers: int
    """GPUs that train."""
    engines: int
    engine_gpus: int = 1
    """Of one engine, tensor-parallel; of models with experts, these lie expert-parallel on them."""
    colocate: bool = True
    """Whether engines lie on the trainers' GPUs, and take turns with them."""
    asynchronous: bool = False
    staleness: int = 1
    layout: Layout = field(default_factory=Layout)
    prompt: int = 14
    """Tokens of a prompt."""
    responses: np.ndarray = field(default_factory=lambda: np.full(256, 512))
    """int [samples], tokens of each response of a rollout."""
    group: int = 8
    """Samples of a prompt."""
    steps: int = 1
    """Optimizer steps a rollout."""
    max_tokens: int = 8192
    """Of a micro-batch, on one GPU."""
    kernel: str = "flash"
    """Of the trainers' attention: ``flash`` or ``fa4``."""
    reference: bool = False
    """Whether a reference model scores all samples."""
    static: float = 0.7
    """Share of a GPU's memory that an engine's weights and cache take."""
    concurrency: int = 512
    """Requests in flight at an engine."""
    bucket: int = 512 * 2**20
    """Bytes that a push sends at a time."""

    def __post_init__(self) -> None:
        layout, shape = self.layout, self.model.shape
        for name, whole, part in (
            ("GPUs that train", self.trainers, layout.tp * layout.pp * layout.cp),
            ("GPUs that train", self.trainers, layout.ep * layout.pp),
            ("experts", shape.num_experts, layout.ep),
            ("attention heads", shape.num_attention_heads, layout.tp),
            ("attention heads", shape.num_attention_heads, self.engine_gpus),
            ("samples", len(self.responses), self.group),
            ("samples", len(self.responses), self.steps),
        ):
            if whole % part:
                raise ValueError(f"{whole} {name} are not a multiple of {part}")
        samples, least = len(self.responses) // self.steps, self.dp * (layout.pp if layout.vpp > 1 else 1)
        if samples < least:
            raise ValueError(
                f"{samples} samples of an optimizer step are too few for {least} micro-batches, which {self.dp} "
                f"data-parallel ranks need: raise --rollout-batch-size or --n-samples-per-prompt, or lower "
                f"--num-steps-per-rollout"
            )
        if layout.ep > 1 and not shape.num_moe_layers:
            raise ValueError(f"{self.model.name} has no experts to be parallel over {layout.ep} ranks")
        if self.colocate and self.engines * self.engine_gpus != self.trainers:
            raise ValueError(
                f"colocated, {self.engines} engines of {self.engine_gpus} GPUs need as many trainers, not "
                f"{self.trainers}"
            )
        if self.colocate and self.asynchronous:
            raise ValueError("asynchronous training needs GPUs apart for engines and trainers")

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.trainers if self.colocate else self.trainers + self.engines * self.engine_gpus

    @property
    def dp(self) -> int:
        """Data-parallel trainers."""
        return self.trainers // (self.layout.tp * self.layout.pp * self.layout.cp)

    @property
    def lengths(self) -> np.ndarray:
        """int [samples], tokens of each with its prompt."""
        return np.asarray(self.responses) + self.prompt

    def speed_of(self, ranks: int, step: int = 1) -> float:
        """Bytes a second, one way, of a GPU in a group of so many ranks, each ``step`` ranks from the next: within a
        host by its links, else by the network."""
        return self.gpu.link if ranks * step <= self.gpu.per_host else self.gpu.network


@dataclass(frozen=True)
class Phase:
    """A part of a step."""

    name: str
    seconds: float
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds by what they are spent on, adding up to the whole."""

    @property
    def bound(self) -> str:
        """What takes most of it."""
        return max(self.parts, key=lambda part: self.parts[part]) if self.parts else ""


def long_tailed(samples: int, median: float, spread: float, longest: int, seed: int = 0) -> np.ndarray:
    """int [samples]: log-normal lengths, ``spread`` being the deviation of their logarithms, cut at the longest."""
    drawn = np.random.default_rng(seed).lognormal(math.log(median), spread, samples)
    return np.clip(np.rint(drawn), 1, longest).astype(np.int64)


def summary(plan: Plan) -> dict[str, Any]:
    """The plan in numbers and words, for a table or a file."""
    layout = plan.layout
    sizes = {"TP": layout.tp, "PP": layout.pp, "VPP": layout.vpp, "CP": layout.cp, "EP": layout.ep, "DP": plan.dp}
    where = "colocated" if plan.colocate else "apart"
    return {
        "model": plan.model.name,
        "parameters": plan.model.parameters,
        "gpu": plan.gpu.name,
        "gpus": plan.gpus,
        "trainers": plan.trainers,
        "layout": " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one rank",
        "engines": f"{plan.engines} of {plan.engine_gpus} GPUs, {where}",
        "loop": f"asynchronous, staleness {plan.staleness}" if plan.asynchronous else "synchronous",
        "samples": len(plan.responses),
        "tokens": int(plan.lengths.sum()),
        "longest": int(plan.lengths.max()),
    }
