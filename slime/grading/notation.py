"""One spelling for what LaTeX, Unicode and plain text write in many ways, without a change of what it means."""

from __future__ import annotations

import re
import unicodedata

from slime.grading.numerals import written_out
from slime.grading.units import currency_behind, spelled_out

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_SUBSCRIPTS = {ord("\u2080") + digit: str(digit) for digit in range(10)}
_SUBSCRIPT = re.compile("[\u2080-\u2089]+")
_ROOTS = {"\u221a": "\\sqrt", "\u221b": "\\sqrt[3]", "\u221c": "\\sqrt[4]"}
_BRACKETED = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_ROOT = re.compile(rf"([\u221a-\u221c])\s*({_BRACKETED}|\d+(?:\.\d+)?|[A-Za-z])?")
"""Unlike TeX's, which takes one digit, it takes the whole number behind it."""
_INVISIBLE = re.compile("[\u200b-\u200d\u2060\ufeff]")
_SYMBOLS = {
    "\u2010": "-",
    "\u2012": "-",
    "\u2014": "-",
    "\u2212": "-",
    "\u2013": "-",
    "\u00d7": "\\times ",
    "\u00b7": "\\cdot ",
    "\u22c5": "\\cdot ",
    "\u00f7": "\\div ",
    "\u03c0": "\\pi ",
    "\u03b8": "\\theta ",
    "\u03b1": "\\alpha ",
    "\u03b2": "\\beta ",
    "\u221e": "\\infty ",
    "\u2264": "\\le ",
    "\u2265": "\\ge ",
    "\u2260": "\\ne ",
    "\u222a": "\\cup ",
    "\u2229": "\\cap ",
    "\u2205": "\\emptyset ",
    "\u2208": "\\in ",
    "\u2248": "\\approx ",
    "\u00b1": "\\pm ",
    "\u00b0": "^\\circ ",
    "\u3001": ",",
    "\u3002": ".",
}
_SYNONYMS = {
    "leq": "\\le",
    "geq": "\\ge",
    "leqslant": "\\le",
    "geqslant": "\\ge",
    "lt": "<",
    "gt": ">",
    "neq": "\\ne",
    "varnothing": "\\emptyset",
    "dfrac": "\\frac",
    "tfrac": "\\frac",
    "cfrac": "\\frac",
    "dbinom": "\\binom",
    "tbinom": "\\binom",
    "degree": "^\\circ",
    "lbrace": "\\{",
    "rbrace": "\\}",
    "langle": "(",
    "rangle": ")",
    "lvert": "|",
    "rvert": "|",
    "land": " and ",
    "lor": " or ",
}
_COMMAND = re.compile(r"\\([A-Za-z]+)\s*(?=([A-Za-z0-9])?)")
_DROPPED = re.compile(
    r"\\(?:displaystyle|textstyle|limits|(?:left|right)\s*\.|left(?![a-z])|right(?![a-z])|[bB]igg?[lrm]?(?![a-z])|!)\s*"
)
_SPACING = re.compile(r"\\(?:[,;:> ]|quad\b|qquad\b|hspace\{[^{}]*\}|enspace\b|thinspace\b)|~|\s+")
_DOLLAR = re.compile(r"(?<!\\)\$")
_LINE_END = re.compile(r"\\\\(?:\[[^\]]*\])?")
_DELIMITERS = re.compile(r"\\[()\[\]]")
_FONT = re.compile(
    r"\\(?:text(?:bf|it|rm|normal|tt|sf|sc)?|math(?:rm|bf|it|sf|tt|normal)|mbox|hbox|boldsymbol|bm|operatorname\*?|emph|"
    r"underline)\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_FONT_BEFORE_LETTER = re.compile(rf"{_FONT.pattern}(?=[A-Za-z0-9\\])")
_UNIT = re.compile(
    r"((?:[\d!\]]|(?<!\([A-J])\)|[\d)]\}|\\pi|(?<![A-Za-z\\])[a-z])\s*\\(?:text|textrm|mathrm|mbox|hbox)\s*\{\s*)"
    r"([A-Za-z]{1,2})(?![A-Za-z])([^{}]*\})"
)
"""In upright letters behind a number or a variable; in italics it may be a variable."""
_CIRC = re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))\s*")
_GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*\}"
_BARE_FIRST = re.compile(r"\\(frac|binom)\s*(\\[A-Za-z]+|[^\s{}\\\[])")
_BARE_SECOND = re.compile(rf"\\(frac|binom)\s*({_GROUP})\s*(\\[A-Za-z]+|[^\s{{}}\\])")
_BARE_ROOT = re.compile(
    rf"\\sqrt\s*(\[[^\[\]]*\])?\s*(\\(?:frac|binom){_GROUP}{_GROUP}|{_BRACKETED}|\\[A-Za-z]+|[^\s{{}}\\\[])"
)
_ODD_ROOT = re.compile(r"(\\sqrt\[\d*[13579]\])\{\s*-((?:[^-+{}]|\{[^{}]*\})+)\}")
"""Of a negative number it is the real root."""
_LEAD = re.compile(
    r"^(?:(?:the|my)\s+)?(?:final\s+)?(?:answer|result)(?:\s+is)?\s*[:=]?\s*|^\\approx\s*|^=\s*"
    r"|^(?:[A-Za-z]+ ){1,6}(?:is|are|equals)\s*:?\s+(?=[-\d\\(\[.])",
    re.I,
)
_IDLE_GROUP = re.compile(r"(?<![\w\\})\]^_])\{\s*([\w.]+)\s*\}")
_SUCH_THAT = re.compile(r"(\\\{[^{}:|]*?)(?::|\||\\mid(?![A-Za-z]))\s*")
_PLAIN_ROOT = re.compile(rf"(?<![\\A-Za-z])sqrt\s*({_BRACKETED}|\d+(?:\.\d+)?)")
_PLAIN = {
    r"(?<![\\A-Za-z])(sqrt|sin|cos|tan|ln|log|exp|pi)(?![A-Za-z])": r"\\\1 ",
    r"(?<!\\)\b[Ii]nfinity\b": r"\\infty ",
    r"\*\*": "^",
    r"<=": r"\\le ",
    r">=": r"\\ge ",
    r"!=": r"\\ne ",
}
"""Plain text for what LaTeX has a command for."""
_BARE_SET = re.compile(r"\{[^{}]*,[^{}]*\}$")
_TIMES_TEN = re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)")
_ONES = re.findall(
    r"\w+",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen",
)
_TENS = re.findall(r"\w+", "twenty thirty forty fifty sixty seventy eighty ninety")
_NUMBER_WORDS = {
    **{word: value for value, word in enumerate(_ONES)},
    **{word: 10 * place for place, word in enumerate(_TENS, 2)},
    **{f"{ten}-{one}": 10 * place + _ONES.index(one) for place, ten in enumerate(_TENS, 2) for one in _ONES[1:10]},
}
_IN_WORDS = re.compile(rf"({'|'.join(sorted(_NUMBER_WORDS, key=len, reverse=True))})((?: [A-Za-z]+)*\.?)$", re.I)
_BASE_IN_WORDS = re.compile(rf"_\s*\{{?\s*({'|'.join(_ONES[2:17])})\b\s*\}}?", re.I)
_ORDINAL = re.compile(r"(?<=\d) ?\^?\{?(?:st|nd|rd|th)\b\}?")
_EMPTY_SET = re.compile(r"\\\{\s*\\\}")


def canonical(text: str) -> str:
    """An answer without what does not change its meaning; a space stands only where there was one."""
    text = _unified(_ascii(text))
    text = _EMPTY_SET.sub(r"\\emptyset", text)
    text = _in_digits(_LEAD.sub("", text.strip(" `")))
    if _BARE_SET.match(text):
        text = f"\\{text[:-1]}\\}}"
    while (rooted := _PLAIN_ROOT.sub(r"\\sqrt{\1}", text)) != text:  # one within another
        text = rooted
    for plain, latex in _PLAIN.items():
        text = re.sub(plain, latex, text)
    text = _SUCH_THAT.sub(r"\1\\mid ", text)
    text = currency_behind(text)
    text = re.sub(r"\\?%", " percent", _ORDINAL.sub("", _TIMES_TEN.sub(r"\\times ", text)))
    text = re.sub(r"\\?[$#]", "", text)
    text = _with_groups(text)
    return written_out(text).strip().rstrip(".;,").strip()


def compact(text: str) -> str:
    """``text`` without spaces but for those between digits, where they part numbers, and between words."""
    text = re.sub(r"(?<![\dA-Za-z]) | (?![\dA-Za-z])", "", text)
    return re.sub(r"(?<=\d) (?=[A-Za-z])|(?<=[A-Za-z]) (?=\d)", "", text)


def _in_digits(text: str) -> str:
    """A number that is written as a word, alone or before others, and the base of one."""
    text = _BASE_IN_WORDS.sub(lambda match: f"_{{{_NUMBER_WORDS[match[1].lower()]}}}", text)
    match = _IN_WORDS.match(re.sub(r"(?<=ty) (?=[a-z])", "-", text) if text[:1].isalpha() else text)
    return text if match is None else f"{_NUMBER_WORDS[match[1].lower()]}{match[2]}"


def _ascii(text: str) -> str:
    if text.isascii():
        return text
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", _INVISIBLE.sub("", text))
    text = _SUBSCRIPT.sub(lambda match: f"_{{{match[0].translate(_SUBSCRIPTS)}}}", text)
    text = _with_roots(text)
    letters = []
    for letter in text:
        plain = unicodedata.normalize("NFKC", letter)
        if "\u2044" in plain:  # the stroke of a fraction that is one letter
            top, _, bottom = plain.partition("\u2044")
            plain = f"\\frac{{{top}}}{{{bottom}}}"
        letters.append(_SYMBOLS.get(letter) or "".join(_SYMBOLS.get(each, each) for each in plain))
    return "".join(letters)


def _with_roots(text: str) -> str:
    """Roots that are signs, also within each other's brackets, as commands."""
    while _ROOT.search(text):
        text = _ROOT.sub(lambda match: _ROOTS[match[1]] + (f"{{{match[2]}}}" if match[2] else " "), text)
    return text


def _unified(text: str) -> str:
    """One name for each command, no fonts, and degrees as a word."""
    text = text.strip()
    for mark in ("", "**", "__"):
        text = text.removeprefix(mark).removesuffix(mark).strip()
        text = text if text.endswith("..") else text.rstrip(".;,").strip()
    if re.fullmatch(r"([*_])[^*_]+\1", text):  # ``z*`` is another name than ``z``
        text = text[1:-1].strip()
    if len(_DOLLAR.findall(text)) % 2 == 0:  # one alone is a currency
        text = _DOLLAR.sub(" ", text)
    text = _LINE_END.sub(r" \\cr ", text)
    text = _DELIMITERS.sub(" ", text).replace("{,}", ",")
    text = _SPACING.sub(" ", _DROPPED.sub("", text))
    for _ in range(4):  # one within another
        plainer = _FONT.sub(r" \1", _FONT_BEFORE_LETTER.sub(r" \1 ", _UNIT.sub(_spelled_out, text)))
        if plainer == text:
            break
        text = plainer
    text = _COMMAND.sub(_renamed, text)
    return re.sub(r" +", " ", _CIRC.sub(" degree ", text)).strip()


def _spelled_out(match: re.Match[str]) -> str:
    return f"{match[1]} {spelled_out(match[2])}{match[3]}"


def _renamed(match: re.Match[str]) -> str:
    name = _SYNONYMS.get(match[1], f"\\{match[1]}")
    return f"{name} " if match[2] else name


def _with_groups(text: str) -> str:
    """``\\frac12`` as ``\\frac{1}{2}``, ``\\sqrt3`` as ``\\sqrt{3}``, ``{5}`` as ``5``."""
    text = _BARE_FIRST.sub(r"\\\1{\2}", text)
    text = _BARE_SECOND.sub(r"\\\1\2{\3}", text)
    text = re.sub(r"\\(frac|sqrt|binom) (?=[{\[])", r"\\\1", text)
    text = re.sub(rf"\\frac({_GROUP}) (?=\{{)", r"\\frac\1", text)
    text = _ODD_ROOT.sub(r"(-\1{\2})", _BARE_ROOT.sub(lambda match: f"\\sqrt{match[1] or ''}{{{match[2]}}}", text))
    text = re.sub(r"_\{\s*(\w)\s*\}(?!\w)", r"_\1", text)
    return _IDLE_GROUP.sub(r"\1", text)
