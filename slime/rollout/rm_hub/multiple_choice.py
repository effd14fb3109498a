"""``--rm-type gpqa``: which choice a response settles on, and whether it is the right one."""

from __future__ import annotations

import re
import string
from argparse import Namespace
from typing import Any

from slime.rollout.rm_hub.answers import after_reasoning, label_problem
from slime.utils.errors import BadInputError, SettingError
from slime.utils.types import Sample

_COMMON, _MOST = 4, 10
"""Where the metadata lists no choices: A to J count where a response says which it takes, A to D as lone letters."""
_LETTER = r"(?:\(([A-Za-z])\)|\[([A-Za-z])\]|(?<!\w)([A-Z])(?!\w|\s*=))"
"""In brackets of either case; bare only as a capital, because "a" is a word, and in no equation."""
_MARK = r"[\s*_`\"'$]"
_OPENING = rf"(?:{_MARK}|\\[(\[]){{0,6}}(?:\\(?:boxed|text|textbf|mathbf|mathrm)\{{[\s*]{{0,2}}){{0,2}}"
_CLOSING = r"[\s*_`\"'$}.,]{0,4}"
_STATED = re.compile(
    r"(?:(?i:\b(?:answer|option|choice)(?:\s+(?:is|(?:would|must|should)\s+be)|[\s*_]{0,4}:)"
    r"|\bfinal\s+answer\b[\s:*_]{0,4}(?:is\b)?)|\\boxed\{)"
    rf"{_OPENING}{_LETTER}|{_LETTER}{_CLOSING}\s*(?i:is\s+(?:the\s+)?(?:correct|right)\b)"
)
_STANDALONE = re.compile(_LETTER)
_PRONOUN = re.compile(r"\bI(?=['\u2019]|\s+(?!is\b|because\b)[a-z])")
_ARTICLE = re.compile(r"(?:^|(?<=[.!?:]\s))A(?=\s+(?!is\b|and\b|or\b|because\b)[a-z])", re.M)
"""That begins a sentence."""


async def gpqa_reward(args: Namespace, sample: Sample, response: str) -> float:
    """1 where the response chooses the right letter; without a letter, where it contains the right answer's text.

    The right one: ``metadata["correct_letter"]``, else the label: a letter, an index into ``metadata["choices"]`` or
    the text of one of these. The chosen one: the last "the answer is X", "X is correct" or "final answer: X" after the
    reasoning, or the one that stands in a box; else the last letter there that stands alone and is no word.
    """
    choices = _choices(sample.metadata.get("choices"))
    right, text = _right_answer(sample, choices)
    solution = after_reasoning(response)
    chosen = None if right is None else _chosen_letter(solution, choices, right)
    if chosen is not None:
        return float(chosen == right)
    return float(text is not None and _contains(solution, text))


def _letters(count: int) -> str:
    return string.ascii_uppercase[:count]


def _choices(given: Any) -> dict[str, str]:
    """Letter -> text, of a list in order or of a mapping."""
    if not given:
        return {}
    if isinstance(given, dict):
        return {str(letter).strip().upper(): str(text) for letter, text in given.items()}
    return dict(zip(_letters(len(given)), map(str, given), strict=False))


def _right_answer(sample: Sample, choices: dict[str, str]) -> tuple[str | None, str | None]:
    """Its letter and its text, as far as they are known."""
    letter, label = sample.metadata.get("correct_letter"), sample.label
    if letter is None and (label is None or str(label).strip() == ""):
        raise BadInputError(
            f"rm_type gpqa needs metadata['correct_letter'] or a label, sample {sample.index} has neither: are "
            "--metadata-key and --label-key set?"
        )
    if letter is not None:
        letter = str(letter).strip().strip("().").upper()
        return letter, choices.get(letter)
    if problem := label_problem(label):
        raise SettingError(f"rm_type gpqa: the label of sample {sample.index} {problem}")
    words = str(label).strip()
    for its_letter, text in choices.items():
        if _plain(text) == _plain(words):
            return its_letter, text
    if re.fullmatch(r"\(?[A-Za-z][).]?", words):
        letter = words.strip("().").upper()
        return letter, choices.get(letter)
    if words.isdecimal() and int(words) < len(choices):
        return list(choices.items())[int(words)]
    return None, words


def _chosen_letter(text: str, choices: dict[str, str], right: str) -> str | None:
    text = _PRONOUN.sub(" ", text)
    for pattern, searched, count in ((_STATED, text, _MOST), (_STANDALONE, _ARTICLE.sub(" ", text), _COMMON)):
        found = [next(filter(None, match.groups())).upper() for match in pattern.finditer(searched)]
        valid = [letter for letter in found if letter in (choices or _letters(count)) or letter == right]
        if valid:
            return valid[-1]
    return None


def _contains(text: str, answer: str) -> bool:
    pattern = rf"(?<!\w){re.escape(_plain(answer))}(?!\w)"
    return bool(_plain(answer)) and re.search(pattern, _plain(text)) is not None


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
