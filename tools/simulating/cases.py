"""Runs that were measured, and what is predicted of them: which lines the costs were fitted to, and which held out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tools.benchmarks import train as train_benchmark
from tools.benchmarks.lengths import length_of
from tools.simulating import generation, handing, training
from tools.simulating.hardware import GPUS
from tools.simulating.memory import memory
from tools.simulating.model import read_model
from tools.simulating.plan import Layout, Phase, Plan
from tools.simulating.step import simulate

_LINES = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
_FIRST, _COUNTED, _ROLLOUTS = 2, 5, 8
"""Of a run of `tools/bench.py async`: its first rollout that counts, how many do, and how many there may be."""
_PROMPT, _LONGEST = 14, 2048
_ONE, _TP2, _EP2 = Layout(), Layout(tp=2), Layout(ep=2)


@dataclass(frozen=True)
class Case:
    """One measured figure and the same one predicted."""

    name: str
    line: str
    """Of docs/benchmarks: a file and the number of a line, or a page."""
    measured: float
    predicted: float
    fitted: str = ""
    """Which costs were fitted to this figure; empty of one that is held out."""
    why: str = ""
    """Of one that is held out and far off."""

    @property
    def deviation(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted / self.measured - 1


def line_of(file: str, number: int) -> dict[str, Any]:
    """One JSON line of docs/benchmarks, counted from 1."""
    found: dict[str, Any] = json.loads((_LINES / f"{file}.jsonl").read_text().splitlines()[number - 1])
    return found


def all_cases() -> list[Case]:
    """Seconds; of memory GiB."""
    makers = (_training, _generation, _pushes, _handovers, _steps, _memory)
    return [case for make in makers for case in make()]


def alone(
    model: str,
    layout: Layout = _ONE,
    gpus: int = 1,
    *,
    gpu: str = "h200",
    num_layers: int | None = None,
    sequences: tuple[int, int] = (2048, 4096),
    kernel: str = "flash",
) -> Plan:
    """`tools/bench.py train`: its own random lengths, within ``sequences``, in micro-batches of 16,384 tokens."""
    words = [f"--{name}={size}" for name, size in zip(("shortest", "longest"), sequences, strict=True)]
    options = train_benchmark.parse(["--model", "", "--result", "", *words])
    return Plan(
        read_model(model, num_layers),
        GPUS[gpu],
        gpus,
        gpus,
        layout=layout,
        prompt=0,
        responses=np.array(train_benchmark.lengths_of(options, gpus // layout.tp)),
        group=1,
        max_tokens=options.tokens,
        kernel=kernel,
    )


def _loop(model: str, gpus: int = 1, **more: Any) -> Plan:
    """`tools/bench.py step`: 256 responses of 512 tokens."""
    num_layers = more.pop("num_layers", None)
    sizes: dict[str, Any] = {"engines": gpus, "prompt": _PROMPT, "responses": np.full(256, 512)} | more
    return Plan(read_model(model, num_layers), GPUS["h200"], gpus, **sizes)


def _experts() -> Plan:
    return alone("qwen3-30b-a3b", _EP2, 2, num_layers=12)


def _training() -> Iterator[Case]:
    eight_layers = Layout(recomputed=8 / 36)
    long = (8192, 16384)
    lines: list[tuple[str, str, int, Plan, str]] = [
        ("1.7B", "h200", 92, alone("qwen3-1.7b"), "streaming"),
        ("1.7B, another host", "h200", 107, alone("qwen3-1.7b"), ""),
        ("4B, 8 layers recomputed", "h200", 6, alone("qwen3-4b", eight_layers), ""),
        ("1.7B, fa4", "h100", 36, alone("qwen3-1.7b", gpu="h100", kernel="fa4"), ""),
        ("1.7B, 8k to 16k", "h100", 32, alone("qwen3-1.7b", gpu="h100", sequences=long), ""),
        ("30B-A3B, 12 layers, EP2", "h200", 65, _experts(), "expert traffic"),
        ("30B-A3B, 12 layers, EP2, earlier", "h200", 52, _experts(), ""),
    ]
    pages = [
        ("1.7B, fa4", "attention kernels", 40200, alone("qwen3-1.7b", kernel="fa4"), ""),
        ("1.7B, 8k to 16k", "attention kernels", 23100, alone("qwen3-1.7b", sequences=long), ""),
        (
            "1.7B, 8k to 16k, fa4",
            "attention kernels",
            30100,
            alone("qwen3-1.7b", kernel="fa4", sequences=long),
            "",
        ),
        (
            "8B, TP2",
            "8B, no line",
            8490,
            alone("qwen3-8b", Layout(tp=2, recomputed=6 / 36), 2),
            "link, trainers",
        ),
    ]
    rates = [(name, f"{file} {n}", line_of(file, n)["value"], plan, fitted) for name, file, n, plan, fitted in lines]
    rates += [(name, f"benchmarks.md, {page}", rate, plan, fitted) for name, page, rate, plan, fitted in pages]
    for name, where, rate, plan, fitted in rates:
        measured = float(plan.lengths.sum()) / rate / plan.trainers
        yield Case(f"training alone: {name}", where, measured, training.train(plan).seconds, fitted)


def _generation() -> Iterator[Case]:
    together = "decoding"
    for name, number, plan, fitted in (
        ("1.7B", 113, _loop("qwen3-1.7b"), together),
        ("4B", 84, _loop("qwen3-4b"), together),
        ("8B, two engines", 57, _loop("qwen3-8b", 2), ""),
        ("30B-A3B, one engine on two GPUs", 127, _loop("qwen3-30b-a3b", 2, engines=1, engine_gpus=2), ""),
    ):
        measured = line_of("h200", number)["parts"]["generation and reward"]
        why = "of an earlier tree; why it took as long as 4B on one GPU was not looked into" if number == 57 else ""
        yield Case(f"generation: {name}", f"h200 {number}", measured, generation.generate(plan).seconds, fitted, why)
    many = _loop("qwen3-1.7b", responses=np.full(512, 1024), group=1)
    measured = float(many.responses.sum()) / line_of("h200", 111)["value"]
    yield Case("generation: 1.7B, 512 x 1,024", "h200 111", measured, generation.generate(many).seconds, together)


def _pushes() -> Iterator[Case]:
    whole = _loop("qwen3-30b-a3b", 2, engines=1, engine_gpus=2, layout=_EP2)
    apart = {"engines": 1, "colocate": False}
    varies = "milliseconds of a push differ by half between runs of one day"
    for name, number, plan, fitted, why in (
        ("1.7B", 117, _loop("qwen3-1.7b"), "push", ""),
        ("4B", 88, _loop("qwen3-4b"), "", varies),
        ("30B-A3B, 8 layers", 68, _loop("qwen3-30b-a3b", num_layers=8), "push, tensor", ""),
        ("8B, TP2", 61, _loop("qwen3-8b", 2, layout=_TP2), "", ""),
        ("4B, NCCL", 40, _loop("qwen3-4b", **apart), "broadcast", ""),
        ("4B, NCCL, earlier", 35, _loop("qwen3-4b", **apart), "", varies),
        ("30B-A3B", 131, whole, "", "it merged adapters, which is not modelled"),
    ):
        measured = line_of("h200", number)["value"]
        yield Case(f"push: {name}", f"h200 {number}", measured, handing.push(plan).seconds, fitted, why)


def _handovers() -> Iterator[Case]:
    alone, loops = ("sleep_s", "wake_s"), ("trainers give memory back", "trainers take memory")
    steps = ("sleep_trainers", "wake_trainers")
    earlier = "of an earlier tree"
    for name, number, keys, plan, fitted, why in (
        ("1.7B", 113, loops, _loop("qwen3-1.7b"), "sleep, wake, mapping", ""),
        ("4B", 84, loops, _loop("qwen3-4b"), "sleep, wake, mapping", ""),
        ("8B, TP2", 57, loops, _loop("qwen3-8b", 2, layout=_TP2), "copy, beside others", ""),
        ("4B, DP2", 55, steps, _loop("qwen3-4b", 2), "", earlier),
        ("30B-A3B, 12 layers, EP2", 67, alone, _experts(), "", "outside of the loop, where a wake takes 0.05 s less"),
    ):
        found = line_of("h200", number)
        found = found.get("parts", found)
        phases: list[tuple[str, Phase]] = [("asleep", handing.sleep(plan)), ("awake", handing.wake(plan))]
        for key, (what, phase) in zip(keys, phases, strict=True):
            costs = fitted if what == "asleep" or number != 57 else ""
            yield Case(f"{what}: {name}", f"h200 {number}", found[key], phase.seconds, costs, why)


def _steps() -> Iterator[Case]:
    partly = "generation, wake and sleep, not the passes"
    for name, number, plan, fitted in (
        ("1.7B", 113, _loop("qwen3-1.7b"), partly),
        ("4B", 84, _loop("qwen3-4b"), partly),
        ("8B, TP2, two GPUs", 57, _loop("qwen3-8b", 2, layout=_TP2), "the sleep alone"),
    ):
        yield Case(f"step: {name}", f"h200 {number}", line_of("h200", number)["value"], simulate(plan).seconds, fitted)
    rollouts = [np.array([length_of(256 * r + i, _LONGEST, True) for i in range(256)]) for r in range(_ROLLOUTS)]
    counted = rollouts[_FIRST : _FIRST + _COUNTED]
    tokens = sum(int(each.sum()) + _PROMPT * len(each) for each in counted)
    apart = {"engines": 1, "colocate": False}
    for name, number, more, fitted in (
        ("colocated", 38, {"gpus": 2}, ""),
        ("colocated, earlier", 26, {"gpus": 2}, ""),
        ("apart", 39, apart, "decoding"),
        ("apart, earlier", 34, apart, ""),
    ):
        plans = [_loop("qwen3-4b", responses=each, **more) for each in counted]
        predicted = sum(simulate(plan).seconds for plan in plans) / _COUNTED
        measured = tokens / line_of("h200", number)["value"] / _COUNTED
        yield Case(f"step: 4B, long-tailed, {name}", f"h200 {number}", measured, predicted, fitted)
    ahead = _loop("qwen3-4b", responses=counted[0], asynchronous=True, **apart)
    for name, number in (("", 41), (", earlier", 36)):
        measured = tokens / line_of("h200", number)["value"] / _COUNTED
        why = "its engine had CUDA graphs for 256 requests, which are not modelled" if number == 36 else ""
        predicted = simulate(ahead, rollouts).seconds
        yield Case(f"step: 4B, long-tailed, asynchronous{name}", f"h200 {number}", measured, predicted, "", why)


def _memory() -> Iterator[Case]:
    for name, plan, number in (
        ("1.7B", alone("qwen3-1.7b"), 91),
        ("4B, 8 layers recomputed", alone("qwen3-4b", Layout(recomputed=8 / 36)), 5),
        ("30B-A3B, 12 layers, EP2", _experts(), 64),
    ):
        rows = {row.split()[0]: row.split()[1:] for row in line_of("h200", number)["memory"][1:]}
        found = memory(plan)
        for what, row, column, value in (
            ("before a step", "wake", 0, found.state),
            ("at the peak", "actor_train", 1, found.state + found.activations),
        ):
            yield Case(f"GiB {what}: {name}", f"h200 {number}", float(rows[row][column]), value)
