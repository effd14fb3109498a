"""A tiny run of the whole loop: its model and data, and its command line."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import torch

from tests.integration.harness import ROOT

ROLLOUTS = 3
Value = str | int | bool | list[str] | None
"""Of a flag: None takes it out, True is a switch."""


def make_workspace(path: Path) -> Path:
    """A tiny model with random weights and a few addition problems."""
    tiny = [str(path / "model"), "--num-layers", "2", "--hidden-size", "64"]
    subprocess.run(
        [sys.executable, str(ROOT / "tools/make_tiny_model.py"), *tiny],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=300,
    )
    rng = random.Random(torch.seed())
    for name, count in (("train", 10), ("eval", 6)):
        pairs = [(rng.randrange(100), rng.randrange(100)) for _ in range(count)]
        rows = [{"prompt": [{"role": "user", "content": f"{a}+{b}="}], "label": str(a + b)} for a, b in pairs]
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def flags(workspace: Path, run_dir: Path, **changes: Value) -> list[str]:
    """The command line of a tiny run; ``changes`` are flags by their names, None takes one out, True is a switch."""
    values: dict[str, Value] = {
        "hf-checkpoint": str(workspace / "model"),
        "run-dir": str(run_dir),
        "prompt-data": str(workspace / "train.jsonl"),
        "input-key": "prompt",
        "label-key": "label",
        "apply-chat-template": True,
        "rollout-shuffle": True,
        "rm-type": "random",
        "num-rollout": ROLLOUTS,
        "rollout-batch-size": 4,
        "n-samples-per-prompt": 4,
        "rollout-max-response-len": 8,
        "use-dynamic-batch-size": True,
        "max-tokens-per-gpu": 256,
        "advantage-estimator": "grpo",
        "use-kl-loss": True,
        "kl-loss-coef": "0.01",
        "kl-loss-type": "low_var_kl",
        "ref-load": str(workspace / "model"),
        "lr": "1e-3",
        "lr-decay-style": "constant",
        "fp32": True,
        "seed": 7,
        "actor-num-gpus-per-node": 1,
        "colocate": True,
        "update-weight-buffer-size": 1_000_000,  # several buckets, as a large model has
        "sglang-enable-deterministic-inference": True,
        "sglang-uvicorn-access-log-exclude-prefixes": "/health",  # tests count requests in the log
        "ci-test": True,
    }
    values |= {name.replace("_", "-"): value for name, value in changes.items()}
    line: list[str] = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        words = [] if value is True else value if isinstance(value, list) else [str(value)]
        line += [f"--{name}", *words]
    return line
