"""One strict argparse parser: no abbreviations, every unknown flag an error, and a record of what the user set."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from slime.options.schema import flag_named
from slime.options.unavailable import explain_flag, explain_value, unavailable_flags


class StrictParser(argparse.ArgumentParser):
    """A parser whose errors are one line and exit with status 2.

    Values are parsed apart from defaults: `parse_set` returns only what its argument list sets, `defaults` the rest.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, add_help=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")

    def actions_by_dest(self) -> dict[str, list[argparse.Action]]:
        """The flags that set each attribute."""
        found: dict[str, list[argparse.Action]] = {}
        for action in self._actions:
            found.setdefault(action.dest, []).append(action)
        return found

    def split_defaults(self) -> dict[str, Any]:
        """Take the defaults out of the flags, so that parsing sets only what it is given, and return them."""
        defaults: dict[str, Any] = {}
        for action in self._actions:
            if action.default is argparse.SUPPRESS or action.dest == "help":
                continue
            value = self._get_value(action, action.default) if isinstance(action.default, str) else action.default
            if defaults.get(action.dest) is None:
                defaults[action.dest] = value
            shown = action.nargs != 0 and value not in (None, False, [], {}) and value != ""
            if action.help and shown and "default" not in action.help.lower():
                action.help = f"{action.help.rstrip('.')} (default {value})."
            action.default = argparse.SUPPRESS
        return defaults

    def parse_set(self, argv: Sequence[str]) -> dict[str, Any]:
        """What ``argv`` sets, by attribute; later duplicates win.

        Flags that do not exist, or not yet, are all named in one error line with the nearest names.
        """
        flags = [token.split("=", 1)[0] for token in argv if token.startswith("--")]
        problems = [reason for flag in flags if (reason := explain_flag(flag))]
        problems += [reason for pair in flag_values(argv) if (reason := explain_value(*pair))]
        if problems:
            self.error("; ".join(dict.fromkeys(problems)))
        namespace, extra = self.parse_known_args(list(argv), argparse.Namespace())
        if extra:
            self.error("; ".join(self._explain_extra(argv, extra)))
        return vars(namespace)

    def _explain_extra(self, argv: Sequence[str], extra: Sequence[str]) -> list[str]:
        unknown = list(dict.fromkeys(token.split("=", 1)[0] for token in extra if token.startswith("--")))
        if unknown:
            known = [*self._option_string_actions, *unavailable_flags()]
            return [f"unknown flag {flag}{self._nearest(flag, known)}" for flag in unknown]
        before = argv[list(argv).index(extra[0]) - 1] if extra[0] in argv[1:] else None
        return [f"unexpected argument {extra[0]!r}" + (f" after {before}" if before else "")]

    def _nearest(self, flag: str, known: Sequence[str]) -> str:
        scores = {name: difflib.SequenceMatcher(None, flag.replace("_", "-"), name).ratio() for name in known}
        best = max(scores.values())
        close = [name for name, score in scores.items() if score >= max(best - 0.02, 0.75)][:3]
        return f"; did you mean {' or '.join(close)}?" if close else ""

    def tokens_of(self, key: str, value: Any) -> list[str] | None:
        """The command-line form of a YAML entry, or None where no flag has that attribute.

        Raises:
            ValueError: a flag without a value was given one, or the other way round.
        """
        by_flag = self._option_string_actions.get(flag_named(key))
        actions = self.actions_by_dest().get(key) or ([by_flag] if by_flag else None)
        if actions is None or value is None:
            return None
        switches = [action for action in actions if action.nargs == 0]
        flag = actions[0].option_strings[0]
        if switches:
            matching = [action for action in switches if action.const == value]
            if not isinstance(value, bool) and not matching:
                raise ValueError(f"{key}: {value!r} is neither true nor false")
            return [matching[0].option_strings[0]] if matching else None
        if isinstance(value, bool):
            raise ValueError(f"{key}: {flag} takes a value, not {value!r}")
        if isinstance(value, Mapping):
            return None
        values = [str(v) for v in value] if isinstance(value, (list, tuple)) else [str(value)]
        return [flag, *values] if len(values) != 1 else [f"{flag}={values[0]}"]


def flag_values(argv: Sequence[str]) -> list[tuple[str, str]]:
    """Every (flag, first value) of an argument list, written ``--flag value`` or ``--flag=value``."""
    pairs = []
    for position, token in enumerate(argv):
        flag, equals, value = token.partition("=")
        if flag.startswith("--"):
            pairs.append((flag, value if equals else "".join(argv[position + 1 : position + 2])))
    return pairs


class HelpAction(argparse.Action):
    """``--help`` shows slime's own groups, ``--help megatron`` and the like one more, ``--help all`` everything."""

    def __init__(self, option_strings: Sequence[str], dest: str, sections: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs="?", default=argparse.SUPPRESS, **kwargs)
        self.sections = sections

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        """Print the chosen sections and exit with status 0."""
        if values not in (None, "all", *self.sections):
            parser.error(f"--help {values}: there are {', '.join(self.sections)} and all")
        formatter_class: Any = parser.formatter_class
        formatter: argparse.HelpFormatter = formatter_class(parser.prog, max_help_position=36, width=120)
        formatter.add_text(parser.description)
        for group in parser._action_groups:
            section = next((s for s, prefix in self.sections.items() if (group.title or "").startswith(prefix)), None)
            if group._group_actions and (values == "all" or section == values):
                formatter.start_section(group.title)
                formatter.add_text(group.description)
                formatter.add_arguments(group._group_actions)
                formatter.end_section()
        formatter.add_text(parser.epilog)
        try:
            print(formatter.format_help(), end="", flush=True)
        except BrokenPipeError:  # `--help | head`: nor must the interpreter flush what is left
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        parser.exit()
