"""Rules between options, as tables: of a row follow both the check and its one line, with values or in plain English.

A row names options by terms: ``use_tis`` (set: not None, False, 0 or empty), ``!use_tis`` (not set), ``@use_tis``
(given by the user, whatever its value), ``loss_type=a|b``, ``loss_type!=a``, ``kl_coef>0``. Of several terms, divided
by blanks, each counts alone. Secrets are in no row, for values are shown.
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
from slime.options.flags.megatron_names import flag_saying, shown_setting

_TERM = re.compile(r"([!@]?)(\w+)(?:(!=|=|>)(.*))?")
_NAMES = {
    "placement=colocate": "--colocate",
    "placement=rollout_only": "--debug-rollout-only",
    "placement=train_only": "--debug-train-only",
    "precision=float32": "--fp32",
    "precision=float16": "--fp16",
    "offload_train=False": "--no-offload-train",
    "!check_for_nan_in_loss_and_grad": "--no-check-for-nan-in-loss-and-grad",
    "asynchronous": "train_async.py",
}
"""Terms of what is not a flag by itself."""
_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "is above": operator.gt,
    "is more than": operator.gt,
    "is less than": operator.lt,
    "is not before": operator.ge,
    "leaves none of": operator.ge,
    "is not a multiple of": lambda amount, size: amount % size != 0,
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
        options, others, only = (map(_term, terms.split()) for terms in (self.options, self.others, self.when))
        context = " and ".join("no " * (term.mark == "!") + term.described() for term in only)
        sentence = self._sentence([o.described() for o in options], [o.described() for o in others])
        return f"With {context}: {sentence}" if context else sentence

    def broken(self, args: Namespace) -> str | None:
        """The sentence that refuses options; None where the rule is kept."""
        if not hold(args, self.when):
            return None
        options, others = ([_term(text) for text in terms.split()] for terms in (self.options, self.others))
        if compare := _COMPARED.get(self.form):
            size = others[0].value(args)
            wrong = [o for o in options if None not in (size, o.value(args)) and compare(o.value(args), size)]
            shown, than = ([shown_setting(o.name, o.value(args)) for o in each] for each in (wrong, others))
        else:
            held = [other for other in others if other.holds(args)]
            if others and bool(held) == (self.form in _WITHOUT):
                return None
            shown = [option.shown(args) for option in options if option.holds(args)]
            than = [other.shown(args) for other in held[:1] or others]
        return self._sentence(shown, than) if shown else None

    def _sentence(self, options: list[str], others: list[str]) -> str:
        alternatives = " or ".join(filter(None, (", ".join(others[:-1]), *others[-1:])))
        form = self.form if self.form.startswith((":", ",")) else f" {self.form}"
        return f"{', '.join(options)}{form}{' ' * bool(others)}{alternatives}{self.why}"


@dataclass(frozen=True)
class _Term:
    """One option in a state."""

    text: str
    mark: str
    name: str
    sign: str
    values: list[str]

    def value(self, args: Namespace) -> Any:
        return getattr(args, self.name, None)

    def holds(self, args: Namespace) -> bool:
        value = self.value(args)
        if self.mark == "@":
            return self.name in getattr(args, "given_options", ())
        if self.sign == ">":
            return value is not None and value > float(self.values[0])
        if self.sign:
            return (str(value) in self.values) == (self.sign == "=")
        return (any(value) if isinstance(value, list) else bool(value)) != (self.mark == "!")

    def shown(self, args: Namespace) -> str:
        """The flag with its value, of a path only where the term is about it; in words where the term does not hold."""
        value = self.value(args)
        is_long = isinstance(value, dict) or (self.name.endswith("_path") and not self.sign)
        if self.text in _NAMES or self.mark == "!" or is_long or not self.holds(args):
            return self.described()
        return shown_setting(self.name, value)

    def described(self) -> str:
        """What the term says, in words."""
        flag = _NAMES.get(self.text) or flag_saying(self.name, True)
        if self.values == ["None"]:
            return f"no {flag}" if self.sign == "=" else flag
        if self.text in _NAMES:
            return flag
        return flag + {"=": " ", "!=": " other than ", ">": " above ", "": ""}[self.sign] + " or ".join(self.values)


@functools.cache
def _term(text: str) -> _Term:
    found = _TERM.fullmatch(text)
    assert found is not None, text
    return _Term(text, found[1], found[2], found[3] or "", found[4].split("|") if found[4] else [])


def hold(args: Namespace, terms: str) -> bool:
    """Whether all of these terms hold."""
    return all(_term(text).holds(args) for text in terms.split())


def check(args: Namespace, *tables: tuple[Rule, ...]) -> None:
    """Hold the options against tables of rules; OptionError with the sentence of every rule that is broken."""
    if sentences := [sentence for table in tables for sentence in broken(args, table)]:
        raise OptionError("; ".join(sentences))


def broken(args: Namespace, table: tuple[Rule, ...]) -> Iterator[str]:
    """The sentence of every rule of a table that is broken."""
    return filter(None, (rule.broken(args) for rule in table))
