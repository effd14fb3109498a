"""Whether an answer and a label say the same: decided exactly where that can be done, and else by algebra."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fractions import Fraction

from slime.grading.notation import canonical, compact
from slime.grading.numerals import exact_value, is_unread, without_commas
from slime.grading.units import Unit, is_number, singular, split_unit, summed_units

Algebra = Callable[[str, str], bool]
"""Says of two expressions in LaTeX, without units and lists, whether they are equal."""

_List = tuple[str, list[str]]
_INTEGER = re.compile(r"[+-]?\d+$")
_LONGEST = 2000
"""Letters of an answer that is looked into; longer ones only equal themselves."""
_LONGEST_FORMULA, _MOST_BRACKETS = 500, 60
"""What algebra is tried on; of more it takes longer than a reward may."""
_LONGEST_NUMBER = 64
_MOST_ITEMS = 100
_NAME = re.compile(
    r"\s*(?:\\?[A-Za-z]+'*(?:_(?:\{\w+\}|\w))?\s*(?:\(\s*\\?[a-z]+(?:\s*,\s*\\?[a-z]+)*\s*\))?"
    r"|\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])+\s*\))\s*$"
)
_RELATION = re.compile(r"[<>=|]|\\(?:le|ge|ne|in|cup|cap|mid|equiv|sim|to|subset|setminus|mathbb)(?![A-Za-z])")
_ORDER = re.compile(r"[<>]|\\(?:le|ge)(?![A-Za-z])")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*$")
_COMMANDS = re.compile(r"\\[A-Za-z]+")
_FUNCTIONS = {"degree", "degrees", "sqrt", "sinh", "cosh", "tanh", "asin", "acos", "atan", "arcsin", "arccos", "arctan"}
_MATRIX = re.compile(r"^\\begin\s*\{([pbBvV]?matrix|smallmatrix|array)\}\s*(?:\{[lcr| ]*\})?(.*)\\end\s*\{\1\}$", re.S)
_CHOICE = re.compile(r"\(?([A-J])[).] (.+)$", re.S)
_TEXT = re.compile(r"\$?\s*\\(?:text|math|mbox|hbox)[a-z]*\s*\{\s*[A-Za-z]{2,}\s*\}\s*\.?\s*\$?\.?$")
"""A word, and no product of variables, however short it is."""
_LETTER = re.compile(r"(\()?([A-Za-z])\)?$")
_SHORT_WORD = re.compile(r"yes|no|odd|all|[^aeiou][aeiou][^aeiou]")
"""What is not a product of variables, though it is short."""
_CAPITALS = re.compile(r"[A-Z](?: ?[A-Z])+$")
"""Tosses, colours, vertices: in their order."""
_CLOCK = re.compile(r"\d:\d\d(?!\d)")
_TIME = re.compile(r"(\d\d?):(\d\d)(?: ?([ap])\.? ?m\.?)?$", re.I)
_INDEX = re.compile(r"(?<=[A-Za-z)])_(?:\{(\d+)\}|(?=\d))")
_NUMBER_IN_BRACKETS = re.compile(r"[(\[][+-]?\d+(?:\.\d+)?[)\]]")
_PERCENT = "percent"
_DEGREES, _RADIANS = Unit((("angle", 1),), Fraction(1)), Unit((("radian", 1),), Fraction(1))


class NeedsAlgebra(Exception):
    """The answers cannot be told apart by exact numbers and spelling alone."""


def quick_equal(answer: str, label: str) -> bool | None:
    """Whether two answers are equal, as far as spelling and exact numbers tell; None where it takes algebra."""
    if _INTEGER.match(answer) and _INTEGER.match(label) and max(len(answer), len(label)) <= _LONGEST_NUMBER:
        return int(answer) == int(label)
    try:
        return equal(answer, label, _no_algebra)
    except NeedsAlgebra:
        return None


def _no_algebra(answer: str, label: str) -> bool:
    raise NeedsAlgebra


def equal(answer: str, label: str, algebra: Algebra) -> bool:
    """Whether two answers are equal.

    Numbers are exact. A unit that one side alone has is left out, two are converted where that is exact; 50% is 0.5,
    and its sign may be left out. ``(a, b)`` and intervals are ordered, ``\\{a, b\\}`` and bare lists are not. A name
    on one side alone (``x = 5``) is left out.
    """
    if max(len(answer), len(label)) > _LONGEST:
        return answer.strip() != "" and answer.strip() == label.strip()
    is_text = any(_TEXT.match(text.strip()) for text in (answer, label))
    answer, label = canonical(answer), canonical(label)
    if not answer or not label:
        return False
    if is_text and _WORDS.match(answer) and _WORDS.match(label):
        return _plain_words(answer) == _plain_words(label)
    choices = _CHOICE.match(answer), _CHOICE.match(label)
    if choices[0] and choices[1] and choices[0][1] != choices[1][1]:
        return False
    return any(_same(left, right, algebra, 0) for left in _readings(answer) for right in _readings(label))


def _readings(text: str) -> Iterator[str]:
    """``100,200`` is a number, and a list; ``(C) 12`` is a choice, and what stands behind it; ``H_2O`` is ``H2O``."""
    choice = _CHOICE.match(text)
    for part in choice.groups() if choice else (text,):
        joined = without_commas(part)
        if joined == part or not _NUMBER_IN_BRACKETS.fullmatch(joined):  # ``(1,234)`` is a point, or an interval
            yield joined
        if joined != part and not re.search(r",0\d", part):
            yield part
        if "\\" not in part and _INDEX.search(part):
            yield _INDEX.sub(r"\1", part)


def _same(left: str, right: str, algebra: Algebra, depth: int) -> bool:
    letters = _LETTER.match(left), _LETTER.match(right)
    if letters[0] and letters[1] and (letters[0][1] or letters[1][1]):
        return letters[0][2].lower() == letters[1][2].lower()
    left, right = (_unwrapped(summed_units(text) or text) for text in (left, right))
    if compact(left) == compact(right):
        return left != ""
    if depth > 8 or not left or not right:
        return False
    (left_name, left_value), (right_name, right_value) = _named(left), _named(right)
    if left_name and right_name and not (_assigned(left) and _assigned(right)):
        return compact(left_name) == compact(right_name) and _same(left_value, right_value, algebra, depth + 1)
    if (left_name and "=" not in right) or (right_name and "=" not in left):
        return _same(left_value, right_value, algebra, depth + 1)
    lists = _items(left), _items(right)
    if lists[0] or lists[1]:
        return _same_lists(left, right, lists, algebra, depth)
    return _same_quantities(left, right, algebra)


def _unwrapped(text: str) -> str:
    text = text.strip()
    brackets, inner = _brackets(text)
    return inner if brackets == "()" and len(_split(inner)) == 1 else text


def _named(text: str) -> tuple[str, str]:
    """The name on the left of the only ``=`` (or of ``\\in``) that there is, and what is on the right."""
    for sign in ("=", "\\in "):
        if text.count(sign) == 1:
            name, _, value = text.partition(sign)
            if _NAME.match(name) and not name.rstrip().endswith((" and", " or")):
                return name.strip(), value.strip()
    return "", text


# --- lists, tuples, sets, intervals, matrices


def _items(text: str) -> _List | None:
    """The brackets and the items of a list, or None: "{}" of a set, "" of a bare list, "2x2" of a matrix."""
    if assigned := _assigned(text):
        return "", assigned
    if match := _MATRIX.match(text):
        rows = [[cell.strip() for cell in row.split("&")] for row in match[2].split("\\cr") if row.strip()]
        shape = f"{match[1].lstrip('pbB').replace('array', 'matrix')}{'x'.join(str(len(row)) for row in rows)}"
        return shape, [cell for row in rows for cell in row]
    brackets, inner = _brackets(text)
    found = _split(inner)
    if brackets in ("()", "[)", "(]", "[]") and len(found) > 1:
        return brackets, found
    if brackets == "{}" and not _RELATION.search(inner):
        return brackets, found
    if not brackets and len(found) > 1:
        return "", [sign for item in found for sign in _signs(item)]
    signs = _signs(text)
    return ("", signs) if len(signs) > 1 else None


def _assigned(text: str) -> list[str] | None:
    """``(x, y) = (2, 1)`` as ``x = 2`` and ``y = 1``; None of anything else."""
    names, values = (_brackets(part.strip()) for part in _named(text))
    if names[0] != "()" or values[0] != "()":
        return None
    pairs = _split(names[1]), _split(values[1])
    return [f"{name}={value}" for name, value in zip(*pairs, strict=True)] if len(pairs[0]) == len(pairs[1]) else None


def _brackets(text: str) -> tuple[str, str]:
    """The pair that encloses all of ``text``, and what is in it."""
    if text.startswith("\\{") and text.endswith("\\}") and "\\}" not in text[2:-2]:
        return "{}", text[2:-2].strip()
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and _closing(text) == len(text) - 1:
        return text[0] + text[-1], text[1:-1].strip()
    return "", text


def _closing(text: str) -> int:
    """Where the bracket closes that ``text`` begins with; intervals mix round and square ones."""
    level = 0
    for place, letter in enumerate(text):
        level += (letter in "([{") - (letter in ")]}")
        if level <= 0:
            return place
    return -1


def _split(text: str) -> list[str]:
    """At the commas, semicolons, ``and`` and ``or`` that are in no brackets."""
    parts, start, level = [], 0, 0
    for match in re.finditer(r"[()\[\]{},;]|\b(?:and|or)\b", text):
        if match[0] in "([{":
            level += 1
        elif match[0] in ")]}":
            level -= 1
        elif level <= 0:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    parts.append(text[start:].strip())
    return [part for part in parts if part][: _MOST_ITEMS + 1]


def _signs(text: str) -> list[str]:
    if text.count("\\pm") != 1:
        return [text]
    before, _, after = text.partition("\\pm")
    return [f"{before}+{after}" if before.strip() else after, f"{before}-{after}"]


def _same_lists(left: str, right: str, lists: tuple[_List | None, _List | None], algebra: Algebra, depth: int) -> bool:
    left_list, right_list = lists
    if left_list is None or right_list is None:
        brackets, items = left_list or right_list or ("", [])
        if brackets == "{}" and len(items) == 1:
            pair = (items[0], right) if left_list else (left, items[0])
            return _same(*pair, algebra, depth + 1)
        return bool(_RELATION.search(right if left_list else left)) and _by_algebra(left, right, algebra)
    (left_kind, lefts), (right_kind, rights) = left_list, right_list
    is_order = any(kind == "" and all(map(_ORDER.search, items)) for kind, items in (left_list, right_list))
    if is_order and left_kind != right_kind:
        return _by_algebra(left, right, algebra)
    if max(len(lefts), len(rights)) > _MOST_ITEMS:
        return False
    kinds = {left_kind, right_kind}
    if kinds == {"{}"}:
        return _covers(lefts, rights, algebra, depth) and _covers(rights, lefts, algebra, depth)
    if len(lefts) != len(rights):
        return False
    if kinds <= {"", "{}"}:
        return _same_in_some_order(lefts, rights, algebra, depth)
    if left_kind != right_kind and kinds not in ({"", "()"}, {"", "[]"}):
        return False
    return all(_same(*pair, algebra, depth + 1) for pair in zip(lefts, rights, strict=True))


def _covers(ones: list[str], others: list[str], algebra: Algebra, depth: int) -> bool:
    return all(any(_same(one, other, algebra, depth + 1) for other in others) for one in ones)


def _same_in_some_order(lefts: list[str], rights: list[str], algebra: Algebra, depth: int) -> bool:
    left_over = list(rights)
    for one in lefts:
        found = next((other for other in left_over if _same(one, other, algebra, depth + 1)), None)
        if found is None:
            return False
        left_over.remove(found)
    return True


# --- numbers with units, words, and the rest


def _same_quantities(left: str, right: str, algebra: Algebra) -> bool:
    if _CAPITALS.match(left) and _CAPITALS.match(right):
        return left.replace(" ", "") == right.replace(" ", "")
    if _are_words(left, right):
        return _plain_words(left) == _plain_words(right)
    whole = left, right
    (left, left_unit), (right, right_unit) = _without_units(left, right)
    if (left_unit is None) != (right_unit is None):
        one, other = (left, right) if right_unit is None else (right, left)
        if is_number(one) and not is_number(_COMMANDS.sub("", other)):  # the unit of one may be a variable of the other
            return _by_algebra(*whole, algebra)
    left, right = _in_radians(left, left_unit, right, right_unit), _in_radians(right, right_unit, left, left_unit)
    factors = _factors(left_unit, right_unit)
    if not factors:
        return False
    try:
        values = exact_value(left), exact_value(right)
    except ArithmeticError:
        return False
    if values[0] is not None and values[1] is not None:
        return any(values[0] * factor == values[1] for factor in factors)
    return any(_by_algebra(left if factor == 1 else f"({factor})\\cdot({left})", right, algebra) for factor in factors)


def _without_units(left: str, right: str) -> list[tuple[str, Unit | None]]:
    found = [split_unit(left), split_unit(right)]
    for place, text in enumerate((left, right)):
        if found[place][1] is None and found[1 - place][1] is not None:
            found[place] = split_unit(text, told=True)
    return found


def _in_radians(text: str, unit: Unit | None, other: str, other_unit: Unit | None) -> str:
    """Degrees where the other angle is in radians."""
    compared = unit == _DEGREES and (other_unit == _RADIANS or (other_unit is None and "\\pi" in other))
    return f"\\frac{{\\pi}}{{180}}\\cdot({text})" if compared else text


def _factors(left: Unit | None, right: Unit | None) -> list[Fraction]:
    """What the left number may be multiplied by to be the right one; nothing where the units contradict each other."""
    percents = [unit is not None and unit.powers == ((_PERCENT, 1),) for unit in (left, right)]
    one = Fraction(1)
    if {left, right} == {_DEGREES, _RADIANS}:
        return [one]
    if left is not None and right is not None:
        return [left.size / right.size] if left.powers == right.powers else []
    if any(percents):
        return [one, one / 100 if percents[0] else one * 100]
    return [one]


def _are_words(*texts: str) -> bool:
    """Whether all are letters, and one at least is a word and no product of variables."""
    letters = all(_WORDS.match(text) for text in texts)
    return letters and any(len(text) > 3 or _SHORT_WORD.fullmatch(text.lower()) for text in texts)


def _plain_words(text: str) -> list[str]:
    return [singular(word) for word in re.sub(r"^(?:a|an|the) ", "", text.casefold()).split()]


def _by_algebra(left: str, right: str, algebra: Algebra) -> bool:
    if _CLOCK.search(left) or _CLOCK.search(right):  # algebra takes 10:30 for a third
        return _same_time(left, right)
    if _has_words(left) and _has_words(right):
        return compact(left).casefold() == compact(right).casefold()
    if any(len(text) > _LONGEST_FORMULA or is_unread(text) or _has_words(text) for text in (left, right)):
        return False
    if any(sum(text.count(opening) for opening in "([{") > _MOST_BRACKETS for text in (left, right)):
        return False
    return algebra(left, right)


def _same_time(left: str, right: str) -> bool:
    """Whether two times of the day are the same; half of the day may be left out on one side."""
    times = _TIME.match(left), _TIME.match(right)
    if times[0] is None or times[1] is None:
        return compact(left).lower().replace(".", "") == compact(right).lower().replace(".", "")
    hours = [_hours(int(time[1]), (time[3] or "").lower()) for time in times if time]
    same_hour = hours[0] & hours[1] if times[0][3] or times[1][3] else int(times[0][1]) == int(times[1][1])
    return bool(same_hour) and times[0][2] == times[1][2]


def _hours(hour: int, half: str) -> set[int]:
    morning = hour % 12
    if half:
        return {morning + 12 * (half == "p")}
    return {morning, morning + 12} if 0 < hour <= 12 else {hour}


def _has_words(text: str) -> bool:
    """Whether there are words that algebra would take for products of letters."""
    return any(word.lower() not in _FUNCTIONS for word in re.findall(r"[A-Za-z]{4,}", _COMMANDS.sub(" ", text)))
