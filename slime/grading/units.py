"""Units behind a number: taken off, read, and told apart."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from string import ascii_lowercase

_MEASURES: dict[str, dict[str, tuple[str, ...]]] = {
    "length": {
        "1": ("m", "meter", "metre"),
        "1/1000": ("mm", "millimeter", "millimetre"),
        "1/100": ("cm", "centimeter", "centimetre"),
        "1/10": ("dm", "decimeter", "decimetre"),
        "1000": ("km", "kilometer", "kilometre"),
        "0.0254": ("in", "inch"),
        "0.3048": ("ft", "foot"),
        "0.9144": ("yd", "yard"),
        "1609.344": ("mi", "mile"),
    },
    "time": {
        "1": ("s", "sec", "second"),
        "1/1000": ("ms", "millisecond"),
        "60": ("min", "minute"),
        "3600": ("h", "hr", "hour"),
        "86400": ("day",),
        "604800": ("week", "wk"),
    },
    "months": {"1": ("month",), "12": ("year", "yr")},
    "mass": {
        "1": ("g", "gram", "gramme"),
        "1/1000": ("mg", "milligram"),
        "1000": ("kg", "kilogram", "kilo"),
        "1000000": ("tonne",),
        "453.59237": ("lb", "pound"),
        "28.349523125": ("oz", "ounce"),
    },
    "volume": {
        "1": ("L", "l", "liter", "litre"),
        "1/1000": ("ml", "mL", "milliliter", "millilitre"),
    },
    "dollar": {"1": ("dollar", "usd", "USD", "buck"), "1/100": ("cent",)},
    "euro": {"1": ("euro", "EUR")},
    "sterling": {"1": ("GBP",)},
    "yen": {"1": ("yen", "JPY", "yuan", "RMB")},
    "rupee": {"1": ("rupee", "INR", "Rs")},
    "angle": {"1": ("degree", "deg")},
    "radian": {"1": ("radian", "rad")},
    "Celsius": {"1": ("C", "Celsius", "celsius", "centigrade")},
    "Fahrenheit": {"1": ("F", "Fahrenheit", "fahrenheit")},
    "Kelvin": {"1": ("K", "kelvin")},
    "force": {"1": ("N", "newton")},
    "energy": {"1": ("J", "joule"), "1000": ("kJ",)},
    "power": {"1": ("W", "watt"), "1000": ("kW",)},
    "voltage": {"1": ("V", "volt")},
    "frequency": {"1": ("Hz", "hertz")},
    "turns": {"1": ("rpm",)},
    "pressure": {"1": ("psi",)},
    "gallon": {"1": ("gal", "gallon")},
    "percent": {"1": ("percent", "percentage", "pct")},
}
"""By what is measured, and by size: the names. A name stands for itself where it is in no row."""
_KNOWN = {
    name: (kind, Fraction(size)) for kind, sizes in _MEASURES.items() for size, names in sizes.items() for name in names
}
_COMPOUND = {"mph": "mile per hour", "kph": "km per hour", "kmh": "km per hour", "fps": "foot per second", "bps": "bit"}
_IRREGULAR = {"feet": "foot", "people": "person", "men": "man", "women": "woman", "children": "child", "mice": "mouse"}
_ANY = ("unit", "square", "cubic", "integer", "number", "digit", "way", "point", "value", "solution", "total", "time")
"""Words behind a number that say nothing of it."""
_NO_UNIT = re.compile(
    r"or|and|more|less|than|over|under|at|least|most|mod|modulo|to|if|not|is|are|was|from|above|below|between|squared|"
    r"cubed|factorial|half|halves|thirds?|quarters?|fourths?|fifths?|tenths?|hundredths?|thousandths?|pi|sqrt|sin|cos|tan|log|ln|exp|max|gcd|lcm|"
    r"undefined|infinity|otherwise|plus|minus|times|divided|equals|where|when|for|only|but|unless|pm|am",
    re.I,
)
"""Words that change what is said, so that what they stand in is not a number with a unit."""
_POWERS_OF_TEN = {"hundred": 2, "thousand": 3, "lakh": 5, "million": 6, "crore": 7, "billion": 9, "trillion": 12}
_SCALES = {"dozen": "12"} | {word: f"10^{{{power}}}" for word, power in _POWERS_OF_TEN.items()}
"""What a word behind a number multiplies it by."""
_CURRENCIES = {"$": "dollar", "US$": "dollar", "\u20ac": "euro", "\u00a3": "GBP", "\u00a5": "yen", "\u20b9": "rupee"}
_SIGN = r"US\\?\$|USD|EUR|GBP|INR|Rs\.?|\\?[$\u20ac\u00a3\u00a5\u20b9]"
_CURRENCY = re.compile(rf"^([-+]?)\s*({_SIGN})\s*([-+]?\s*[\d.\\(].*)$", re.S)
_CURRENCY_BEHIND = re.compile(r"^(.*\d)\s*(\\?[$\u20ac\u00a3\u00a5\u20b9])$", re.S)
_PART = re.compile(r"(?:^|(?<=[A-Za-z])(?:\s*,|\s+and\b)?\s*)(\d{1,9}(?:\.\d{1,9})?)\s*([A-Za-z]+)\b")
_NAME = r"[A-Za-z]+\.?(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d))?"
_BEHIND = re.compile(
    rf"(?P<space>(?<=[\d}})\]!])\s*|(?<=\\pi)\s+)(?P<unit>{_NAME}(?:(?:\s*\\cdot\s*|[\s*/-]+){_NAME})*)$"
)
_NUMBER = re.compile(r"\\(?:frac|sqrt|pi|times|cdot|div)(?![A-Za-z])|[^A-Za-z\\]")
"""What a number may be made of."""
_INNERMOST = re.compile(r"\([^()]*\)|\{[^{}]*\}")
_SUM = re.compile(r"[\w!]\s*[-+]")
_CLEAR = {"cm", "mm", "km", "kg", "ft", "yd", "lb", "oz", "hr", "wk", "yr", "Hz", "Rs", *_COMPOUND, *_IRREGULAR}
"""Short names, and nouns, that nobody writes for a product of variables."""
_OF_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
"""Of an angle it is not the sine that is in degrees."""
_WORD = re.compile(r"(/)?\s*([A-Za-z]+)\.?(?:\s*\^\s*\{?\s*(-?\d)\s*\}?)?")


@dataclass(frozen=True)
class Unit:
    """What is measured, as powers of kinds (a word that is no unit of measurement is a kind), and its size in these."""

    powers: tuple[tuple[str, int], ...]
    size: Fraction


def currency_behind(text: str) -> str:
    """A sum of money with its currency as a word behind it: ``\\$5`` is ``5 dollar``."""
    if match := _CURRENCY.match(text):
        sign = match[2].replace("\\", "").strip(".")
        return f"{match[1]}{match[3].strip()} {_CURRENCIES.get(sign, sign)}"
    if match := _CURRENCY_BEHIND.match(text):
        return f"{match[1]} {_CURRENCIES[match[2].removeprefix(chr(92))]}"
    return text


def summed_units(text: str) -> str | None:
    """``2 hours 30 minutes`` as a number of the first unit; None of what is no such sum."""
    parts = _PART.findall(text)
    if len(parts) < 2 or _PART.sub("", text).strip():
        return None
    kinds, sizes = zip(*(_kind_of(name, spaced=True) for _, name in parts), strict=True)
    if len(set(kinds)) > 1 or any(size is None for size in sizes) or sorted(sizes, reverse=True) != list(sizes):
        return None
    total = sum(Fraction(number) * size for (number, _), size in zip(parts, sizes, strict=True))
    return f"{total / sizes[0]} {parts[0][1]}"


def spelled_out(name: str) -> str:
    """A name of one or two letters as a word that is not a product of variables: ``m`` is ``meter``."""
    kind, size = _KNOWN.get(name, ("", None))
    return next((each for each, of in _KNOWN.items() if of == (kind, size) and len(each) > 2), name)


def is_number(text: str) -> bool:
    """Whether there is no variable in ``text``."""
    return _NUMBER.sub("", text) == ""


def split_unit(text: str, told: bool = False) -> tuple[str, Unit | None]:
    """What stands before a unit at the end of ``text``, and the unit; the whole text and None without one.

    A letter that may be a variable is a unit behind a number alone. ``told`` says that a unit is to be expected, as the
    other answer has one.
    """
    # Only the end is searched: from each place on, the expression would run to the end of a long text.
    start = max(0, len(text) - 80)
    match = _BEHIND.search(text, start)
    if match is None:
        return text, None
    unit = match["unit"]
    scale = next((word for word in re.findall(r"[a-z]+", unit)[:1] if singular(word) in _SCALES), None)
    before = text[: match.start()]
    if scale is not None:
        before, unit = f"{before}\\cdot {_SCALES[singular(scale)]}", unit.partition(scale)[2].strip()
        if not unit:
            return before, None
    if _OF_ANGLE.search(before) or _is_product(before, unit, told):
        return text, None
    found = _read(unit, spaced=told or match["space"] != "" or scale is not None)
    return (text, None) if found is None else (before, found if found.powers else None)


def _is_product(before: str, unit: str, told: bool) -> bool:
    """Whether ``unit`` is rather one or more variables that what stands before is multiplied by."""
    words = [(word, int(power or 1), slash) for slash, word, power in _WORD.findall(unit)]
    if any(len(word) > 3 or word in _CLEAR or (len(word) == 3 and word in _KNOWN) for word, *_ in words):
        return False
    rest = before
    while (shorter := _INNERMOST.sub("0", rest)) != rest:
        rest = shorter
    in_order = any(len(word) == 3 and word in ascii_lowercase for word, *_ in words)
    if in_order or not is_number(before) or _SUM.search(rest):
        return True
    if told or any(len(word) > 1 for word, *_ in words):
        return False
    if "\\pi" in before or "\\sqrt" in before:
        return words[0][0] != "m"
    several = len(words) > 1 and not any(slash or power < 0 for _, power, slash in words)
    powers = any(power > 1 and word != "m" and not slash for word, power, slash in words)
    return (several and [word for word, *_ in words] != ["N", "m"]) or powers


def _read(text: str, spaced: bool) -> Unit | None:
    text = re.sub(r"\\cdot|\*|-(?=[A-Za-z])", " ", text)
    for short, full in _COMPOUND.items():
        text = re.sub(rf"\b{short}\b", full, text)
    powers: dict[str, int] = {}
    size, sign, power_of_next = Fraction(1), 1, 1
    unknown, words = "", [found for found in _WORD.findall(text) if found[1] not in ("of", "a", "an", "the")]
    if not words or words[-1][1] == "negative":  # in ``2a`` it is a variable; ``2 negative roots`` are two
        return None
    for slash, word, power in words:
        if _NO_UNIT.fullmatch(word):
            return None
        if slash or word in ("per", "each", "every"):
            sign = -1
            if not slash:
                continue
        if word in ("square", "sq", "cubic", "cu"):
            power_of_next = 3 if word.startswith("cu") else 2
            continue
        kind, factor = _kind_of(word, spaced)
        if kind is None:
            return None
        exponent = sign * int(power or 1) * power_of_next
        power_of_next = 1
        if not kind:
            continue
        if factor is None:  # a noun, and the last of several is the one that the others describe
            if sign > 0:
                powers.pop(unknown, None)
                unknown = kind
            factor = Fraction(1)
        powers[kind] = powers.get(kind, 0) + exponent
        size *= factor**exponent
    if powers.get("angle") and ("Celsius" in powers or "Fahrenheit" in powers):
        del powers["angle"]
    if powers.get("volume"):  # a litre is a cubic decimetre
        exponent = powers.pop("volume")
        powers["length"] = powers.get("length", 0) + 3 * exponent
        size *= Fraction(1, 1000) ** exponent
    return Unit(tuple(sorted((kind, power) for kind, power in powers.items() if power)), size)


def _kind_of(word: str, spaced: bool) -> tuple[str | None, Fraction | None]:
    """What a word measures, and its size; "" of one that says nothing, None where it is none of a unit."""
    for name in (word, singular(word), word.lower(), singular(word.lower())):
        if name in _KNOWN:
            # 5m may be five times m, 5 m and 5\text{m} are metres.
            return _KNOWN[name] if spaced or len(name) > 1 else (None, None)
    noun = singular(word.lower())
    if noun in _ANY:
        return "", None
    is_noun = spaced and len(word) > 2 and any(vowel in noun for vowel in "aeiou")
    return (noun, None) if is_noun else (None, None)


def singular(word: str) -> str:
    """A noun without the ending of the plural, as far as a rule of thumb goes."""
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 4 and word.endswith(("ches", "shes", "sses", "xes")):
        return word[:-2]
    return word[:-1] if len(word) > 2 and word.endswith("s") and not word.endswith("ss") else word
