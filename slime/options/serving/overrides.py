"""SGLang's flags of some engines alone, by name in JSON or YAML: checked like ``--sglang-`` flags."""

from __future__ import annotations

import difflib
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from slime.options.errors import OptionError, naming
from slime.options.flags.parser import StrictParser
from slime.options.flags.sglang import PassThrough, command_line
from slime.options.rollout import RANKS
from slime.options.rules import check

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


def _value(words: list[str]) -> Any:
    """What `RANKS` compare: a number, or that a switch is there."""
    value = words[1] if len(words) > 1 else "True"
    return int(value) if value.isdecimal() else value
