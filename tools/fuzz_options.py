#!/usr/bin/env python3
"""Try random command lines of train.py: each must pass its dry run or be refused in one line.

    python tools/fuzz_options.py --cases 2000 --seed 7
    python tools/fuzz_options.py --seed 7 --only 123      # one case again, with all that it printed

A case is a small valid command line with one to six changes: a flag from the table of all options (slime's, Megatron's,
SGLang's, the router's, and those that are refused by name) with a value from the pool of its type or of another one, an
entry of a YAML file, a broken YAML file, or an environment variable. Numbers that cannot be meant (nan, inf, beyond 64
bits) must be refused wherever a flag takes a number. Exit status 1 if any case is at fault.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.entry.installation import check_installation

check_installation()

from slime.entry.arguments import GROUPS, assemble  # noqa: E402
from slime.options.eval_datasets import FIELDS  # noqa: E402
from slime.options.flags.parser import StrictParser  # noqa: E402
from slime.options.flags.schema import hook_fields  # noqa: E402
from slime.options.flags.unavailable import NOT_YET, REPLACED, WITHOUT_EFFECT  # noqa: E402
from slime.rollout.tokenizer import load_tokenizer  # noqa: E402
from tools import make_tiny_model  # noqa: E402
from tools.fuzzing.forked_dry_runs import OK, Outcome, dry_run  # noqa: E402
from tools.fuzzing.values import (  # noqa: E402
    BROKEN,
    ENVIRONMENT,
    FUNCTIONS,
    JSONS,
    NUMBERS,
    OWN,
    SHY,
    TEXTS,
    UNMEANT,
    YAML_VALUES,
)

BASE = (
    "--hf-checkpoint model --prompt-data data.jsonl --label-key label --num-rollout 3 --rollout-batch-size 4 "
    "--n-samples-per-prompt 4 --rollout-max-response-len 16 --rm-type math --actor-num-gpus-per-node 2 --fp32 "
    "--run-dir run"
)
PLACEMENTS = (
    "--colocate",
    "--rollout-num-gpus 2",
    "--rollout-num-gpus 2 --async",
    "--debug-rollout-only --rollout-num-gpus 2",
)


@dataclasses.dataclass(frozen=True)
class Change:
    """One change of a case: words to append, a file to write before, or an environment variable to set."""

    words: tuple[str, ...] = ()
    file: tuple[str, bytes] | None = None
    variable: tuple[str, str] | None = None
    unmeant: bool = False
    """Whether its number must be refused."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A command line and what it finds around it."""

    base: tuple[str, ...]
    changes: tuple[Change, ...]

    @property
    def words(self) -> list[str]:
        """Its words."""
        return [*self.base, *(word for change in self.changes for word in change.words)]


def prepare(directory: Path) -> None:
    """Write what command lines name: a tiny model, prompts, modules, and things that are none of these."""
    with contextlib.redirect_stdout(None):
        make_tiny_model.main([str(directory / "model"), "--num-layers", "2", "--hidden-size", "32"])
    load_tokenizer(str(directory / "model"))  # here, so that no case imports what it takes
    (directory / "data.jsonl").write_text('{"input": "1+1", "label": "2"}\n' * 5)
    (directory / "own.py").write_text(OWN)
    (directory / "shy.py").write_text(SHY)
    (directory / "bad.py").write_bytes(b"\xff def f(")
    (directory / "exits.py").write_text("import sys; sys.exit(3)")
    (directory / "broken.yaml").write_bytes(b"\xff")
    (directory / "dir.py").mkdir()
    os.mkfifo(directory / "fifo")


class Cases:
    """Random cases by seed and number."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        parser = StrictParser()
        assemble(parser)
        self._actions = [a for a in parser._actions if a.dest not in ("help", "dry_run")]
        self._functions = {field.name for field in hook_fields(GROUPS)}
        absent = [flag for names in NOT_YET.values() for flag in names.split()]
        self._absent = [*REPLACED, *WITHOUT_EFFECT, *absent, "--no-such-flag", "--lr-", "-x", "stray", "--"]

    def __getitem__(self, number: int) -> Case:
        rng = random.Random(f"{self._seed} {number}")
        base = (*BASE.split(), *rng.choice(PLACEMENTS).split())
        return Case(base, tuple(self._change(rng, number, place) for place in range(rng.choice((1, 1, 1, 2, 3, 6)))))

    def _change(self, rng: random.Random, number: int, place: int) -> Change:
        what = rng.random()
        if what < 0.78:
            return self._flag(rng)
        if what < 0.90:
            return self._yaml(rng, f"{number}_{place}.yaml")
        if what < 0.94:
            name = rng.choice(list(ENVIRONMENT))
            return Change(variable=(name, rng.choice(ENVIRONMENT[name])))
        return Change((rng.choice(self._absent), *rng.choice(((), ("x",)))))

    def _flag(self, rng: random.Random) -> Change:
        # Half of the time one of slime's own: there are five times as many of the others.
        own = [a for a in self._actions if not a.dest.startswith(("sglang_", "router_"))]
        action = rng.choice(own if rng.random() < 0.7 else self._actions)
        flag = rng.choice(action.option_strings)
        if action.nargs == 0:
            return Change((flag,))
        pool, is_number = self._pool(rng, action)
        count = 1 if action.nargs in (None, "?") else rng.choice((0, 1, 2, 3))
        values = [rng.choice(pool) for _ in range(count)]
        unmeant = any(value in UNMEANT[: 4 if is_number == "float" else None] for value in values if is_number)
        joined = len(values) == 1 and (rng.random() < 0.5 or values[0].startswith("-"))
        return Change((f"{flag}={values[0]}",) if joined else (flag, *values), unmeant=unmeant)

    def _pool(self, rng: random.Random, action: argparse.Action) -> tuple[Sequence[str], str]:
        """Values for a flag, and which numbers it takes, if any."""
        kind = getattr(getattr(action, "convert", None), "__name__", None) or getattr(action.type, "__name__", "str")
        is_number = kind if kind in ("int", "float", "_integer", "positive", "_human_int") else ""
        if rng.random() < 0.1:
            return rng.choice((NUMBERS, TEXTS, FUNCTIONS, JSONS)), is_number
        if action.dest in self._functions:
            return FUNCTIONS, ""
        if action.choices is not None:
            return [*map(str, action.choices), *TEXTS[:4]], ""
        if is_number:
            return NUMBERS, is_number
        return (JSONS if kind in ("json_object", "loads", "json_value") else TEXTS), ""

    def _yaml(self, rng: random.Random, name: str) -> Change:
        if rng.random() < 0.5:
            flag = "--custom-config-path"
            chosen = rng.choices(self._actions, k=rng.choice((1, 1, 2, 4)))
            text = "".join(f"{action.dest}: {rng.choice(YAML_VALUES)}\n" for action in chosen)
        else:
            flag = "--eval-config"
            keys = rng.choices([key for key in FIELDS if key not in ("name", "path")], k=2)
            pairs = "".join(f"    {key}: {rng.choice(YAML_VALUES)}\n" for key in dict.fromkeys(keys))
            text = f"datasets:\n  a:\n    path: {rng.choice(('data.jsonl', *YAML_VALUES))}\n{pairs}"
        data = rng.choice(BROKEN) if rng.random() < 0.25 else text.encode()
        words = (flag, name) if flag == "--custom-config-path" else (flag, name, "--eval-interval", "1")
        return Change(words, file=(name, data))


def outcome(case: Case, directory: Path, deadline: int) -> Outcome:
    """What becomes of a case; a number that cannot be meant and is taken is a fault."""
    changed = [change.variable for change in case.changes if change.variable]
    for change in case.changes:
        if change.file:
            (directory / change.file[0]).write_bytes(change.file[1])
    before = dict(os.environ)
    try:
        os.environ.update({"HF_HUB_OFFLINE": "1"} | dict(changed))
        words = case.words
        found = dry_run(
            [word for word in words if word != "--async"], directory, asynchronous="--async" in words, deadline=deadline
        )
    finally:
        os.environ.clear()
        os.environ.update(before)
    if found.kind == OK and any(change.unmeant for change in case.changes):
        return Outcome("took a number that cannot be meant", found.text)
    return found


def smallest(case: Case, fault: Outcome, directory: Path, deadline: int) -> Case:
    """The case without the changes that its fault does not need."""
    for change in case.changes:
        fewer = dataclasses.replace(case, changes=tuple(each for each in case.changes if each is not change))
        if fewer.changes and outcome(fewer, directory, deadline).kind == fault.kind:
            case = fewer
    return case


def faults(
    seed: int, numbers: Iterator[int] | Sequence[int], directory: Path, deadline: int
) -> Iterator[tuple[int, Case, Outcome]]:
    """The cases at fault, as small as they get, with their numbers."""
    cases = Cases(seed)
    for number in numbers:
        found = outcome(cases[number], directory, deadline)
        if found.is_fault:
            yield number, smallest(cases[number], found, directory, deadline), found


def main(argv: list[str] | None = None) -> int:
    """Command line of the tool; 1 if a case is at fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", type=int, default=200, help="How many; default 200.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the cases.")
    parser.add_argument("--only", type=int, help="This case alone, with what it prints.")
    parser.add_argument("--deadline", type=int, default=30, help="Seconds that one may take.")
    args = parser.parse_args(argv)
    started, count = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="fuzz-options-") as name:
        directory = Path(name)
        prepare(directory)
        if args.only is not None:
            case = Cases(args.seed)[args.only]
            found = outcome(case, directory, args.deadline)
            print(*map(repr, case.changes), found.text, found.kind, sep="\n")
            return int(found.is_fault)
        for number, case, found in faults(args.seed, range(args.cases), directory, args.deadline):
            count += 1
            shown = [repr(change)[:300] for change in case.changes]
            print(f"case {number}: {found.kind}", *shown, sep="\n    ", flush=True)
    print(f"{args.cases} cases of seed {args.seed}: {count} at fault, {time.monotonic() - started:.0f} s")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
