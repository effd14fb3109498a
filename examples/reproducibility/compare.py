"""Compare two runs of `run.sh`: samples, metrics of training, and final weights.

    python3 -m examples.reproducibility.compare outputs/reproducibility/first outputs/reproducibility/second

A run that was killed and went on counts as one: of a step that was taken twice, the last. A line says of how many
values both runs have the same bits, and how far apart the others are at most. The status is 0 where all are the same;
with ``--tolerance`` all but tokens and rewards may differ by as much; else 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

EXACT = ("tokens", "rewards")
_OF_A_SAMPLE = {"tokens": "tokens", "rewards": "reward", "log-probs of the engine": "rollout_log_probs"}
_OF_A_STEP = {"losses": "train/loss", "gradient norms": "train/grad_norm"}

Values = dict[str, list[np.ndarray]]


def values_of(run: Path) -> Values:
    """What a run has of each kind, a list of arrays in a fixed order.

    Raises:
        ValueError: something is missing.
    """
    found: Values = {}
    samples = [sample for file in _files(run, "samples_*.pt") for sample in _samples(file)]
    for kind, field in _OF_A_SAMPLE.items():
        found[kind] = [np.asarray(sample[field]) for sample in samples]
    lines = [json.loads(line) for file in _files(run, "metrics.jsonl") for line in file.read_text().splitlines()]
    steps = {line["train/step"]: line for line in lines if "train/step" in line}  # of one taken twice, the last
    for kind, name in _OF_A_STEP.items():
        found[kind] = [np.asarray(line[name]) for _, line in sorted(steps.items()) if name in line]
    found["final weights"] = [tensor for file in _files(run, "hf/*.safetensors") for tensor in _tensors(file)]
    return found


def _files(run: Path, pattern: str) -> list[Path]:
    files = sorted(run.glob(pattern))
    if not files:
        raise ValueError(f"{run} has no {pattern}: is it the directory of a run that ended well?")
    return files


def _samples(file: Path) -> list[dict[str, Any]]:
    samples: list[dict[str, Any]] = torch.load(file, weights_only=True)["samples"]
    return samples


def _tensors(file: Path) -> Iterator[np.ndarray]:
    with safe_open(file, framework="pt") as tensors:
        for name in sorted(tensors.keys()):
            yield tensors.get_tensor(name).float().numpy()


def compared(kind: str, first: list[np.ndarray], second: list[np.ndarray], tolerance: float) -> tuple[str, bool]:
    """A line of the table, and whether the two agree."""
    same = [a.shape == b.shape and bool((a == b).all()) for a, b in zip(first, second, strict=False)]
    line, count = f"{kind:<24} {sum(same):>6} of {max(len(first), len(second))} the same", len(same)
    if all(same) and len(first) == len(second):
        return line, True
    if len(first) != len(second) or any(a.shape != b.shape for a, b in zip(first, second, strict=True)):
        return f"{line}, and others of other lengths", False
    apart = max(float(np.abs(a.astype(np.float64) - b).max()) for a, b in zip(first, second, strict=True) if a.size)
    return f"{line}, the others {apart:.2g} apart at most", kind not in EXACT and apart <= tolerance and count > 0


def main(argv: list[str] | None = None) -> int:
    """Command line; the status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--tolerance", type=float, default=0.0, help="default: %(default)s")
    args = parser.parse_args(argv)
    try:
        first, second = values_of(args.first), values_of(args.second)
    except (OSError, ValueError) as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2
    lines = [compared(kind, first[kind], second[kind], args.tolerance) for kind in first]
    print("\n".join(line for line, _ in lines))
    agree = all(good for _, good in lines)
    print("the two runs agree" if agree else "the two runs do NOT agree")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
