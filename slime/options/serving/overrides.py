"""SGLang's flags of some engines alone, by name in JSON or YAML: checked like ``--sglang-`` flags."""

from __future__ import annotations

import difflib
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slime.options.errors import OptionError, naming
from slime.options.flags.parser import StrictParser
from slime.options.flags.sglang import PassThrough, command_line
from slime.options.rollout import RANKS
from slime.options.rules import Rule, broken, check

_WORDS = "sglang_words"


def engine_flags(
    parser: StrictParser,
    values: Mapping[str, Any] | None,
    where: str,
    common: Mapping[str, list[str]] | None = None,
) -> list[str]:
    """The words of an SGLang command line that ``values`` mean, after those of ``common`` (by attribute, as the parser
    gathers them) that they do not replace; or OptionError, which begins with ``where``."""
    actions = (a for a in parser._actions if isinstance(a, PassThrough) and a.words == _WORDS)
    known = {action.dest.removeprefix("sglang_") for action in actions}
    settings = Namespace()
    for key, value in (values or {}).items():
        name = str(key).lstrip("-").replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            raise OptionError(
                f"{where}: {key!r} is not a flag of the installed SGLang, or one that slime decides"
                + (f"; did you mean {' or '.join(near)}?" if near else "")
            )
        with naming(f"{where}:"):
            parser.set_entry(f"sglang_{name}", value, settings)
    own = vars(settings)
    kept = {name: words for name, words in (common or {}).items() if name not in own}
    passed = {name: _value(words) for name, words in kept.items()}
    try:
        check(Namespace(**passed | own), RANKS)
    except OptionError as error:
        raise OptionError(f"{where}: {str(error).replace('--sglang-', '')}") from error
    return command_line(kept | own.get(_WORDS, {}))


def check_engines(args: Namespace, table: tuple[Rule, ...], engines: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Hold each of these engines, of which the words of its command line are given after where they are from, against
    rules of ``sglang_`` options; OptionError with all sentences, each after where it is from."""
    given = _settings(args.sglang_cli)
    of_run = {name: value for name, value in vars(args).items() if name not in given}
    each = ((where, Namespace(**of_run | _settings(words))) for where, words in engines)
    if wrong := [f"{where}: {sentence}" for where, settings in each for sentence in broken(settings, table)]:
        raise OptionError("; ".join(wrong))


def _settings(words: Sequence[str]) -> dict[str, Any]:
    """What the words of a command line set, by attribute of the run's options."""
    given: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            given.append([])
        given[-1].append(word)
    return {f"sglang_{flag[0].removeprefix('--').replace('-', '_')}": _value(flag) for flag in given}


def _value(words: list[str]) -> Any:
    """What rules compare: a number, or that a switch is there."""
    if len(words) == 1:
        return True
    return int(words[1]) if words[1].isdecimal() else words[1]
