"""The optimizer in host memory on a GPU: the resident one's bits, in less device memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.gpu.test_loop import Record

NUM_GPUS = 1
ROOT = Path(__file__).parents[2]
_SAVED = 8.0
"""Bytes a parameter that the flag is to save at least; 12 less what is rounded up to the allocator's blocks."""


def test_steps_are_those_of_the_resident_optimizer_in_less_memory(record_property: Record) -> None:
    """Of a model whose embedding takes several chunks, also from a checkpoint of the resident optimizer; and where some
    of the layers, which are stored as one tensor, are in host memory, others not."""
    words = ["--model", "qwen3-0.6b", "--num-layers", "2", "--steps", "6", "--json"]
    command = [sys.executable, "-m", "tools.bench_optimizer", *words]
    printed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=600).stdout
    resident, *moved = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert len(moved) == 3
    for case in (resident, *moved):
        assert case["difference"] == case["difference_resumed"] == 0.0
    for case in moved:
        share = 0.9 if case["case"] == "offload of nine tenths" else 1.0
        assert case["bytes_at_rest"] < resident["bytes_at_rest"] - share * _SAVED
        assert case["bytes_at_peak"] < resident["bytes_at_peak"]
        record_property(f"{case['case']} bytes", round(case["bytes_at_rest"], 2))
        record_property(f"{case['case']} ms", round(case["step_ms"], 1))
