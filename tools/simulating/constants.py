"""What was measured, each figure with where it comes from: the one table that a simulation takes its costs from.

"h200 N" is line N of docs/benchmarks/h200.jsonl, "h100 N" of h100.jsonl; a page is one of docs/. *Fitted* means that
the figure is such that the simulation gives what that line has; *assumed* that nobody has measured it. Which lines were
held out, and how far off the simulation is there, is what ``tools/simulate.py check`` prints.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """One figure."""

    value: float
    unit: str
    source: str


COSTS: dict[str, Cost] = {
    # Training
    "products": Cost(0.677, "of the peak", "matrix products at about 670 TFLOP/s: benchmarks.md, training alone"),
    "streaming": Cost(0.63, "of the memory's bandwidth", "what lies between products; fitted to h200 92"),
    "gradient bytes": Cost(12.0, "bytes a parameter", "bfloat16 written and read, float32 read and written"),
    "optimizer bytes": Cost(52.0, "bytes a parameter", "42 ms for 1.7B on an H100, at that rate: benchmarks.md"),
    "expert traffic": Cost(1.47, "times what permutation has to move", "fitted to h200 65"),
    "link, trainers": Cost(
        0.31, "of the link", "collectives, waits included; fitted to 8B alone: benchmarks.md, no line"
    ),
    "link, experts": Cost(0.31, "of the link", "assumed to be that of other collectives"),
    "network": Cost(0.8, "of the network", "assumed: nothing was measured over several hosts"),
    # Generation
    "weights read": Cost(0.78, "of the memory's bandwidth", "fitted to h200 39, 84, 111 and 113 together"),
    "cache read": Cost(0.56, "of the memory's bandwidth", "likewise; SGLang's triton attention"),
    "decode step": Cost(0.7e-3, "s a step", "likewise"),
    "decode layer": Cost(30e-6, "s a layer and step", "likewise"),
    "rollout": Cost(0.2, "s a rollout", "likewise: its first requests and last rewards"),
    "request": Cost(2e-3, "s a request of an engine", "likewise"),
    "reduction": Cost(10e-6, "s", "of two tensor-parallel engine ranks, twice a layer; assumed"),
    "manager, request": Cost(0.69e-3, "s a request", "benchmarks.md, rollout path on CPU, idle"),
    "manager, token": Cost(1.0e-6, "s a token", "likewise"),
    # Weights and memory
    "push": Cost(0.032, "s", "fitted to h200 117 and 68 together"),
    "push, tensor": Cost(59.4e-6, "s a tensor", "likewise"),
    "broadcast": Cost(0.66, "of the link", "to engines apart; fitted to h200 40"),
    "copy": Cost(55e9, "bytes/s", "a GPU to its host and back: benchmarks.md, weight push, sleep, memory"),
    "copy, beside others": Cost(46.6e9, "bytes/s", "two GPUs of a host at once; fitted to the sleep of h200 57"),
    "mapping": Cost(402e9, "bytes/s", "memory taken; fitted to the wakes of h200 84 and 113"),
    "sleep": Cost(0.055, "s a call", "fitted to the sleeps of h200 84 and 113"),
    "wake": Cost(0.051, "s a call", "fitted to the wakes of h200 84 and 113"),
    "engines release": Cost(0.06, "s", "h200 84 and 113"),
    "engines resume": Cost(0.12, "s", "the mean of h200 84 (0.21) and 113 (0.03); why they differ is not known"),
    "asleep": Cost(3.2, "GiB", "left while both sleep: h200 90 and 119"),
    "context": Cost(1.35, "GiB", "a trainer's, without what torch holds: h200 78"),
    # Control
    "convert": Cost(0.16e-6, "s a token", "samples to batches: h200 113"),
    "pack": Cost(0.25e-6, "s a token of a rank", "packing: the mean of h200 84 and 113"),
    "row bytes": Cost(24.0, "bytes a token", "of a batch: token, mask, log-prob, reward, advantage"),
    "call of a rank": Cost(0.21e-3, "s", "tools/bench_control.py: scale.md"),
    "call of an engine": Cost(0.73e-3, "s", "of one process: tools/bench_control.py: scale.md"),
    "proof, tensor": Cost(5e-6, "s", "of each rank of an engine, likewise"),
}


def cost(name: str) -> float:
    """One of them."""
    return COSTS[name].value


@dataclass(frozen=True)
class AttentionSpeed:
    """A kernel's on sequences of one length: shares of the GPU's peak, of 4 FLOPs a pair and channel forward, and of
    twice as many backward."""

    length: float
    """Of the sequence that a pair of tokens is in, in the mean."""
    forward: float
    backward: float
    line: int
    """Of h100.jsonl."""


ATTENTION: dict[str, list[AttentionSpeed]] = {
    "flash": [
        AttentionSpeed(44, 0.018, 0.007, 13),
        AttentionSpeed(690, 0.152, 0.099, 17),
        AttentionSpeed(3379, 0.296, 0.194, 18),
        AttentionSpeed(13054, 0.327, 0.237, 19),
        AttentionSpeed(16384, 0.342, 0.250, 20),
    ],
    "fa4": [
        AttentionSpeed(44, 0.008, 0.004, 3),
        AttentionSpeed(690, 0.278, 0.123, 7),
        AttentionSpeed(3379, 0.572, 0.354, 8),
        AttentionSpeed(13054, 0.678, 0.492, 9),
        AttentionSpeed(16384, 0.686, 0.503, 10),
    ],
}
"""16 heads over 8 groups of 128 channels, micro-batches of 16,384 tokens. Between two lengths, by the logarithm."""
