"""Make multiplications that a small model cannot do in its head, and demonstrations that sometimes use Python.

OUTPUT gets ``sft.jsonl``, ``train.jsonl`` and ``eval.jsonl``; no problem of train.jsonl is in eval.jsonl.

Two of three demonstrations let Python multiply, and the others guess. So the warmed-up model knows both ways, and
reinforcement learning has something to find out: which of them pays.

    python3 -m examples.retool.make_data outputs/retool/data
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from examples.making_data import make_data
from slime.files.storage import write_text

_NUM_DEMONSTRATIONS, _NUM_TRAIN, _NUM_EVAL = 8000, 400, 64
_GUESSES = 1 / 3


def problem(a: int, b: int) -> list[dict[str, str]]:
    """The chat messages that ask for a product."""
    return [{"role": "user", "content": f"{a}*{b}="}]


def demonstration(a: int, b: int, rng: random.Random) -> list[tuple[str, bool]]:
    """A response in parts, each with whether it is the model's; some are guesses."""
    if rng.random() < _GUESSES:
        return [(f"\\boxed{{{rng.randrange(100, 10000)}}}", True)]
    return [
        (f"<code>print({a}*{b})</code>", True),
        (f"\n<interpreter>{a * b}</interpreter>\n", False),
        (f"\\boxed{{{a * b}}}", True),
    ]


def write(output: Path, seed: int) -> None:
    """Write the three files."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    chosen = rng.sample(pairs, _NUM_TRAIN + _NUM_EVAL)

    def rows(of: list[tuple[int, int]]) -> list[dict[str, Any]]:
        return [{"prompt": problem(a, b), "label": str(a * b)} for a, b in of]

    def demonstrated() -> dict[str, Any]:
        a, b = rng.choice(pairs)
        return {"prompt": problem(a, b), "metadata": {"demonstration": demonstration(a, b, rng)}}

    files = {
        "train": rows(chosen[:_NUM_TRAIN]),
        "eval": rows(chosen[_NUM_TRAIN:]),
        "sft": [demonstrated() for _ in range(_NUM_DEMONSTRATIONS)],
    }
    for name, lines in files.items():
        write_text("output", output / f"{name}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    make_data(__doc__, write)
