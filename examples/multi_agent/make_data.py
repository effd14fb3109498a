"""Make questions for the largest of three digits, and demonstrations of all three agents, a part of them wrong.

OUTPUT gets ``sft.jsonl``, ``train.jsonl`` and ``eval.jsonl``; no question of train.jsonl is in eval.jsonl.

A warmed-up solver or rewriter is right about as often as the demonstrations are, and a selector picks at random:
reinforcement learning has something left to do for each of them.

    python3 -m examples.multi_agent.make_data outputs/multi_agent/data
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

from examples.making_data import make_data
from examples.multi_agent.rollout_with_multi_agents import rewriter_prompt, selector_prompt, solver_prompt
from slime.files.storage import write_text

_NUM_DEMONSTRATIONS, _NUM_EVAL, _SOLVERS, _REWRITERS = 6000, 64, 3, 2
_RIGHT = 0.6


def question(digits: tuple[int, ...]) -> str:
    """The text of a question."""
    return "max " + " ".join(map(str, digits))


def attempt(digits: tuple[int, ...], rng: random.Random) -> str:
    """An answer in a box: the largest digit, or too often any of them."""
    return f"\\boxed{{{max(digits) if rng.random() < _RIGHT else rng.choice(digits)}}}"


def demonstration(digits: tuple[int, ...], rng: random.Random) -> tuple[str, str]:
    """What one of the agents is asked, and an answer."""
    role = rng.randrange(3)
    text = question(digits)
    if role == 0:
        return solver_prompt(text), attempt(digits, rng)
    answers = [attempt(digits, rng) for _ in range(_SOLVERS if role == 1 else _REWRITERS)]
    if role == 1:
        return rewriter_prompt(text, answers), attempt(digits, rng)
    return selector_prompt(text, answers), f"\\boxed{{{rng.randint(1, _REWRITERS)}}}"


def write(output: Path, seed: int) -> None:
    """Write the three files."""
    rng = random.Random(seed)
    problems: list[tuple[int, ...]] = list(itertools.permutations(range(10), 3))
    rng.shuffle(problems)

    def rows(of: list[tuple[int, ...]]) -> list[dict[str, Any]]:
        return [{"prompt": [{"role": "user", "content": question(d)}], "label": str(max(d))} for d in of]

    def demonstrated() -> dict[str, Any]:
        asked, answer = demonstration(rng.choice(problems), rng)
        return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}

    files = {
        "train": rows(problems[_NUM_EVAL:]),
        "eval": rows(problems[:_NUM_EVAL]),
        "sft": [demonstrated() for _ in range(_NUM_DEMONSTRATIONS)],
    }
    for name, lines in files.items():
        write_text("output", output / f"{name}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    make_data(__doc__, write)
