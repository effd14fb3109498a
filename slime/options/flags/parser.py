"""One strict argparse parser: no abbreviations, every unknown flag an error, and a record of what the user set."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from slime.options.flags.help import join_help
from slime.options.flags.schema import flag_named
from slime.options.flags.sglang import PassThrough
from slime.options.flags.unavailable import explain_flag, explain_value
from slime.options.flags.values import problem_of, shortened

HOOK_GROUP = "Hook "
"""What titles of groups begin with that users' hooks add flags to."""
_SINGLE = (None, argparse.OPTIONAL)
"""``nargs`` of a flag with one value."""
_NAMES_ELSEWHERE = {
    "--learning-rate": "did you mean --lr?",
    "--max-restarts": "it is launch's, of scripts/launch.sh: `launch train.py --max-restarts N ...`, or MAX_RESTARTS=N",
}
"""Flags of other programs that no likeness of names leads from, and what is meant here."""


class StrictParser(argparse.ArgumentParser):
    """A parser whose errors are one line and exit with status 2.

    Values are parsed apart from defaults: `parse_set` returns only what its argument list sets, `defaults` the rest.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, add_help=False, **kwargs)
        self._required: list[list[argparse.Action]] = []
        self.default_values: dict[str, Any] = {}
        self.unavailable: list[str] = []
        """Why flags that `parse_set` put off are not available: every later error begins with it."""

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with status 2."""
        message = "; ".join(part for part in (*self.unavailable, message) if part)
        self.exit(2, f"{self.prog}: error: {shortened(' '.join(message.split()))}\n")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """One word as what its flag takes: numbers that mean nothing are refused, but for flags of a user's own."""
        if problem := problem_of(arg_string):
            raise argparse.ArgumentError(action, problem)
        try:
            value = super()._get_value(action, arg_string)
        except (OverflowError, RecursionError) as error:
            raise argparse.ArgumentError(action, f"invalid value: {arg_string!r}") from error
        if not self._is_users(action) and (problem := problem_of(value)):
            raise argparse.ArgumentError(action, problem)
        return value

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """The words of a flag as its value; ``--flag=--`` is two dashes, which argparse would take for no word."""
        with self._users_code(action):
            if not (action.option_strings and arg_strings == ["--"]):
                return super()._get_values(action, arg_strings)
            value = self._get_value(action, "--")
            self._check_value(action, value)
            return value if action.nargs in _SINGLE else [value]

    @contextlib.contextmanager
    def _users_code(self, action: argparse.Action) -> Iterator[None]:
        """Within the block a flag's type and choices are asked, which of a user's flag may raise anything."""
        try:
            yield
        except argparse.ArgumentError:
            raise
        except Exception as error:
            if not self._is_users(action):
                raise
            reason = f"its type or choices raised {type(error).__name__}: {error}"
            raise argparse.ArgumentError(action, reason) from error

    def _is_users(self, action: argparse.Action) -> bool:
        return (getattr(getattr(action, "container", None), "title", None) or "").startswith(HOOK_GROUP)

    def actions_by_dest(self) -> dict[str, list[argparse.Action]]:
        """The flags that set each attribute."""
        found: dict[str, list[argparse.Action]] = {}
        for action in self._actions:
            found.setdefault(action.dest, []).append(action)
        return found

    def split_defaults(self) -> dict[str, Any]:
        """Take the defaults out of the flags, so that parsing sets only what it is given, and return them.

        What is required is noted for `check_required`, since an argument list is not all that may set it.
        """
        defaults: dict[str, Any] = {}
        self._required = [group._group_actions for group in self._mutually_exclusive_groups if group.required]
        self._required += [[action] for action in self._actions if action.required]
        for group in self._mutually_exclusive_groups:
            group.required = False
        for action in self._actions:
            action.required = False
            if action.default is argparse.SUPPRESS or action.dest == "help":
                continue
            value = self._default_of(action)
            if defaults.get(action.dest) is None:
                defaults[action.dest] = value
            shown = action.nargs != 0 and not (value is None or value is False or value in ([], {}, ""))
            if action.help and shown and "default" not in action.help.lower():
                default = str(value).replace("%", "%%")
                action.help = f"{action.help.rstrip('.')} (default {default})."
            action.default = argparse.SUPPRESS
        self.default_values = defaults
        return defaults

    def _default_of(self, action: argparse.Action) -> Any:
        if not isinstance(action.default, str):
            return action.default
        try:
            with self._users_code(action):
                return self._get_value(action, action.default)
        except argparse.ArgumentError as error:
            self.error(str(error))

    def check_required(self, given: Collection[str]) -> None:
        """Name in one error line what is required, one flag or one of several, and sets none of these attributes."""
        missing = [actions for actions in self._required if not any(action.dest in given for action in actions)]
        names = [" or ".join("/".join(a.option_strings) or a.dest for a in actions) for actions in missing]
        if names:
            self.error("; ".join(f"{name} is missing" for name in names))

    def parse_set(self, argv: Sequence[str], *, put_off: bool = False) -> dict[str, Any]:
        """What ``argv`` sets, by attribute; later duplicates win.

        Flags that do not exist, or not yet, are all named in one error line with the nearest names; with ``put_off``
        those of upstream that are not available are only noted, in ``unavailable``.
        """
        argv = join_help(argv)
        flags = [token.split("=", 1)[0] for token in argv if token.startswith("--")]
        problems = [reason for flag in flags if (reason := explain_flag(flag))]
        problems += [reason for pair in flag_values(argv) if (reason := explain_value(*pair))]
        if problems and not put_off:
            self.error("; ".join(dict.fromkeys(problems)))
        if problems:
            self.unavailable = list(dict.fromkeys(problems))
            uses = [(flag, words) for flag, words in flag_words(argv) if explain_flag(flag) is None]
            kept = [(flag, words) for flag, words in uses if not (words and explain_value(flag, words[0]))]
            argv = [word for flag, words in kept for word in (flag, *words)]
        namespace, extra = self.parse_known_args(argv, argparse.Namespace())
        if extra:
            self.error("; ".join(self._explain_extra(argv, extra)))
        return vars(namespace)

    def _explain_extra(self, argv: Sequence[str], extra: Sequence[str]) -> list[str]:
        unknown = list(dict.fromkeys(token.split("=", 1)[0] for token in extra if token.startswith("--")))
        if unknown:
            return [self.explain_unknown(flag) for flag in unknown]
        before = argv[list(argv).index(extra[0]) - 1] if extra[0] in argv[1:] else None
        return [f"unexpected argument {extra[0]!r}" + (f" after {before}" if before else "")]

    def explain_unknown(self, flag: str) -> str:
        """The sentence of an error about a flag that there is not."""
        if flag in _NAMES_ELSEWHERE:
            return f"unknown flag {flag}; {_NAMES_ELSEWHERE[flag]}"
        return f"unknown flag {flag}{self.nearest(flag)}"

    def nearest(self, flag: str, similarity: float = 0.75) -> str:
        """The question of what was meant, or nothing where no flag has a name of such similarity."""
        known, written = self._option_string_actions, flag.replace("_", "-")
        scores = {name: difflib.SequenceMatcher(None, written, name).ratio() for name in known}
        best = max(scores.values())
        close = [name for name, score in scores.items() if score >= max(best - 0.02, similarity)][:3]
        return f"; did you mean {' or '.join(close)}?" if close else ""

    def has(self, key: str) -> bool:
        """Whether a flag is named like an entry of YAML or JSON, or sets the attribute of that name."""
        return self._action_of(key) is not None

    def _action_of(self, key: str) -> argparse.Action | None:
        by_name = self._option_string_actions.get(flag_named(key))
        return by_name or next((action for action in self._actions if action.dest == key), None)

    def set_entry(self, key: str, value: Any, namespace: argparse.Namespace) -> None:
        """Set what an entry of YAML or JSON means by its flag's types and checks (ValueError), or as it is without a
        flag."""
        action = self._action_of(key)
        if action is None or value is None:
            setattr(namespace, key, value)
        elif action.nargs == 0:
            self._set_switch(action, key, value, namespace)
        elif isinstance(value, bool) and action.const is not None:  # a flag that may stand without a word
            setattr(namespace, action.dest, action.const if value else None)
        elif isinstance(value, bool):
            raise ValueError(f"{key}: {action.option_strings[0]} takes a value, not {value!r}")
        else:
            for texts in _texts(action, key, value):
                self._use(action, action.option_strings[0], texts, namespace)

    def _set_switch(self, action: argparse.Action, key: str, value: Any, namespace: argparse.Namespace) -> None:
        """A switch by its own name (``fp32: true``), or by what it and its like set (``precision: float32``)."""
        flag, dest = flag_named(key), action.dest
        named = flag in action.option_strings
        if named and value is True:
            self._use(action, flag, [], namespace)
            return
        if named and value is False and isinstance(action.const, bool):
            value = not action.const
        elif key != dest:
            raise ValueError(f"{key}: {value!r} is not true, all that {flag} can say: leave it out, or set {dest}")
        switches = [each for each in self.actions_by_dest()[dest] if each.nargs == 0]
        same = next((each for each in switches if each.const == value), None)
        kinds = [each.const for each in switches]
        if same is not None:
            self._use(same, same.option_strings[0], [], namespace)
        elif not all(const in (True, False, None) for const in kinds):
            raise ValueError(f"{key}: {value!r} is not one of {', '.join(map(str, kinds))}")
        elif not isinstance(value, bool):
            raise ValueError(f"{key}: {value!r} is neither true nor false")
        else:
            setattr(namespace, dest, value)

    def _use(self, action: argparse.Action, flag: str, texts: list[str], namespace: argparse.Namespace) -> None:
        """What ``flag`` and its words do on a command line; here a word may begin with a dash."""
        reason = explain_value(flag, texts[0]) if texts else None
        if reason is not None:
            raise ValueError(reason)
        try:
            if self._match_argument(action, "A" * len(texts)) != len(texts):
                raise argparse.ArgumentError(action, f"expected {action.nargs} values, not {len(texts)}")
            with self._users_code(action):
                values = [self._get_value(action, text) for text in texts]
                for each in values:
                    self._check_value(action, each)
            action(self, namespace, values[0] if action.nargs in _SINGLE else values, flag)
        except argparse.ArgumentError as error:
            raise ValueError(str(error)) from error


def _texts(action: argparse.Action, key: str, value: Any) -> list[list[str]]:
    """The words of each use of a flag that stand for a value, as JSON where one word means a list; or ValueError."""
    if isinstance(value, list) and isinstance(action, argparse._AppendAction):  # every use adds a list, or one value
        one_each = action.nargs is None or any(isinstance(each, list) for each in value)
        uses = [each if isinstance(each, list) else [each] for each in value] if one_each else [value]
        return [[_text(each) for each in use] for use in uses]
    if isinstance(value, list) and action.nargs not in _SINGLE:
        return [[_text(each) for each in value]]
    keeps_text = getattr(action.type, "__name__", "str") == "str" and not isinstance(action, PassThrough)
    if isinstance(value, (list, Mapping)) and keeps_text:
        raise ValueError(f"{key}: {action.option_strings[0]} does not take {value!r}")
    return [[_text(value)]]


def _text(value: Any) -> str:
    return json.dumps(value, default=str) if isinstance(value, (list, Mapping)) else str(value)


def flag_words(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Every (flag, words up to the next flag) of an argument list, written ``--flag word word`` or ``--flag=word``."""
    uses: list[tuple[str, list[str]]] = []
    for token in argv:
        flag, equals, word = token.partition("=")
        if flag.startswith("--"):
            uses.append((flag, [word] if equals else []))
        elif uses:
            uses[-1][1].append(token)
    return uses


def flag_values(argv: Sequence[str]) -> list[tuple[str, str]]:
    """Every (flag, first value) of an argument list."""
    return [(flag, words[0] if words else "") for flag, words in flag_words(argv)]
