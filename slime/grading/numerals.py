"""Numbers as people write them (mixed, grouped, repeating, with an exponent, in a base), and exact arithmetic."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction

_MOST_DIGITS = 1000
"""Of a number, and of the exponent of ten that is written out."""
_MOST_BITS = 1 << 16
_MOST_FACTORIAL = 3000
_DEEPEST = 40

_DECIMAL = r"(?:\d+\.?\d*|\.\d+)"
_EXPONENT = re.compile(rf"(?<![\w.\\}}])({_DECIMAL})[eE]([+-]?\d+)(?![\w.])")
_BASE = re.compile(r"(?<![\w\\}.])(\d[0-9A-Za-z]*|[A-Z][0-9A-Z]+)_(?:\{(\d+)\}|(\d))(?!\d)")
_BAR = r"(?:\\overline|\\bar)\s*"
_REPEATING = re.compile(
    rf"(?<![\w.])(\d*)\.(\d*)(?:{_BAR}\{{\s*(\d+)\s*\}}|{_BAR}(\d)|\((\d+)\)|((?:\\dot\s*\{{?\s*\d\s*\}}?\d*)+))(?:\\ldots|\\dots|\.\.\.)?"
)
_GOES_ON = re.compile(r"(?<![\w.])(\d*)\.(\d*?)(\d)\3{2,}(?:\\[lc]?dots|\.\.\.)")
_MIXED = re.compile(r"(?<![\w.^_)}/])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}|(?<![\w.^_)}/])(\d+)\s+(\d+)/(\d+)(?![\d.])")
_GROUPED_BY_SPACE = re.compile(r"(?<![\d._^])(?<!\d )\d{1,3}(?: \d{3})+(?![\d/])(?! \d)")
_GROUPED_BY_COMMA = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
_UNREAD = re.compile(r"(?<![_\d])\d+\s+\d|\d_|\d[eE][+-]?\d|\\(?:overline|dot)\s*\{?\d|\.\d+\(\d")
"""What `written_out` could not make sense of."""


def written_out(text: str) -> str:
    """``text`` with every number that people write in a way of its own as a plain integer, decimal or ``\\frac``."""
    text = _EXPONENT.sub(_plain_of_exponent, text)
    text = _GOES_ON.sub(r"\1.\2(\3)", text)
    text = _REPEATING.sub(_fraction_of_repeating, text)
    text = _BASE.sub(_integer_of_base, text)
    text = _GROUPED_BY_SPACE.sub(lambda match: match[0].replace(" ", ""), text)
    return _MIXED.sub(_fraction_of_mixed, text)


def without_commas(text: str) -> str:
    """``text`` with numbers whose groups of three digits commas part as plain ones."""
    return _GROUPED_BY_COMMA.sub(lambda match: match[0].replace(",", ""), text)


def is_unread(text: str) -> bool:
    """Whether something is left, after `written_out`, that is not a number in any of these ways: ``3 4``, ``29_8``."""
    return _UNREAD.search(text) is not None


def _plain_of_exponent(match: re.Match[str]) -> str:
    mantissa, exponent = match.groups()
    if len(exponent) > 6 or abs(int(exponent)) > _MOST_DIGITS or len(mantissa) > _MOST_DIGITS:
        return match[0]
    return _latex(Fraction(mantissa) * Fraction(10) ** int(exponent))


def _fraction_of_repeating(match: re.Match[str]) -> str:
    whole, before, *blocks = match.groups()
    block = next(filter(None, blocks))
    if block.startswith("\\dot"):
        dotted = re.findall(r"\\dot\s*\{?\s*(\d)\s*\}?(\d*)", block)
        if len(dotted) > 2 or dotted[-1][1]:
            return match[0]
        block = "".join(first + rest for first, rest in dotted)
        if len(dotted) == 1 and len(block) > 1:
            return match[0]
    if len(match[0]) > _MOST_DIGITS:
        return match[0]
    size = 10 ** len(before)
    value = int(whole or 0) + Fraction(int(before or 0), size)
    return _latex(value + Fraction(int(block), size * (10 ** len(block) - 1)))


def _integer_of_base(match: re.Match[str]) -> str:
    digits, base = match[1], int((match[2] or match[3])[:4])
    try:
        return str(int(digits, base)) if 2 <= base <= 36 and len(digits) <= _MOST_DIGITS else match[0]
    except ValueError:
        return match[0]


def _fraction_of_mixed(match: re.Match[str]) -> str:
    whole, top, bottom = match.groups()[:3] if match[1] else match.groups()[3:]
    if len(match[0]) > _MOST_DIGITS or not int(bottom):
        return match[0]
    return _latex(int(whole) + Fraction(int(top), int(bottom)))


def _latex(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


class _NotExact(Exception):
    """The text is not arithmetic of rational numbers."""


_TOKEN = re.compile(rf"\s*({_DECIMAL}|\\frac|\\times|\\cdot|\\div|!!?|[-+*/^(){{}}])")
_OPEN = {"(": ")", "{": "}"}


def exact_value(text: str) -> Fraction | None:
    """The value of rational arithmetic, as ``-\\frac{1}{2^{98}}`` or ``3 \\cdot 10^8``; None for anything else,
    ArithmeticError where it has none, or one that is too large to write down."""
    try:
        return _Arithmetic(text).value()
    except _NotExact:
        return None


class _Arithmetic:
    """A parser by recursive descent over the usual precedences."""

    def __init__(self, text: str) -> None:
        self._tokens: list[str] = []
        position, text = 0, text.strip()
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None or len(match[1]) > _MOST_DIGITS:
                raise _NotExact
            self._tokens.append(match[1])
            position = match.end()
        self._next = self._depth = 0

    def value(self) -> Fraction:
        result = self._sum()
        if self._next < len(self._tokens):
            raise _NotExact
        return result

    def _peek(self) -> str:
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def _take(self, *wanted: str) -> str:
        if self._peek() not in wanted:
            return ""
        self._next += 1
        return self._tokens[self._next - 1]

    def _sum(self) -> Fraction:
        sign = self._take("+", "-")
        result = -self._product() if sign == "-" else self._product()
        while operator := self._take("+", "-"):
            term = self._product()
            result = _small(result + term if operator == "+" else result - term)
        return result

    def _product(self) -> Fraction:
        result = self._power()
        while True:
            if self._take("*", "\\times", "\\cdot"):
                result = _small(result * self._signed_power())
            elif self._take("/", "\\div"):
                result = _small(result / self._signed_power())
            elif self._peek() in ("(", "\\frac"):
                result = _small(result * self._power())
            else:
                return result

    def _signed_power(self) -> Fraction:
        return -self._power() if self._take("-") else self._power()

    def _power(self) -> Fraction:
        base = self._primary()
        while signs := self._take("!", "!!"):
            if base.denominator != 1 or base < 0:
                raise _NotExact
            if base > _MOST_FACTORIAL:
                raise OverflowError
            base = Fraction(math.prod(range(base.numerator, 0, -len(signs))))
        if not self._take("^"):
            return base
        exponent = self._nested(self._signed_power)
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if exponent.denominator != 1:
            raise _NotExact
        if abs(exponent) * bits > _MOST_BITS:
            raise OverflowError
        return base**exponent.numerator

    def _primary(self) -> Fraction:
        if self._take("\\frac"):
            return _small(self._primary_group() / self._primary_group())
        if self._peek() in _OPEN:
            return self._primary_group()
        token = self._peek()
        if not token or not (token[0].isdigit() or token[0] == "."):
            raise _NotExact
        self._next += 1
        return Fraction(token.rstrip(".") or "0")

    def _primary_group(self) -> Fraction:
        opened = self._take(*_OPEN)
        if not opened:
            raise _NotExact
        result = self._nested(self._sum)
        if not self._take(_OPEN[opened]):
            raise _NotExact
        return result

    def _nested(self, part: Callable[[], Fraction]) -> Fraction:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _NotExact
        result = part()
        self._depth -= 1
        return result


def _small(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MOST_BITS:
        raise OverflowError
    return value
