"""Make retool's multiplications for an agent of strands-agents, and demonstrations that sometimes call its tool.

OUTPUT gets ``sft.jsonl``, ``train.jsonl`` and ``eval.jsonl``; no problem of train.jsonl is in eval.jsonl.

    python3 -m examples.strands_sglang.make_data outputs/strands_sglang/data
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from examples.making_data import make_data
from examples.retool.make_data import problem
from slime.files.storage import write_text

SYSTEM_PROMPT = "Compute with the tool execute_python_code. Give the result in \\boxed{}."
"""Of `generate_with_strands`, too."""
TOOL = {
    "type": "function",
    "function": {
        "name": "execute_python_code",
        "description": "Run a Python program; what it prints is returned.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}
_NUM_DEMONSTRATIONS, _NUM_TRAIN, _NUM_EVAL = 6000, 400, 16
_GUESSES = 1 / 3


def demonstration(a: int, b: int, rng: random.Random) -> list[dict[str, Any]]:
    """A conversation in which the product is computed, or guessed."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM_PROMPT}, *problem(a, b)]
    result = rng.randrange(100, 10000)
    if rng.random() >= _GUESSES:
        result = a * b
        function = {"name": "execute_python_code", "arguments": json.dumps({"code": f"print({a}*{b})"})}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "1", "content": str(result)},
        ]
    return [*messages, {"role": "assistant", "content": f"\\boxed{{{result}}}"}]


def write(output: Path, seed: int) -> None:
    """Write the three files."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    chosen = rng.sample(pairs, _NUM_TRAIN + _NUM_EVAL)

    def rows(of: list[tuple[int, int]]) -> list[dict[str, Any]]:
        return [{"prompt": problem(a, b), "label": str(a * b)} for a, b in of]

    files = {
        "train": rows(chosen[:_NUM_TRAIN]),
        "eval": rows(chosen[_NUM_TRAIN:]),
        "sft": [
            {"messages": demonstration(*rng.choice(pairs), rng), "tools": [TOOL]} for _ in range(_NUM_DEMONSTRATIONS)
        ],
    }
    for name, lines in files.items():
        write_text("output", output / f"{name}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    make_data(__doc__, write)
