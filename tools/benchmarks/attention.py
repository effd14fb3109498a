"""Attention alone: what each kernel takes of the GPU and of the host, by lengths and size of a micro-batch.

A call's time in training is the longer of the two: the GPU's where it has enough to do, the host's where it has not.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from slime.options.checks import attention as table
from slime.utils import device
from tools.benchmarks.report import Report, make_model, name_of

_CALLS = 12
_BUSY_CYCLES = 200_000_000
"""About a tenth of a second, in which the host queues every call."""


@dataclass(frozen=True)
class _Case:
    shortest: int
    longest: int
    tokens: int

    def __str__(self) -> str:
        lengths = f"{self.shortest}-{self.longest}" if self.shortest < self.longest else f"one of {self.longest}"
        return f"{lengths} in {self.tokens}"


CASES = (
    *(_Case(8, 64, tokens) for tokens in (1024, 4096, 16384)),
    *(_Case(100, 1000, tokens) for tokens in (2048, 4096, 8192, 16384)),
    _Case(2048, 4096, 16384),
    _Case(8192, 16384, 16384),
    _Case(16384, 16384, 16384),
)


def measure(options: argparse.Namespace, report: Report) -> None:
    """Every kernel that this GPU has, of a model's heads, in bfloat16."""
    from slime.backends.megatron.layers import kernels

    config = json.loads((make_model(options) / "config.json").read_text())
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    channels = config.get("head_dim", config["hidden_size"] // heads)
    needs = table.Needs("bfloat16", channels, channels, "cuda", device.capability())
    for kernel in [row.name for row in table.KERNELS]:
        try:
            kernels.choose(kernel, needs)
        except table.OptionError as error:
            print(f"attention: {error}", flush=True)
            continue
        for case in CASES:
            if report.out_of_time(f"{kernel}, {case}", 10.0):
                return
            times = _times(kernel, case, (heads, groups, channels))
            value = times["gpu_forward_ms"] + times["gpu_backward_ms"]
            report.add(f"attention, {kernel}, {case}", name_of(options), 1, value, "ms", **times)


def lengths_of(case: _Case) -> list[int]:
    """As many sequences of random lengths as fill a micro-batch; the last one is what is left."""
    rng, lengths, left = random.Random(0), list[int](), case.tokens
    while left:
        lengths.append(min(left, rng.randint(case.shortest, case.longest)))
        left -= lengths[-1]
    return lengths


def _times(kernel: str, case: _Case, shape: tuple[int, int, int]) -> dict[str, float]:
    """Milliseconds of a pass, medians; ``first_call_s``: with what is compiled for it."""
    from slime.backends.megatron.layers import kernels
    from slime.backends.megatron.layers.attention import AttentionPlan

    heads, groups, channels = shape
    lengths, where = lengths_of(case), device.current_device()
    plan = AttentionPlan(lengths, 1, 0, where)
    together = torch.randn(case.tokens, heads + 2 * groups, channels, device=where, dtype=torch.bfloat16)
    inputs = [x.detach().requires_grad_() for x in together.split((heads, groups, groups), dim=1)]
    upstream = torch.randn(case.tokens, heads, channels, device=where, dtype=torch.bfloat16)

    def forward() -> Tensor:
        query, key, value = inputs
        return kernels.packed_attention(query, key, value, plan, channels**-0.5, backend=kernel)

    def backward(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, inputs, upstream, retain_graph=True)

    started = time.perf_counter()
    backward(forward())
    device.synchronize()
    found = {"sequences": float(len(lengths)), "first_call_s": time.perf_counter() - started}
    for _ in range(3):
        backward(forward())
    out = forward()
    passes: dict[str, Callable[[], Any]] = {"forward": forward, "backward": lambda: backward(out)}
    for name, call in passes.items():
        found[f"gpu_{name}_ms"] = _of_gpu(call)
        found[f"host_{name}_ms"] = _of_host(call)
    return found


def _of_gpu(call: Callable[[], Any]) -> float:
    """The GPU is kept busy until all calls are queued, so that it waits for none."""
    accelerator = torch.get_device_module(device.current_device())
    events = [accelerator.Event(enable_timing=True) for _ in range(_CALLS + 1)]
    device.synchronize()
    accelerator._sleep(_BUSY_CYCLES)
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    device.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(events))


def _of_host(call: Callable[[], Any]) -> float:
    """Until a call returns, with an idle GPU."""
    seconds = []
    for _ in range(_CALLS):
        device.synchronize()
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) * 1e3
