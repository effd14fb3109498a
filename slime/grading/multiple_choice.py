"""``--rm-type gpqa``: which choice a response settles on, and whether it is the right one."""

from __future__ import annotations

import re
import unicodedata
from argparse import Namespace
from string import ascii_uppercase
from typing import Any

from slime.data import Sample
from slime.grading.answers import after_reasoning, label_problem, label_text
from slime.utils.errors import BadInputError, SettingError

_COMMON, _MOST = 4, 10
"""Where the metadata lists no choices: A to J count where a response says which it takes, A to D as lone letters."""
_LATIN = "A-Za-z0-9_\u00c0-\u024f\u0370-\u04ff"
"""Letters that make words of those beside them. Chinese, Japanese and Korean write no space before a choice."""
_BRACKETED = r"\(([A-Za-z])\)|\[([A-Za-z])\]"
_ALONE = rf"(?:{_BRACKETED}|(?<!\w)([A-Z])(?!\w|\s*=))"
"""In brackets of either case; bare only as a capital, because "a" is a word, and in no equation."""
_LETTER = (
    rf"(?:{_BRACKETED}|(?<![{_LATIN}])([A-Z])(?![{_LATIN}]|\s*=)|(?<!\w)([a-z])(?=[\s*_`\"'$}})]{{0,4}}(?:[.,;\n]|$)))"
)
"""Where a choice is stated: a small letter too, with nothing behind it."""
_MARK = r"[\s*_`\"'$\u300c\u300e\u3010]"
_OPENING = rf"(?:{_MARK}|\\[(\[]){{0,6}}(?:\\(?:boxed|text|textbf|mathbf|mathrm)\{{[\s*]{{0,2}}){{0,2}}"
_CLOSING = r"[\s*_`\"'$}.,\u300d\u300f\u3011]{0,4}"
_BEFORE = "|".join(
    (
        r"(?i:\b(?:answer|option|choice)(?:\s+(?:is|(?:would|must|should)\s+be)\s?:?|[\s*_]{0,4}:)(?:\s+(?:option|choice)\b)?"
        r"|\bfinal\s+answer\b[\s:*_]{0,4}(?:is\b)?)|\\boxed\{",
        r"(?i:\b(?:r\u00e9ponse|respuesta|resposta|risposta|antwort|\u043e\u0442\u0432\u0435\u0442)"
        r"(?:\s+(?:correcta?|corretta|correcte|richtige))?(?:\s+(?:est|es|\u00e9|\u00e8|ist|lautet))?\s{0,2}:?)",
        r"\u7b54\u6848(?:\u5e94\u8be5|\u61c9\u8a72|\u5e94|\u61c9)?[\u662f\u4e3a\u70ba\u9009\u9078]?\s{0,2}:?(?:\u9009\u9879|\u9078\u9805)?",
        r"(?<!\u4e0d)(?<!\u80fd)[\u9009\u9078][\u62e9\u64c7]?(?:\u9009\u9879|\u9078\u9805|\u9879|\u9805)?\s{0,2}:?",
        r"(?:\u9009\u9879|\u9078\u9805|\u8ba4\u4e3a|\u8a8d\u70ba|\u800c)[\u662f\u4e3a\u70ba]\s{0,2}:?",
        r"(?:\u6b63\u89e3|\u6b63\u7b54|\u7b54\u3048|\u89e3\u7b54|\u56de\u7b54)[\u306f\u304c]?\s{0,2}:?(?:\u9078\u629e\u80a2)?",
        r"\ub2f5(?:\uc548)?[\uc740\ub294\uc774]?\s{0,2}:?",
    )
)
"""What states a choice: English; French, Spanish, Portuguese, Italian, German, Russian; Chinese; Japanese; Korean."""
_BEHIND = (
    r"(?i:is\s+(?:the\s+)?(?:correct|right|answer)\b)"
    r"|[\u9879\u9805]?\u662f?\u6b63[\u786e\u78ba]"
    r"|\u3092\u9078|[\u304c\u306f](?:\u6b63\u89e3|\u6b63\u3057\u3044|\u6b63\u7b54|\u9069\u5207)"
    r"|\ubc88?[\uac00\uc774]\s{0,2}(?:\uc815\ub2f5|\ub9de|\uc633)"
)
_DENIED = (
    r"(?!\s{0,2}[\u9879\u9805]?\u662f?[\u4e0d\u9519\u932f]|\u3067\u306f\u306a|[\u306f\u304c](?:\u8aa4|\u9055)"
    r"|[\uac00\uc774\ub294\uc740]\s?(?:\uc544\ub2c8|\ud2c0))"
)
"""Not the one that is wrong."""
_STATED = re.compile(rf"(?:{_BEFORE}){_OPENING}{_LETTER}{_DENIED}|{_LETTER}{_CLOSING}\s*(?:{_BEHIND})")
_STANDALONE = re.compile(_ALONE)
_ONE = rf"(?:\([A-Za-z]\)|\[[A-Za-z]\]|(?<![{_LATIN}])[A-Z](?![{_LATIN}]))"
_JOINED = r"\s*(?:[,/&\u3001]\s*(?:and\b|or\b)?|\band\b|\bor\b|\u548c|\u6216\u8005?|\u3068|\u304b)\s*"
_SEVERAL = re.compile(rf"{_ONE}(?:{_JOINED}{_ONE})+(?!\s+is\b)")
"""Choices side by side: who names them has not chosen one."""
_FEW = rf"{_ONE}(?:(?:,\s*{_ONE}){{0,8}},?\s*(?:and|or|nor)\s+{_ONE}(?!\s+is\b))?"
_WRONG = (
    r"\s+(?:(?:all|both|each|clearly|also|therefore|thus|hence|simply|obviously|certainly|the|an|a)\s+){0,2}"
    r"(?:wrong|incorrect|ruled\s+out|eliminated|excluded|rejected|(?:not|n['\u2019]t)(?:\s+(?:be|(?:the\s+)?(?:correct|right|best|answer|it))\b"
    r"|(?=[\s*_]*(?:[.,;]|$))))"
)
_DENIALS = (
    rf"(?i:n['\u2019]t|\b(?:not|cannot|never|neither|nor|rather\s+than|instead\s+of|unlikely\s+to|rul(?:e|es|ed|ing)\s+out"
    rf"|eliminat(?:e|es|ed|ing)|exclud(?:e|es|ed|ing)|reject(?:s|ed|ing)?))\s+(?i:(?:be|choose|pick|select|go\s+with)\s+)?"
    rf"(?i:(?:the\s+)?(?:answer|option|choice)s?\s+)?{_MARK}{{0,4}}{_FEW}(?!['\u2019\w])",
    rf"\b(?i:nicht|pas|non\s+\u00e8|no\s+es|n\u00e3o\s+\u00e9|\u043d\u0435)\s+{_MARK}{{0,4}}{_ONE}",
    r"(?:\u4e0d\u662f|[\u5e76\u4e26]\u975e|\u4e0d[\u9009\u9078\u4e3a\u70ba]|\u6392\u9664)\s{0,2}(?:\u9009\u9879|\u9078\u9805)?"
    rf"{_ONE}(?:[\u3001\u548c\u4e0e\u8207]{_ONE}){{0,8}}",
    rf"{_ONE}(?:[\u3001\u548c\u4e0e\u8207]{_ONE}){{0,8}}\s?[\u9009\u9078]?[\u9879\u9805]?[\u90fd\u5747]?\u662f?(?:[\u9519\u932f]|\u4e0d[\u6b63\u5bf9\u5c0d])",
    rf"{_ONE}(?:\u3067\u306f\u306a[\u304f\u3044]?|[\u306f\u304c](?:\u8aa4|\u9055|\u9593\u9055|\u6b63\u3057\u304f\u306a))",
    rf"{_ONE}\ubc88?[\uac00\uc774\ub294\uc740]\s?(?:\uc544\ub2c8|\ud2c0)",
    rf"{_ONE}{_MARK}{{0,4}}(?i:(?:is|was|looks|seems)\b{_WRONG}|(?:is|was)n['\u2019]t(?=\s+(?:the\s+)?(?:correct|right|answer)|[.,;])"
    r"|(?:cannot|can['\u2019]t|can\s+not|could\s+not|couldn['\u2019]t)\s+be\b)",
)
_LISTED = r"\s*(?:,\s*(?:and|or)\b|[,/&\u3001]|\band\b|\bor\b|\u548c)\s*"
_DENIED_ONES = re.compile("|".join(_DENIALS), re.M)
_DENIED_MANY = re.compile(
    rf"(?P<first>{_ONE})(?P<rest>(?:{_LISTED}{_ONE}){{1,9}}){_MARK}{{0,4}}(?i:(?:are|were|look|seem)\b{_WRONG}|(?:cannot|can['\u2019]t|can\s+not)\s+be\b"
    r"|(?:are|were)n['\u2019]t\b)",
    re.M,
)
_STATING = re.compile(rf"(?:{_BEFORE}){_OPENING}$")
_HYPHENS = dict.fromkeys((0x2010, 0x2011, 0x2012, 0x2013, 0x2014, 0x2212), "-")
_PRONOUN = re.compile(r"\bI(?=['\u2019]|\s+(?!is\b|because\b)[a-z])")
_ARTICLE = re.compile(r"(?:^|(?<=[.!?:]\s))A(?=\s+(?!is\b|and\b|or\b|because\b)[a-z])", re.M)
"""That begins a sentence."""


async def gpqa_reward(args: Namespace, sample: Sample, response: str) -> float:
    """1 where the response chooses the right letter; without a letter, where it contains the right answer's text, and
    that of no other choice.

    The right one: ``metadata["correct_letter"]``, else the label: a letter, an index into ``metadata["choices"]`` or
    the text of one of these. The chosen one: the last "the answer is X", "X is correct" or "final answer: X" after the
    reasoning (in ten languages), or the one that stands in a box; else the last letter there that stands alone and is
    no word. Letters joined by "or", "and" or a comma are no choice.
    """
    if problem := choices_problem(sample.metadata.get("choices")):
        raise SettingError(f"rm_type gpqa: metadata['choices'] of sample {sample.index} {problem}")
    choices = _choices(sample.metadata.get("choices"))
    right, text = _right_answer(sample, choices)
    solution = unicodedata.normalize("NFKC", after_reasoning(response))  # of wide letters and brackets makes plain ones
    if right is not None:
        affirmed, denied = _without_denied(solution)
        chosen = _chosen_letter(affirmed, choices, right)
        if chosen is not None or right in denied:
            return float(chosen == right)
    if right not in choices:
        return float(_mentioned({"": text or ""}, solution) == [""])
    return float(_mentioned(choices, solution) == [right])


def choices_problem(choices: Any) -> str | None:
    """Why ``metadata["choices"]`` lists no choices, to follow its name; None where it does, or is empty."""
    if choices is None or isinstance(choices, (list, tuple, dict)):
        return None
    return f"is a {type(choices).__name__}, not a list or an object of choices"


def _choices(given: Any) -> dict[str, str]:
    """Letter -> text, of a list in order or of a mapping."""
    if not given:
        return {}
    if isinstance(given, dict):
        return {str(letter).strip().upper(): str(text) for letter, text in given.items()}
    return dict(zip(ascii_uppercase, map(str, given), strict=False))


def _right_answer(sample: Sample, choices: dict[str, str]) -> tuple[str | None, str | None]:
    letter, label = sample.metadata.get("correct_letter"), sample.label
    if letter is None and (label is None or label == [] or str(label).strip() == ""):
        raise BadInputError(
            f"rm_type gpqa needs metadata['correct_letter'] or a label, sample {sample.index} has neither: are "
            "--metadata-key and --label-key set?"
        )
    if letter is not None:
        letter = str(letter).strip().strip("().").upper()
        return letter, choices.get(letter)
    if problem := label_problem(label):
        raise SettingError(f"rm_type gpqa: the label of sample {sample.index} {problem}")
    words = label_text(label).strip()
    for its_letter, text in choices.items():
        if _plain(text) == _plain(words):
            return its_letter, text
    if re.fullmatch(r"\(?[A-Za-z][).]?", words):
        letter = words.strip("().").upper()
        return letter, choices.get(letter)
    if words.isdecimal() and len(words) < 5 and int(words) < len(choices):
        return list(choices.items())[int(words)]
    return None, words


def _without_denied(text: str) -> tuple[str, set[str]]:
    """``text`` without the choices that it says are wrong, and their letters."""
    denied: set[str] = set()

    def drop(match: re.Match[str], start: int = 0) -> str:
        said = match[0][start:]
        denied.update(letter.strip("()[]").upper() for letter in re.findall(_ONE, said))
        return match[0][:start] + " "

    def drop_many(match: re.Match[str]) -> str:
        """Of "the answer is A, B and C are wrong" A is the answer."""
        before = text[max(0, match.start() - 60) : match.start()]
        return drop(match, len(match["first"]) if _STATING.search(before) else 0)

    text = _DENIED_MANY.sub(drop_many, text)
    return _DENIED_ONES.sub(drop, text), denied


def _chosen_letter(text: str, choices: dict[str, str], right: str) -> str | None:
    known = {*(choices or ascii_uppercase[:_MOST]), right}

    def unless_several(match: re.Match[str]) -> str:
        named = {letter.upper() for letter in re.findall("[A-Za-z]", re.sub(r"\b(?:and|or)\b", "", match[0]))}
        return " " if len(named & known) > 1 else match[0]

    text = _SEVERAL.sub(unless_several, _PRONOUN.sub(" ", text))
    for pattern, searched, count in ((_STATED, text, _MOST), (_STANDALONE, _ARTICLE.sub(" ", text), _COMMON)):
        found = [next(filter(None, match.groups())).upper() for match in pattern.finditer(searched)]
        valid = [letter for letter in found if letter in (choices or ascii_uppercase[:count]) or letter == right]
        if valid:
            return valid[-1]
    return None


def _mentioned(choices: dict[str, str], solution: str) -> list[str]:
    """The letters of those whose texts stand in ``solution``, not as a part of another's, nor of another number."""
    found, text = [], _plain(solution)
    plain = {letter: _plain(words) for letter, words in choices.items()}
    for letter, words in sorted(plain.items(), key=lambda choice: -len(choice[1])):
        if not words:
            continue
        before = r"(?<![\w^-])(?<![^.]\.)(?<!\d[,/])" if words[0].isdigit() else r"(?<!\w)"
        behind = r"(?![\w^%]|[.,/-]\d)" if words[-1].isdigit() else r"(?!\w)"
        text, count = re.subn(f"{before}{re.escape(words)}{behind}", " ", text)
        found += [letter] if count else []
    return found


def _plain(text: str) -> str:
    plain = unicodedata.normalize("NFKC", text).translate(_HYPHENS)
    return " ".join(plain.casefold().split())
