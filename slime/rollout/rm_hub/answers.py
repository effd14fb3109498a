"""Finding the answer in a response, and telling without algebra whether two answers are the same."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

_INTEGER = re.compile(r"[+-]?\d+$")
_DECIMAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)$")
_RATIO = re.compile(r"([+-]?\d+)/(\d+)$")
_LATEX_RATIO = re.compile(r"([+-]?)\\[dt]?frac\{(-?\d+)\}\{(-?\d+)\}$")
_LONGEST_NUMBER = 64
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|[{}]")

_WRAPPED = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf|textrm)\{([^{}]*)\}")
_THOUSANDS = re.compile(r"(?<=\d)(?:(?:,|\{,\})(?:\\!\s*)?|\\[,;:! ]|~)(?=\d{3}(?!\d))")
"""Also as LaTeX writes them: ``10{,}000``, ``10,\\!000``, ``10\\,000``."""
_SPACING = re.compile(r"\\[,;:! ]|~|\\quad|\\qquad|\\left(?![a-z])|\\right(?![a-z])|\\displaystyle")
_SHORT_FRAC = re.compile(r"\\[dt]?frac(\d)(\d)")
_DEGREES = re.compile(r"\^\{?\\circ\}?|\\degree|°")
_UNITS = re.compile(
    r"(?<=[\d})])\s*(?:square |cubic )?(?:degrees?|dollars?|cents?|units?|points?|hours?|minutes?|seconds?|days?|"
    r"inch(?:es)?|feet|ft|miles?|mph|meters?|km|cm|mm|kg|grams?|pounds?|ways?|integers?|digits?|students?)"
    r"(?:\^\{?[23]\}?)?\s*$"
)
_SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")
"""Spaces, but not one between digits: ``1 1/2`` is not ``11/2``."""


def label_problem(label: Any) -> str | None:
    """Why no response can be compared with a label, to follow its name; None where one can.

    An object has answers in it and is none: its text stands in no response.
    """
    found = next((each for each in (label if isinstance(label, list) else [label]) if isinstance(each, dict)), None)
    if found is None:
        return None
    keys = ", ".join(map(repr, found))
    return (
        f"{'is' if found is label else 'holds'} an object with the keys {keys}, which is no answer: name the key too, "
        "as in --label-key reward_model.ground_truth"
    )


def last_boxed(text: str) -> str | None:
    """The content of the last complete ``\\boxed{...}`` or ``\\fbox{...}``, braces matched; None without one."""
    # In one pass: a model that repeats itself writes thousands of boxes and closes none.
    open_braces: list[int | None] = []
    last: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        if match[0] != "}":
            open_braces.append(None if match[0] == "{" else match.end())
        elif open_braces and (start := open_braces.pop()) is not None:
            last = max(last or (0, 0), (start, match.start()))
    return None if last is None else text[last[0] : last[1]]


def after_reasoning(response: str) -> str:
    """What follows the last ``</think>``; the whole response without one."""
    return response.rpartition("</think>")[2]


def normalize(answer: str) -> str:
    """An answer without what does not change its value: spacing, ``$``, font commands, units, thousands separators.

    In the spirit of Lewkowycz et al. 2022, "Solving Quantitative Reasoning Problems with Language Models", appendix D.
    """
    text = answer.strip().strip("$").replace("\\$", "").replace("\\%", "").replace("%", "")
    text = _WRAPPED.sub(r" \1", _SPACING.sub(" ", _THOUSANDS.sub("", text)))
    text = _UNITS.sub("", _DEGREES.sub("", text))
    text = _SHORT_FRAC.sub(r"\\frac{\1}{\2}", text)
    return _SPACE.sub("", text).rstrip(".")


def as_number(text: str) -> Fraction | None:
    """The exact value of a plain integer, decimal or ratio; None for anything else."""
    if len(text) > _LONGEST_NUMBER:
        return None
    if _INTEGER.match(text) or _DECIMAL.match(text):
        return Fraction(text)
    if match := _RATIO.match(text):
        top, bottom = match.groups()
    elif match := _LATEX_RATIO.match(text):
        sign, top, bottom = match.groups()
        top = str(-int(top)) if sign == "-" else top
    else:
        return None
    return Fraction(int(top), int(bottom)) if int(bottom) else None


def quick_equal(answer: str, label: str) -> bool | None:
    """Whether two answers are equal, as far as strings and exact numbers tell; None where it takes algebra."""
    if _INTEGER.match(answer) and _INTEGER.match(label) and max(len(answer), len(label)) <= _LONGEST_NUMBER:
        return int(answer) == int(label)
    answer, label = normalize(answer), normalize(label)
    if answer == label:
        return answer != ""
    if not answer or not label:
        return False
    numbers = as_number(answer), as_number(label)
    return None if None in numbers else numbers[0] == numbers[1]
