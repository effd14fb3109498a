"""Rules between options, as tables: of a row follow both the check and its one line, with values or in plain English.

A row names options by terms: ``use_tis`` (set: not None, False, 0 or empty), ``!use_tis`` (not set), ``loss_type=a|b``,
``loss_type!=a``, ``kl_coef>0``. Of several terms, divided by blanks, each counts alone.
"""

from __future__ import annotations

import functools
import operator
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from slime.options.errors import OptionError
from slime.options.schema import flag_named

_TERM = re.compile(r"(!?)(\w+)(?:(!=|=|>)(.*))?")
_NAMES = {
    "placement=colocate": "--colocate",
    "placement=rollout_only": "--debug-rollout-only",
    "placement=train_only": "--debug-train-only",
    "asynchronous": "train_async.py",
}
"""Terms of what is no flag by itself."""
_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "is above": operator.gt,
    "is more than": operator.gt,
    "is less than": operator.lt,
    "is no multiple of": lambda amount, size: amount % size != 0,
}
_WITHOUT = ("needs", "has no effect without")
"""Forms that refuse an option where none of the others holds; any further form does where one of them does."""


@dataclass(frozen=True)
class Rule:
    """What does not go together.

    ``options`` and ``others`` are terms, or, in a form of `_COMPARED`, the names of two numbers. Without ``others`` the
    options are refused by themselves, and ``form`` says why. All terms of ``when`` must hold, or the row says nothing.
    """

    options: str
    form: str
    others: str = ""
    why: str = ""
    when: str = ""

    def __str__(self) -> str:
        options = " or ".join(_term(text).shown() for text in self.options.split())
        only = " and ".join("no " * text.startswith("!") + _term(text).shown() for text in self.when.split())
        return (f"With {only}: " if only else "") + self._sentence(options, None)

    def broken(self, args: Namespace) -> Iterator[str]:
        """The sentence of every option that breaks the rule."""
        if not all(_term(text).holds(args) for text in self.when.split()):
            return
        for text in self.options.split():
            if self._refuses(text, args):
                yield self._sentence(_term(text).shown(args, self.form in _COMPARED), args)

    def _refuses(self, text: str, args: Namespace) -> bool:
        if compare := _COMPARED.get(self.form):
            values = getattr(args, text, None), getattr(args, self.others, None)
            return None not in values and compare(*values)
        held = [_term(other).holds(args) for other in self.others.split()]
        return _term(text).holds(args) and (not held or any(held) != (self.form in _WITHOUT))

    def _sentence(self, options: str, args: Namespace | None) -> str:
        terms = [_term(text) for text in self.others.split()]
        if args is not None and self.form not in _WITHOUT and self.form not in _COMPARED:
            terms = [term for term in terms if term.holds(args)][:1]
        shown = [term.shown(args, self.form in _COMPARED) for term in terms]
        others = " or ".join(filter(None, (", ".join(shown[:-1]), *shown[-1:])))
        return " ".join(filter(None, (options, self.form, others))) + self.why


@dataclass(frozen=True)
class _Term:
    """One option in a state."""

    text: str
    negated: bool
    name: str
    sign: str
    values: list[str]

    def holds(self, args: Namespace) -> bool:
        value = getattr(args, self.name, None)
        if self.sign == ">":
            return value is not None and value > float(self.values[0])
        if self.sign:
            return (str(value) in self.values) == (self.sign == "=")
        return bool(value) != self.negated

    def shown(self, args: Namespace | None = None, with_value: bool = False) -> str:
        """The flag, and its value where the term, or the rule, is about it."""
        flag = _NAMES.get(self.text) or flag_named(self.name)
        if self.text in _NAMES or not (self.sign or (with_value and args)) or self.values == ["None"]:
            return flag
        if args is None:
            means = {"=": "", "!=": "other than ", ">": "above "}[self.sign]
            return f"{flag} {means}{' or '.join(self.values)}"
        if self.sign == "=" and str(getattr(args, self.name, None)) not in self.values:  # what it would have to be
            return f"{flag} {' or '.join(self.values)}"
        value = getattr(args, self.name)
        return " ".join(map(str, (flag, *(value if isinstance(value, list) else [value]))))


@functools.cache
def _term(text: str) -> _Term:
    found = _TERM.fullmatch(text)
    assert found is not None, text
    return _Term(text, bool(found[1]), found[2], found[3] or "", (found[4] or "").split("|"))


def check(args: Namespace, *tables: tuple[Rule, ...]) -> None:
    """Hold the options against tables of rules.

    Raises:
        OptionError: with the sentence of every rule that is broken.
    """
    if broken := [sentence for table in tables for rule in table for sentence in rule.broken(args)]:
        raise OptionError("; ".join(broken))
