"""Make the mock shop's tasks, and demonstrations of serving its users, some of which guess the order.

OUTPUT gets ``sft.jsonl``, ``train.jsonl`` and ``eval.jsonl``, whose tasks are of different splits.

    PYTHONPATH=examples/tau-bench/mock python3 -m examples.tau-bench.make_data outputs/tau-bench/data
"""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from typing import Any

from tau_bench.envs import Env
from tau_bench.types import Action

from examples.making_data import make_data
from slime.files.storage import write_text

_NUM_DEMONSTRATIONS = 6000
_GUESSES = 1 / 3
tau1_mock = importlib.import_module("examples.tau-bench.tau1_mock")


def demonstration(env: Env, task_index: int, rng: random.Random) -> list[dict[str, Any]]:
    """A conversation with a user."""
    first = env.reset(task_index)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": env.wiki},
        {"role": "user", "content": first.observation},
    ]

    def call(name: str, /, **arguments: str) -> str:
        told = env.step(Action(name=name, kwargs=arguments)).observation
        function = {"name": name, "arguments": json.dumps(arguments)}
        calls = [{"id": f"call_{len(messages)}", "type": "function", "function": function}]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": told})
        return told

    order = str(rng.randrange(10, 100)) if rng.random() < _GUESSES else call("find", name=env.task.user_id)
    call("cancel", order=order)
    return [*messages, {"role": "assistant", "content": "Cancelled."}]


def write(output: Path, seed: int) -> None:
    """Write the three files."""
    rng, env = random.Random(seed), Env("sft", None)
    files: dict[str, list[dict[str, Any]]] = {
        "train": tau1_mock.rows("retail", "train"),
        "eval": tau1_mock.rows("retail", "dev"),
        "sft": [
            {"messages": demonstration(env, rng.randrange(len(env.tasks)), rng), "tools": env.tools_info}
            for _ in range(_NUM_DEMONSTRATIONS)
        ],
    }
    for name, lines in files.items():
        write_text("output", output / f"{name}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    make_data(__doc__, write)
