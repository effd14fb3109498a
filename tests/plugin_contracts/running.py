"""Contract files as tests and as programs: which functions are checked, by which words, and how it is told."""

from __future__ import annotations

import functools
import logging
import os
import shlex
import shutil
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.data.rows.dataset import load_prompts, train_prompt_spec
from slime.options.checks.reward_rules import has_own_source
from slime.options.errors import OptionError
from slime.options.flags.parser import flag_values
from slime.utils.calls import CallError, form_of
from slime.utils.errors import SlimeError
from slime.utils.misc import find_function, split_function_path
from tests.plugin_contracts.contract import FIELDS, BrokenError, Contract, NotMeantError, Subject, report, run_check
from tests.plugin_contracts.engine import StandInEngine
from tests.plugin_contracts.setting import contract_args, contract_parser, directory

VARIABLE = "SLIME_CONTRACT_"
WORDS = VARIABLE + "ARGS"
"""Further words of the command line, for pytest."""
HELP = """\
usage: {prog} [FLAG PATH:FUNCTION ...] [further flags of slime ...]

Calls your function as slime does, in a small rollout on this computer: no GPU, no model, no Ray. Functions of slime
and its examples are checked where you name none.

{flags}
  --contract-answers TEXT ...
      what the stand-in for the model answers, in turn
  --contract-timeout SECONDS
      for each check (default 60)

Every flag of slime's own is taken, so that your function finds in `args` what it reads: --max-turns 3, --reward-key
score, --prompt-data my.jsonl, --hf-checkpoint DIR for its tokenizer, --custom-config-path my.yaml, and what
add_arguments(parser) in your file declares. With pytest, the path comes from {variable}<NAME>, such as
{example}, and further words from {words}.
"""


@dataclass(frozen=True)
class Case:
    """One check of one function; ``check`` None is that of its signature."""

    contract: Contract
    path: str
    check: Callable[[Subject], None] | None
    is_given: bool = False
    """Whether the words name the function."""

    def __str__(self) -> str:
        name = "signature" if self.check is None else self.check.__name__.removeprefix("check_")
        path = "given" if self.is_given else Path(self.path).name.replace(".py:", ":").rpartition(".")[2]
        return f"{self.contract.flag[2:]}-{path}-{name}"

    @property
    def title(self) -> str:
        """What is checked."""
        return "it can be called" if self.check is None else (self.check.__doc__ or "").strip().rstrip(".")

    @property
    def head(self) -> str:
        """What is checked of which function."""
        return f"{self.contract.flag} {self.path}: {self.title}"


def variable_of(flag: str) -> str:
    """The environment variable that names a function."""
    return VARIABLE + flag.removeprefix("--").replace("-", "_").upper()


def words_of(environ: Mapping[str, str]) -> list[str]:
    """The command line that the environment's variables make."""
    words = shlex.split(environ.get(WORDS, ""))
    for flag in FIELDS:
        if path := environ.get(variable_of(flag)):
            words += [flag, path]
    return words


def cases(contracts: Sequence[Contract], words: Sequence[str]) -> list[Case]:
    """The checks of the functions that the words name; without one, of slime's own."""
    named = dict(flag_values(words))
    given = [(contract, named[contract.flag]) for contract in contracts if contract.flag in named]
    pairs = given or [(contract, path) for contract in contracts for path in contract.own]
    return [Case(c, path, check, bool(given)) for c, path in pairs for check in (None, *c.checks)]


@functools.cache
def _engine() -> StandInEngine:
    return StandInEngine()


def prepared(case: Case, words: Sequence[str]) -> Subject:
    """A function and a fresh rollout to check it in.

    Raises:
        OptionError, SystemExit: as of `contract_args`.
        BadInputError: the prompts cannot be read as the words say.
    """
    own = [] if case.is_given else [case.contract.flag, case.path]
    args = contract_args([*words, *own], sys.argv[0])
    engine = _engine()
    engine.begin(args)
    engine.answers = tuple(args.contract_answers)
    path: Any = getattr(args, FIELDS[case.contract.flag].name)
    messages = False
    if args.prompt_data is not None and not has_own_source(args):  # what is wrong with the rows is not the function's
        messages = isinstance(load_prompts(train_prompt_spec(args))[0].prompt, list)
    return Subject(case.contract, path[-1] if isinstance(path, list) else path, args, engine, messages=messages)


def verdict(case: Case, words: Sequence[str]) -> tuple[str, str, list[str]]:
    """Run a case: ``ok``, ``skip`` or ``BROKEN``, what there is to say, and notes."""
    try:
        subject = prepared(case, words)
    except (OptionError, SlimeError) as error:
        return "BROKEN", _unprepared(case, error), []
    try:
        if case.check is not None:
            run_check(case.check, subject, subject.args.contract_timeout)
    except NotMeantError as reason:
        return "skip", str(reason), []
    except BaseException as error:
        return "BROKEN", report(subject, case.title, error), subject.notes
    return "ok", "", subject.notes


def _unprepared(case: Case, error: Exception) -> str:
    """What is wrong with a function that does not load or cannot be called; or with the other words."""
    flag, path = case.contract.flag, case.path
    names = FIELDS[flag].metadata["hook"]
    try:
        _, name = find_function(path, flag=flag, default_names=names)
        subject = Subject(case.contract, f"{split_function_path(path)[0]}:{name}", Namespace(), _engine())
        form_of(subject.function, case.contract.forms, "")
    except CallError as wrong:
        change = wrong.change or "take the parameters of a form that is expected; names before * are yours"
        return report(subject, Case(case.contract, path, None).title, BrokenError(wrong.problem, change))
    except SlimeError:
        pass
    return f"BROKEN  {error}"


def run_case(case: Case) -> None:
    """As a test, with the words of the environment; a broken contract fails it with nothing but the block."""
    import pytest

    outcome, text, _ = verdict(case, words_of(os.environ))
    if outcome == "BROKEN":
        pytest.fail(text, pytrace=False)
    if outcome == "skip":
        pytest.skip(text)


def main(contracts: Sequence[Contract], argv: Sequence[str] | None = None) -> None:
    """As a program: prints a line for each check, and ends with 0, or with 1 where a contract is broken."""
    typed = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(typed):
        print(_help(contracts), end="")
        return
    _check_words(contracts, typed)
    words = [*words_of(os.environ), *typed]
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    counts = {"ok": 0, "skip": 0, "BROKEN": 0}
    cannot_be_called: set[tuple[str, str]] = set()
    told: set[str] = set()
    logging.disable(logging.WARNING)  # slime's own words about what the blocks tell
    warnings.filterwarnings("ignore", module="megatron")
    for case in cases(contracts, words):
        if (case.contract.flag, case.path) in cannot_be_called:
            continue
        outcome, text, notes = verdict(case, words)
        counts[outcome] += 1
        if outcome == "BROKEN":
            # A function that fails does so in many checks: its block is enough.
            problem = text.partition("  problem:")[2] or text
            again = problem in told
            print(f"BROKEN  {case.head} (as above)" if again else text)
            told.add(problem)
            if case.check is None:
                cannot_be_called.add((case.contract.flag, case.path))
        else:
            print(f"{outcome:<8}{case.head}{f' ({text})' if text else ''}", flush=True)
        for note in notes:
            print(f"{'note':<8}{note}")
    print(f"{counts['ok']} checks kept, {counts['BROKEN']} broken, {counts['skip']} without a meaning here", flush=True)
    _leave(1 if counts["BROKEN"] else 0)


def _check_words(contracts: Sequence[Contract], words: Sequence[str]) -> None:
    """Tell early of a flag of another file."""
    mine = [contract.flag for contract in contracts]
    named = [flag for flag, _ in flag_values(words) if flag in FIELDS]
    if named and not set(named) & set(mine):
        parser = contract_parser(sys.argv[0])
        parser.error(f"{named[0]} has its contract in another file; this one checks {', '.join(mine)}")


def _help(contracts: Sequence[Contract]) -> str:
    flags = []
    for contract in contracts:
        flags.append(f"  {contract.flag} PATH:FUNCTION")
        flags += [f"      {call}" for call in contract.forms]
    example = variable_of(contracts[0].flag)
    return HELP.format(prog=sys.argv[0], flags="\n".join(flags), variable=VARIABLE, example=example, words=WORDS)


def _leave(code: int) -> None:
    """End the process at once: threads in which a function still hangs would keep it."""
    shutil.rmtree(directory(), ignore_errors=True)
    sys.stdout.flush()
    os._exit(code)
