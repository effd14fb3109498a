"""Make tables, questions that only the tables answer, and demonstrations that sometimes ask.

OUTPUT gets ``sft.jsonl``, ``train.jsonl`` and ``eval.jsonl``. Each row has a table of its own, so that there is nothing
to learn by heart; no key that is asked for in eval.jsonl is in train.jsonl.

Before each call a demonstration guesses with a probability of 0.4, instead. So the warmed-up model knows both ways, and
reinforcement learning has something to find out: which of them pays.

    python3 -m examples.agent_tool_use.make_data outputs/agent_tool_use/data
"""

from __future__ import annotations

import itertools
import json
import random
import string
from pathlib import Path
from typing import Any

from examples.agent_tool_use.agent import FIND
from examples.making_data import make_data
from slime.files.storage import write_text

KEYS = [letter + digit for letter in string.ascii_lowercase for digit in string.digits]
NUMBERS = [str(number) for number in range(10, 100)]
_NUM_DEMONSTRATIONS, _NUM_TRAIN, _NUM_EVAL = 6000, 1000, 64
_HELD_OUT_KEYS = 60
_MOST_CALLS = 3
_OTHER_ENTRIES = 3
_GUESSES = 0.4


def question(key: str) -> list[dict[str, str]]:
    """The chat messages that ask what a key comes to."""
    return [{"role": "user", "content": f"{key}?"}]


def task(first: str, calls: int, rng: random.Random) -> tuple[dict[str, str], list[str]]:
    """A table, and the way through it: keys from ``first`` on, as many as ``calls``, and then the number."""
    others = rng.sample([key for key in KEYS if key != first], calls - 1 + _OTHER_ENTRIES)
    way = [first, *others[: calls - 1], rng.choice(NUMBERS)]
    table = dict(itertools.pairwise(way)) | {key: rng.choice(NUMBERS) for key in others[calls - 1 :]}
    return dict(sorted(table.items())), way


def demonstration(way: list[str], rng: random.Random) -> list[dict[str, Any]]:
    """A conversation that goes the way, or a part of it and then guesses."""
    messages: list[dict[str, Any]] = list(question(way[0]))
    for number, (key, found) in enumerate(itertools.pairwise(way)):
        if rng.random() < _GUESSES:
            return [*messages, {"role": "assistant", "content": rng.choice(NUMBERS)}]
        function = {"name": "find", "arguments": json.dumps({"key": key})}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{number}", "content": found},
        ]
    return [*messages, {"role": "assistant", "content": way[-1]}]


def write(output: Path, seed: int) -> None:
    """Write the three files."""
    rng = random.Random(seed)
    shuffled = rng.sample(KEYS, len(KEYS))

    def drawn(keys: list[str]) -> tuple[dict[str, str], list[str]]:
        return task(rng.choice(keys), rng.randint(1, _MOST_CALLS), rng)

    def row(keys: list[str]) -> dict[str, Any]:
        table, way = drawn(keys)
        return {"prompt": question(way[0]), "label": way[-1], "metadata": {"table": table}}

    files: dict[str, list[dict[str, Any]]] = {
        "train": [row(shuffled[_HELD_OUT_KEYS:]) for _ in range(_NUM_TRAIN)],
        "eval": [row(shuffled[:_HELD_OUT_KEYS]) for _ in range(_NUM_EVAL)],
        "sft": [{"messages": demonstration(drawn(KEYS)[1], rng), "tools": [FIND]} for _ in range(_NUM_DEMONSTRATIONS)],
    }
    for name, lines in files.items():
        write_text("output", output / f"{name}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    make_data(__doc__, write)
