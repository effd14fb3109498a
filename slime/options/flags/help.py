"""``--help``: the flags most used, and all; one group; or one flag."""

from __future__ import annotations

import argparse
import copy
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from slime.options.flags.unavailable import explain_flag

MOST_USED = (
    *("--hf-checkpoint", "--prompt-data", "--input-key", "--label-key", "--apply-chat-template"),
    *("--rm-type", "--custom-rm-path", "--custom-generate-function-path"),
    *("--colocate", "--actor-num-gpus-per-node", "--num-rollout", "--rollout-batch-size", "--n-samples-per-prompt"),
    *("--rollout-max-response-len", "--advantage-estimator", "--lr", "--save", "--load", "--dry-run"),
)
"""Flags that most runs set, in the order in which ``--help`` shows them above all others."""

_MORE = """The flags that most runs set come first, then all of slime's own by group. `--help GROUP` shows one group of
{groups}; `--help --FLAG` one flag; {sections} have groups of their own, and `--help all` shows everything."""


def join_help(argv: Sequence[str]) -> list[str]:
    """An argument list in which the flag that follows ``--help`` is what help is wanted on."""
    words = list(argv)
    for at, word in enumerate(words[:-1]):
        if word in ("-h", "--help") and words[at + 1].startswith("--"):
            return [*words[:at], f"--help={words[at + 1].partition('=')[0]}", *words[at + 2 :]]
    return words


class HelpAction(argparse.Action):
    """``--help`` alone shows slime's own groups; with ``rollout``, ``--lr``, ``megatron`` or ``all`` what they name."""

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        sections: Mapping[str, str],
        most_used: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        """``sections``: by the word that shows them, how titles of groups begin that ``--help`` alone leaves out."""
        super().__init__(option_strings, dest, nargs="?", default=argparse.SUPPRESS, **kwargs)
        self.sections = sections
        self.most_used = most_used

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """Print what is asked for and exit with status 0; with 2 where there is no such group or flag."""
        formatter_class: Any = parser.formatter_class
        formatter: argparse.HelpFormatter = formatter_class(parser.prog, max_help_position=36, width=120)
        if values is not None and values.startswith("--"):
            self._add_flag(parser, formatter, values)
        else:
            self._add_groups(parser, formatter, values)
        try:
            print(formatter.format_help(), end="", flush=True)
        except BrokenPipeError:  # `--help | head`: nor must the interpreter flush what is left
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        parser.exit()

    def _add_groups(self, parser: Any, formatter: argparse.HelpFormatter, word: str | None) -> None:
        groups = [group for group in parser._action_groups if group._group_actions]
        others = tuple(self.sections.values())
        own = [group for group in groups if not (group.title or "").startswith(others)]
        names = ", ".join(_name(group) for group in own if _name(group) != "options")
        named = groups if word == "all" else own if word is None else [g for g in groups if _is_called(g, word)]
        if not named:
            known = ", ".join([names, *self.sections])
            parser.error(f"--help {word}: there are the groups {known}; all; and --help --FLAG for one flag")
        if word is None or word == "all":
            formatter.add_text(parser.description)
        if word is None and self.most_used:
            formatter.add_text(_MORE.format(groups=names, sections=", ".join(self.sections)))
            formatter.start_section("Most used")
            formatter.add_arguments([_in_short(parser._option_string_actions[flag]) for flag in self.most_used])
            formatter.end_section()
        for group in named:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        if word is None or word == "all":
            formatter.add_text(parser.epilog)

    def _add_flag(self, parser: Any, formatter: argparse.HelpFormatter, flag: str) -> None:
        action = parser._option_string_actions.get(flag)
        if action is None:
            parser.error(f"--help {flag}: {explain_flag(flag) or parser.explain_unknown(flag)}")
        group = next(group for group in parser._action_groups if action in group._group_actions)
        formatter.start_section(group.title)
        formatter.add_argument(action)
        formatter.end_section()
        if "default" not in (action.help or "").lower():
            value = parser.default_values.get(action.dest)
            told = "not set" if value in (None, "") else "off" if value is False else value
            formatter.add_text(f"Default: {told}.")


def _in_short(action: argparse.Action) -> argparse.Action:
    shown = copy.copy(action)
    shown.option_strings = action.option_strings[:1]
    shown.help = re.split(r"[.;:](?:\s|$)|\s\(", action.help or "")[0] + "."
    return shown


def _name(group: Any) -> str:
    """The word for a group on the command line: its title up to the colon."""
    return "-".join(re.findall(r"[a-z0-9]+", (group.title or "").partition(":")[0].lower()))


def _is_called(group: Any, word: str) -> bool:
    parts = _name(group).split("-")
    wanted = re.findall(r"[a-z0-9]+", word.lower())
    return bool(wanted) and all(any(part.startswith(each) for part in parts) for each in wanted)
