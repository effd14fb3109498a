"""Make arithmetic problems as chat messages: for a supervised warm-up, for reinforcement learning, and for evaluation.

OUTPUT gets three JSONL files without a problem in common (``12+34`` and ``34+12`` count as one problem):

    sft.jsonl    {"messages": [user, assistant], "metadata": {...}}, the assistant answers in full
    train.jsonl  {"prompt": [user], "label": "46", "metadata": {...}}
    eval.jsonl   likewise, graded as ``math`` whatever --rm-type is

The answer is ``\\boxed{46}``, which ``--rm-type math`` grades. The same arguments and seed give the same files.

    python tools/make_arithmetic_data.py outputs/data --seed 1
"""

from __future__ import annotations

import argparse
import json
import operator
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.files.storage import reported, write_text

Pair = tuple[int, int]

OPERATORS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
COMMUTATIVE = {"+", "*"}


def all_problems(digits: int, symbol: str) -> list[Pair]:
    """Every pair of operands of so many digits; of a commutative operator the smaller operand first."""
    low, high = 10 ** (digits - 1), 10**digits
    return [(a, b) for a in range(low, high) for b in range(a if symbol in COMMUTATIVE else low, high)]


def split(problems: list[Pair], num_eval: int, sft_fraction: float, rng: random.Random) -> dict[str, list[Pair]]:
    """Problems dealt at random to ``eval``, ``sft`` and ``train``.

    Raises:
        ValueError: one of the three would be empty.
    """
    shuffled = rng.sample(problems, len(problems))
    rest = shuffled[num_eval:]
    num_sft = round(sft_fraction * len(rest))
    splits = {"sft": rest[:num_sft], "train": rest[num_sft:], "eval": shuffled[:num_eval]}
    for name, part in splits.items():
        if not part:
            raise ValueError(
                f"no problem is left for {name}.jsonl: there are {len(problems)}, --num-eval takes {num_eval}, "
                f"--sft-fraction {sft_fraction} of the others go to sft.jsonl"
            )
    return splits


def written(pairs: Iterable[Pair], symbol: str, both_orders: bool, rng: random.Random) -> list[Pair]:
    """Problems as they are asked, shuffled: those of a commutative operator in both orders, or in one at random."""
    asked = []
    for a, b in pairs:
        orders = [(a, b), (b, a)] if symbol in COMMUTATIVE and a != b else [(a, b)]
        asked += orders if both_orders else [rng.choice(orders)]
    rng.shuffle(asked)
    return asked


def row(a: int, b: int, symbol: str, name: str) -> dict[str, Any]:
    """One line of the file ``name``.jsonl."""
    answer = str(OPERATORS[symbol](a, b))
    question = {"role": "user", "content": f"{a}{symbol}{b}="}
    metadata: dict[str, Any] = {"operands": [a, b], "operator": symbol}
    if name == "sft":
        reply = {"role": "assistant", "content": f"\\boxed{{{answer}}}"}
        return {"messages": [question, reply], "metadata": metadata}
    if name == "eval":
        metadata["rm_type"] = "math"
    return {"prompt": [question], "label": answer, "metadata": metadata}


def check_disjoint(directory: Path) -> dict[str, int]:
    """Read the files back; rows of each.

    Raises:
        ValueError: a problem that is in two files, in whatever order of operands.
    """
    seen: dict[tuple[str, Pair], str] = {}
    counts: dict[str, int] = {}
    for name in ("sft", "train", "eval"):
        lines = (directory / f"{name}.jsonl").read_text().splitlines()
        counts[name] = len(lines)
        for line in lines:
            metadata = json.loads(line)["metadata"]
            a, b = metadata["operands"]
            symbol = metadata["operator"]
            problem = (symbol, (min(a, b), max(a, b)) if symbol in COMMUTATIVE else (a, b))
            if seen.setdefault(problem, name) != name:
                raise ValueError(f"{a}{symbol}{b} is in {seen[problem]}.jsonl and in {name}.jsonl")
    return counts


def write(options: argparse.Namespace) -> dict[str, int]:
    """Write the three files; rows of each. Raises ValueError as `split` does."""
    rng = random.Random(options.seed)
    problems = all_problems(options.digits, options.operator)
    splits = split(problems, options.num_eval, options.sft_fraction, rng)
    output = Path(options.output)
    for name, pairs in splits.items():
        asked = written(pairs, options.operator, name != "eval", rng)
        lines = [json.dumps(row(a, b, options.operator, name)) for a, b in asked]
        write_text("output", output / f"{name}.jsonl", "\n".join(lines) + "\n")
    return check_disjoint(output)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", help="directory to write; files of the same names are replaced")
    parser.add_argument("--operator", choices=sorted(OPERATORS), default="+", help="default: %(default)s")
    parser.add_argument(
        "--digits", type=int, choices=[1, 2, 3], default=2, help="of each operand; default: %(default)s"
    )
    parser.add_argument("--num-eval", type=int, default=512, help="problems held out; default: %(default)s")
    parser.add_argument(
        "--sft-fraction",
        type=float,
        default=0.5,
        help="of the other problems, those for sft.jsonl; default: %(default)s",
    )
    parser.add_argument("--seed", type=int, default=0, help="of splits and order; default: %(default)s")
    options = parser.parse_args(argv)
    if options.num_eval < 1:
        parser.error(f"--num-eval {options.num_eval} is not above 0")
    if not 0 < options.sft_fraction < 1:
        parser.error(f"--sft-fraction {options.sft_fraction} is not between 0 and 1")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    try:
        with reported("make_arithmetic_data.py"):
            counts = write(options)
    except ValueError as error:
        print(f"make_arithmetic_data.py: {error}", file=sys.stderr)
        return 2
    print(f"{options.output}: " + ", ".join(f"{name}.jsonl {count} rows" for name, count in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
