"""Make repositories with a small fault each, as rows for the coding agent, and demonstrations of mending them.

OUTPUT gets ``sft.jsonl``, ``train.jsonl`` and ``eval.jsonl``; no task of train.jsonl is in eval.jsonl.

A repository is one function that uses the wrong operator, and a test of it that fails. It is made in the sandbox by the
row's ``pre_commands``. Some demonstrations change the operator without having looked: reinforcement learning has
something to find out.

    python3 -m examples.coding_agent_rl.make_data outputs/coding_agent_rl/data
"""

from __future__ import annotations

import itertools
import json
import random
import string
from pathlib import Path
from typing import Any

from examples.making_data import make_data
from slime.agent.harness.mini_agent import TOOL
from slime.files.storage import write_text

PROMPT = "mend calc.py"
"""What the agent is told; run.sh has it in SWE_CC_PROMPT."""
OPERATORS = {"add": "+", "sub": "-", "mul": "*", "mod": "%"}
RESULTS = {"add": 10, "sub": 4, "mul": 21, "mod": 1}
"""Of 7 and 3."""
_NUM_DEMONSTRATIONS, _NUM_TRAIN, _NUM_EVAL = 6000, 200, 4
_BLIND = 1 / 3


def source(function: str, operator: str, names: tuple[str, str]) -> str:
    """The text of calc.py."""
    a, b = names
    return f"def {function}({a}, {b}):\n    return {a} {operator} {b}\n"


def test_of(function: str) -> str:
    """The text of test_calc.py."""
    a, b = (7, 3)
    return (
        f"import unittest\n\nfrom calc import {function}\n\n\n"
        "class Test(unittest.TestCase):\n    def test_it(self):\n"
        f"        self.assertEqual({function}({a}, {b}), {RESULTS[function]})\n"
    )


def row(function: str, operator: str, names: tuple[str, str]) -> dict[str, Any]:
    """A task, as `examples.coding_agent_rl.swe` describes it."""
    files = {"calc.py": source(function, operator, names), "test_calc.py": test_of(function)}
    files[".gitignore"] = "__pycache__\n"
    making = [
        "git init -q .",
        *(f"cat > {name} <<'END'\n{text}END" for name, text in files.items()),
        "git add -A",
        "git -c user.name=slime -c user.email=slime@localhost commit -q -m start",
    ]
    return {
        "prompt": PROMPT,
        "label": f"{function}-{'-'.join(names)}",
        "metadata": {
            "workdir": "/workspace/repo",
            "problem_statement": f"{function}({', '.join(names)}) in calc.py gives a wrong result.\n",
            "pre_commands": making,
            "eval_cmd": "python3 -m unittest -q test_calc",
            "test_files": ["test_calc.py"],
        },
    }


def demonstration(function: str, operator: str, names: tuple[str, str], rng: random.Random) -> list[dict[str, Any]]:
    """A conversation with the agent `mini`, which looks at the file and mends it, or does not look."""
    blind = rng.random() < _BLIND
    steps = [] if blind else [("cat calc.py", source(function, operator, names))]
    wrong, right = rng.sample(list(OPERATORS.values()), 2) if blind else (operator, OPERATORS[function])
    steps.append((f"sed -i 's/{wrong}/{right}/' calc.py", ""))
    messages: list[dict[str, Any]] = [{"role": "user", "content": PROMPT}]
    for number, (command, printed) in enumerate(steps):
        call: dict[str, Any] = {"id": f"call_{number}", "type": "function"}
        call |= {"function": {"name": "bash", "arguments": json.dumps({"command": command})}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{number}", "content": f"{printed}[exit status 0]"},
        ]
    return [*messages, {"role": "assistant", "content": "done"}]


def write(output: Path, seed: int) -> None:
    """Write the three files."""
    rng = random.Random(seed)
    names = list(itertools.permutations(string.ascii_lowercase, 2))
    rng.shuffle(names)

    def fault(of: list[tuple[str, str]]) -> tuple[str, str, tuple[str, str]]:
        function = rng.choice(list(OPERATORS))
        wrong = [operator for operator in OPERATORS.values() if operator != OPERATORS[function]]
        return function, rng.choice(wrong), rng.choice(of)

    held_out, known = names[:50], names[50:]
    files = {
        "train": [row(*fault(known)) for _ in range(_NUM_TRAIN)],
        "eval": [row(*fault(held_out)) for _ in range(_NUM_EVAL)],
        "sft": [{"messages": demonstration(*fault(names), rng), "tools": [TOOL]} for _ in range(_NUM_DEMONSTRATIONS)],
    }
    for name, lines in files.items():
        write_text("output", output / f"{name}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    make_data(__doc__, write)
