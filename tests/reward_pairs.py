"""Answers whose reward is known, by mathematics and not by what the graders do: written ones and made ones.

A pair has an ``answer``, which each of `tools.score_graders.ANSWER_GRADERS` finds in a response of its own form, or a
``response`` and the one ``grader`` that judges it; then ``label``, ``expected`` (0 or 1), ``category`` and maybe
``metadata``. A category says which way a question was decided that could be decided otherwise. Left out, because people
do not agree on them: a list against a tuple in the same order (``2,3`` and ``(2,3)``), names against places
(``y=3,x=4`` and ``(3,4)``), an interval against an inequality, irrational numbers against decimals of six places and
more, ``99=3`` against ``3``, ``5\\ldots`` against ``5``, ``DNE`` against ``undefined``, and a box before
``</think>``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

Pair = dict[str, Any]

_WRITTEN = Path(__file__).with_name("data") / "reward_pairs.jsonl"
_LETTERS = "0123456789ABCDEF"


def written_pairs() -> list[Pair]:
    """Those of a file, written by hand."""
    return [json.loads(line) for line in _WRITTEN.read_text().splitlines()]


def generated_pairs(seed: int = 27, rounds: int = 14) -> list[Pair]:
    """Pairs by exact arithmetic: of each kind ``rounds`` that are equal, and as many that are not."""
    rng = random.Random(seed)
    return [
        {"answer": answer, "label": label, "expected": expected, "category": f"generated: {kind}"}
        for kind, make in _KINDS.items()
        for _ in range(rounds)
        for answer, label, expected in make(rng)
    ]


def _fractions(rng: random.Random) -> Iterator[tuple[str, Any, int]]:
    value = Fraction(rng.randint(-200, 200), rng.randint(2, 99))
    other = value + rng.choice((-1, 1)) * Fraction(1, rng.randint(2, 2000))
    yield rng.choice(_as_fraction(value, rng.randint(1, 5))), rng.choice(_as_fraction(value, 1)), 1
    yield rng.choice(_as_fraction(other, rng.randint(1, 5))), rng.choice(_as_fraction(value, 1)), 0


def _as_fraction(value: Fraction, times: int) -> list[str]:
    sign, top, bottom = "-" * (value < 0), abs(value.numerator) * times, value.denominator * times
    return [
        f"{sign}{top}/{bottom}",
        f"{sign}\\frac{{{top}}}{{{bottom}}}",
        f"\\frac{{{sign}{top}}}{{{bottom}}}",
        f"${sign}\\dfrac{{{top}}}{{{bottom}}}$",
        f"{sign}\\tfrac{{{top}}} {{{bottom}}}",
        f"{sign}{top} / {bottom}",
    ]


def _mixed(rng: random.Random) -> Iterator[tuple[str, Any, int]]:
    bottom = rng.randint(2, 16)
    whole, top, sign = rng.randint(1, 30), rng.randint(1, bottom - 1), rng.choice(("", "-"))
    value = (-1 if sign else 1) * (whole + Fraction(top, bottom))
    spellings = [f"{sign}{whole} {top}/{bottom}", f"{sign}{whole}\\frac{{{top}}}{{{bottom}}}"]
    spellings.append(f"{sign}{whole} \\tfrac{{{top}}}{{{bottom}}}")
    wrong = Fraction(whole + top, bottom) * (-1 if sign else 1)  # what one gets by adding before dividing
    pair = [rng.choice(spellings), rng.choice(_as_fraction(value, 1))]
    rng.shuffle(pair)
    yield pair[0], pair[1], 1
    yield rng.choice(spellings), str(wrong), int(wrong == value)


def _thousands(rng: random.Random) -> Iterator[tuple[str, Any, int]]:
    number = rng.randint(1000, 10 ** rng.randint(4, 12))
    mark = rng.choice((",", " ", "{,}", "\\,", ",\\!", "\\ ", "~"))
    written = f"{number:,}".replace(",", mark)
    yield (written, str(number), 1) if rng.random() < 0.5 else (str(number), written, 1)
    other = rng.choice((number + 1, number // 1000, number % 1000, number * 10))
    yield written, other, int(other == number)


def _exponents(rng: random.Random) -> Iterator[tuple[str, Any, int]]:
    digits, exponent = rng.randint(1, 9999), rng.randint(-12, 15)
    mantissa, value = f"{digits / 100:g}", Fraction(digits, 100) * Fraction(10) ** exponent
    spellings = [f"{mantissa}e{exponent}", f"{mantissa}E{exponent:+03d}", f"{mantissa} \\times 10^{{{exponent}}}"]
    spellings.append(f"{mantissa}\\cdot10^{{{exponent}}}")
    plain = str(value) if value.denominator == 1 else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    label = rng.choice((plain, float(f"{mantissa}e{exponent}"), spellings[0]))
    yield rng.choice(spellings), label, 1
    yield rng.choice(spellings), float(f"{mantissa}e{exponent + rng.choice((-1, 1))}"), 0


def _repeating(rng: random.Random) -> Iterator[tuple[str, Any, int]]:
    before, block = "".join(rng.choices("0123456789", k=rng.randint(0, 2))), str(rng.randint(1, 98))
    whole = rng.randint(0, 12)
    size = 10 ** len(before)
    value = whole + Fraction(int(before or 0), size) + Fraction(int(block), size * (10 ** len(block) - 1))
    written = rng.choice((f"{whole}.{before}\\overline{{{block}}}", f"{whole}.{before}({block})"))
    yield written, str(value), 1
    finite = f"{whole}.{before}{block}"
    yield (finite, written, 0) if rng.random() < 0.5 else (written, str(whole), int(value == whole))


def _bases(rng: random.Random) -> Iterator[tuple[str, Any, int]]:
    number, base = rng.randint(20, 5000), rng.choice((2, 3, 4, 5, 7, 8, 12, 16))
    digits = _in_base(number, base)
    yield f"{digits}_{{{base}}}", rng.choice((str(number), f"{digits}_{base if base < 10 else f'{{{base}}}'}")), 1
    yield f"{digits}_{{{base}}}", rng.choice((f"{digits}_{{{base + 1}}}", str(number + 1))), 0


def _in_base(number: int, base: int) -> str:
    digits = ""
    while number:
        number, digit = divmod(number, base)
        digits = _LETTERS[digit] + digits
    return digits


def _percents(rng: random.Random) -> Iterator[tuple[str, Any, int]]:
    value = Fraction(rng.randint(2, 999), rng.choice((1, 2, 4, 5, 10)))
    if value == 1:
        value += 1
    written = f"{float(value):g}" + rng.choice(("\\%", "%", " \\%", " percent", "\\text{ percent}"))
    yield written, rng.choice((f"{float(value):g}", str(value / 100), f"{float(value):g}\\%")), 1
    yield written, rng.choice((str(value / 10), str(value * 10), f"{float(value + 1):g}\\%")), 0


_MEASURES: dict[str, dict[str, int]] = {
    "time": {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400},
    "metric length": {"mm": 1, "cm": 10, "m": 1000, "km": 1_000_000},
    "length": {"inches": 1, "feet": 12, "yards": 36, "miles": 63360},
    "mass": {"mg": 1, "g": 1000, "kg": 1_000_000},
    "money": {"cents": 1, "dollars": 100},
}


def _units(rng: random.Random) -> Iterator[tuple[str, Any, int]]:
    units = _MEASURES[rng.choice(list(_MEASURES))]
    (small, one), (large, many) = rng.sample(list(units.items()), 2)
    number = rng.randint(2, 60)
    converted = Fraction(number * one, many)
    shown = rng.choice((f"{number} {small}", f"{number}\\text{{ {small}}}"))
    yield shown, rng.choice((str(number), f"{number} \\text{{ {small}}}", f"{converted} {large}")), 1
    yield shown, rng.choice((f"{number} {large}", f"{number + 1} {small}", f"{number}\\text{{ {large}}}")), 0


def _sums(rng: random.Random) -> Iterator[tuple[str, Any, int]]:
    """Exact numbers within an expression or a list, where they are as they are alone."""
    first, second = Fraction(rng.randint(1, 40), 8), Fraction(rng.randint(41, 90), 9)
    whole, rest = divmod(first.numerator, first.denominator)
    mixed = f"{whole} {rest}/{first.denominator}" if whole and rest else str(first)
    left, right = rng.choice((("(", ")"), ("\\{", "\\}"), ("[", "]"), ("\\left(", "\\right)"), ("", "")))
    yield (
        f"{left}{mixed}, {second}{right}",
        f"{left}\\frac{{{first.numerator}}}{{{first.denominator}}},{second}{right}",
        1,
    )
    yield f"{left}{mixed}, {second}{right}", f"{left}{first},{second + Fraction(1, 10**9)}{right}", 0


_KINDS: dict[str, Callable[[random.Random], Iterator[tuple[str, Any, int]]]] = {
    "fractions": _fractions,
    "mixed numbers": _mixed,
    "thousands": _thousands,
    "e-notation": _exponents,
    "repeating decimals": _repeating,
    "bases": _bases,
    "percents": _percents,
    "units": _units,
    "numbers in lists": _sums,
}
