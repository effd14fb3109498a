"""A process that compares answers by algebra: JSON lines in, JSON lines out, until standard input ends.

A process of its own, because symbolic algebra can run for hours or eat all memory, and can then only be killed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import sys
from typing import Any

from slime.grading import equality
from slime.processes.kernel import die_with_parent

_MEMORY = 4 << 30
_DIGITS = 200
_EXACT, _ROUNDED = 1e-150, 5e-7
"""How far apart numbers are, relative to the larger one, that are equal; where one of them has a decimal point."""
_POINTS = (("13/7", "29/11", "5/3", "37/19"), ("-17/9", "-31/13", "-7/5", "-41/23"))
"""Values of variables at which expressions are compared, above zero and below."""
_VARIABLE = re.compile(r"\\[A-Za-z]+|[A-Za-z]")
_DEGREE = re.compile(r"\s*\bdegrees?\b")


def equal(answer: str, label: str) -> bool:
    """Whether two answers are equal, as `equality.equal` says with the algebra of math-verify; without a time limit."""
    return equality.equal(answer, label, by_algebra)


def by_algebra(answer: str, label: str) -> bool:
    """Whether two LaTeX expressions have the same value.

    math-verify parses them, and compares what is neither a number nor a formula (sets, inequalities, equations).
    Numbers and formulas are compared here, as it takes all small numbers for equal: by their first 200 digits.
    """
    if _differ_by_case(answer, label):
        return False
    left, right = _parsed(answer), _parsed(label)
    if left is None or right is None:
        return False
    if (verdict := _same_numbers(left, right)) is not None:
        return verdict
    from math_verify import verify

    return bool(verify(right, left, timeout_seconds=None, allow_set_relation_comp=True))


def _parsed(text: str) -> Any:
    import sympy

    for word, join in ((" or ", sympy.Union), (" and ", sympy.Intersection)):
        if word in text:
            parts = [_parsed(part) for part in text.split(word)]
            return None if None in parts else join(*(part.as_set() for part in parts))
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    # What it takes for units may be a variable.
    plain = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    )
    angle = r"\\cdot\\frac{\\pi}{180}" if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text) else ""
    text = _DEGREE.sub(angle, text)
    found = parse(
        f"${text}$", extraction_config=[LatexExtractionConfig(normalization_config=plain)], parsing_timeout=None
    )
    return next((each for each in found if not isinstance(each, str)), None)


def _differ_by_case(left: str, right: str) -> bool:
    """Whether variables differ by upper and lower case alone, which math-verify does not see."""
    names = [{name for name in _VARIABLE.findall(text) if len(name) == 1} for text in (left, right)]
    return names[0] != names[1] and {name.lower() for name in names[0]} == {name.lower() for name in names[1]}


def _same_numbers(left: Any, right: Any) -> bool | None:
    """Whether numbers or formulas have the same value; None of what is neither, or cannot be told so."""
    import sympy

    if not all(isinstance(each, sympy.Expr) and each.is_commutative for each in (left, right)):
        return None
    unit = {each: sympy.I for side in (left, right) for each in side.free_symbols if each.name == "i"}
    left, right = left.subs(unit).doit(), right.subs(unit).doit()
    rounded = left.has(sympy.Float) or right.has(sympy.Float)
    tolerance = _ROUNDED if rounded else _EXACT
    names = sorted(left.free_symbols | right.free_symbols, key=str)
    if not names:
        return _close(left, right, {}, tolerance)
    verdicts = []
    for values in _POINTS:
        shifts = range(len(values))
        points = [{s: sympy.Rational(values[(k + i) % len(values)]) + i for i, s in enumerate(names)} for k in shifts]
        found = {_close(left, right, point, tolerance) for point in points} - {None}
        verdicts.append(found)
        if False in found and values is _POINTS[0]:
            return False
    return True if verdicts == [{True}, {True}] else None


def _close(left: Any, right: Any, point: dict[Any, Any], tolerance: float) -> bool | None:
    import sympy

    # By name, as symbols of one name may differ in what is assumed of them.
    values = {name.name: value for name, value in point.items()}
    sides = []
    for side in (left, right):
        number = sympy.N(side.subs({each: values[each.name] for each in side.free_symbols}), _DIGITS)
        infinite = number in (sympy.oo, -sympy.oo)
        if not infinite and (not number.is_number or not number.is_finite or number.has(sympy.nan)):
            return None
        sides.append(number)
    if any(not side.is_finite for side in sides):
        return bool(sides[0] == sides[1])
    distance, size = abs(sides[0] - sides[1]), max(abs(sides[0]), abs(sides[1]))
    return bool(distance <= tolerance * size or distance < _EXACT)


def main() -> None:
    """Answer requests ``{"answer", "label"}`` with true or false."""
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    # What a library prints must not end up among the replies.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # It warns that its own time limits are off: ours ends the process.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    equal("\\sqrt{8}", "2\\sqrt{2}")
    replies.write("ready\n")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            verdict = equal(request["answer"], request["label"])
        except (Exception, MemoryError, RecursionError):
            verdict = False  # an answer that cannot be parsed is not the right one
        replies.write(json.dumps(verdict) + "\n")


if __name__ == "__main__":
    main()
