"""``--rm-type ifbench``: whether a response follows instructions that a program can verify.

The checkers here are those of IFEval (Zhou et al. 2023, arXiv:2311.07911) that need no language model. Those of IFBench
(Pyatkin et al. 2025, arXiv:2507.02833) are its authors' program, which is not a package: where its directory is on
PYTHONPATH, its ``instructions_registry`` is asked for every other instruction.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from slime.data import Sample
from slime.grading.answers import after_reasoning
from slime.utils.errors import BadInputError

_REGISTRY = "instructions_registry"
_QUOTES = "\"'\u201c\u201d\u2018\u2019"
_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


async def ifbench_reward(args: Namespace, sample: Sample, response: str) -> float:
    """1 where the response follows every instruction of ``metadata["instruction_id_list"]``, else 0.

    Judged is what follows the reasoning. ``metadata["kwargs"]`` holds each one's parameters, in the same order.
    """
    ids, parameters = sample.metadata.get("instruction_id_list"), sample.metadata.get("kwargs")
    if not ids or parameters is None or len(ids) != len(parameters):
        raise BadInputError(
            f"rm_type ifbench needs metadata['instruction_id_list'] and metadata['kwargs'], lists of one length, in "
            f"sample {sample.index}: is --metadata-key set?"
        )
    given = [{key: value for key, value in (each or {}).items() if value is not None} for each in parameters]
    # In a thread: the checkers of others may take their time.
    return float(await asyncio.to_thread(_follows_all, sample, after_reasoning(response).strip(), ids, given))


def _follows_all(sample: Sample, response: str, ids: list[str], parameters: list[dict[str, Any]]) -> bool:
    # Each is looked at, also after one that is not followed: an unknown one must not hide until a response is good.
    followed = [_follows(sample, response, name, given) for name, given in zip(ids, parameters, strict=True)]
    return response != "" and all(followed)


def _follows(sample: Sample, response: str, name: str, given: dict[str, Any]) -> bool:
    where = f"sample {sample.index}: instruction {name!r}"
    try:
        if name in CHECKERS:
            return CHECKERS[name](response, **given)
        checkers = _others_checkers()
        if name not in checkers:
            raise BadInputError(
                f"{where} is not one of slime's ({', '.join(CHECKERS)})"
                + ("" if checkers else f"; to use IFBench's own, put its directory, with {_REGISTRY}.py, on PYTHONPATH")
            )
        instruction = checkers[name](name)
        instruction.build_description(**given)
        if "prompt" in (instruction.get_instruction_args() or {}):
            instruction.build_description(prompt=sample.metadata.get("prompt_text", sample.prompt))
        return bool(instruction.check_following(response))
    except (TypeError, KeyError) as error:
        raise BadInputError(f"{where} does not take the parameters {given}: {error}") from error


@functools.cache
def _others_checkers() -> Mapping[str, Any]:
    try:
        checkers: Mapping[str, Any] = importlib.import_module(_REGISTRY).INSTRUCTION_DICT
    except ModuleNotFoundError as error:
        if error.name != _REGISTRY:
            raise BadInputError(f"rm_type ifbench: {_REGISTRY} needs the package {error.name}") from error
        return {}
    return checkers


def _holds(count: int, relation: str, bound: int) -> bool:
    if relation not in ("at least", "less than"):
        raise BadInputError(f"rm_type ifbench: a relation is 'at least' or 'less than', not {relation!r}")
    return count >= bound if relation == "at least" else count < bound


def _parts(text: str, separator: str) -> list[str]:
    return [part.strip() for part in re.split(separator, text)]


def _has_words(text: str, words: list[str]) -> list[bool]:
    return [re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is not None for word in words]


def _existence(text: str, keywords: list[str]) -> bool:
    return all(keyword.lower() in text.lower() for keyword in keywords)


def _frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return _holds(text.lower().count(keyword.lower()), relation, frequency)


def _letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _holds(text.lower().count(letter.lower()), let_relation, let_frequency)


def _number_words(text: str, num_words: int, relation: str) -> bool:
    return _holds(len(re.findall(r"\w+", text)), relation, num_words)


def _number_paragraphs(text: str, num_paragraphs: int) -> bool:
    paragraphs = _parts(text, r"\s?\*\*\*\s?")
    inner = paragraphs[bool(not paragraphs[0]) : len(paragraphs) - bool(not paragraphs[-1])]
    return len(inner) == num_paragraphs and all(inner)


def _nth_paragraph(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = [part for part in _parts(text, r"\n\n") if part]
    if len(paragraphs) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    word = paragraphs[nth_paragraph - 1].split()[0].lstrip(_QUOTES)
    return re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


def _postscript(text: str, postscript_marker: str) -> bool:
    marker = r"\s*".join(re.escape(c) for c in postscript_marker.lower() if not c.isspace())
    return re.search(marker, text.lower()) is not None


def _number_bullets(text: str, num_bullets: int) -> bool:
    return len(re.findall(r"^[ \t]*(?:\*[^*]|-).*$", text, re.MULTILINE)) == num_bullets


def _highlights(text: str, num_highlights: int) -> bool:
    found = re.findall(r"\*\*([^\n*]+)\*\*|\*([^\n*]+)\*", text)
    return sum(bool((strong or weak).strip()) for strong, weak in found) >= num_highlights


def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"\s?{re.escape(section_spliter.strip())}\s?\d+\s?", text)) >= num_sections


def _json(text: str) -> bool:
    bare = re.sub(r"^```(?:json|JSON|Json)?|```$", "", text).strip()
    try:
        json.loads(bare, parse_int=str)  # of an integer of any length
    except (ValueError, RecursionError):  # brackets in brackets, more than can be read
        return False
    return True


def _two_responses(text: str) -> bool:
    given = _parts(text, r"\*{6}")
    inner = [part for place, part in enumerate(given) if part or 0 < place < len(given) - 1]
    return len(inner) == 2 and all(inner) and inner[0] != inner[1]


def _end(text: str, end_phrase: str) -> bool:
    return text.strip(_QUOTES).lower().endswith(end_phrase.strip().lower())


def _capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    words = re.findall(r"[^\W\d_]+(?:['-][^\W\d_]+)*", text)
    return _holds(sum(word.isupper() for word in words), capital_relation, capital_frequency)


CHECKERS: dict[str, Callable[..., bool]] = {
    "keywords:existence": _existence,
    "keywords:frequency": _frequency,
    "keywords:forbidden_words": lambda text, forbidden_words: not any(_has_words(text, forbidden_words)),
    "keywords:letter_frequency": _letter_frequency,
    "length_constraints:number_words": _number_words,
    "length_constraints:number_paragraphs": _number_paragraphs,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        len(re.findall(r"\[[^\[\]\n]+\]", text)) >= num_placeholders
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _number_bullets,
    "detectable_format:constrained_response": lambda text: any(answer in text for answer in _CONSTRAINED),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": lambda text: re.search(r"<<[^\n<>]*[^\s<>][^\n<>]*>>", text) is not None,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: text.lower().startswith(
        prompt_to_repeat.strip().lower()
    ),
    "startend:end_checker": _end,
    "startend:quotation": lambda text: len(text) > 1 and text[0] == text[-1] == '"',
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": str.isupper,
    "change_case:english_lowercase": str.islower,
    "punctuation:no_comma": lambda text: "," not in text,
}
"""By instruction id: takes the response and the instruction's own parameters."""
