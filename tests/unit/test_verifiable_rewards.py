"""Rewards of choices and of instructions that a program can verify."""

from __future__ import annotations

import asyncio
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.data import Sample
from slime.grading import instructions
from slime.rollout.rm_hub import async_rm
from slime.utils.errors import BadInputError

NUM_GPUS = 0

Args = Callable[..., Namespace]
PLANETS = ["Mercury", "Venus", "the Earth", "42"]


def score(args: Namespace, response: str, label: Any = None, **metadata: Any) -> Any:
    return asyncio.run(async_rm(args, Sample(index=3, response=response, label=label, metadata=metadata)))


@pytest.mark.parametrize(
    ("response", "chosen"),
    [
        ("The answer is B.", "B"),
        ("the correct answer is: **(b)**", "B"),
        (r"The final answer is $\boxed{\text{C}}$.", "C"),
        ("Final answer: D", "D"),
        ("**Final Answer**\n\n[C]", "C"),
        ("Answer: A\nOn reflection, the answer is C", "C"),
        ("Option A is wrong, B is correct.", "B"),
        ("(D) is the right choice. A and B are not.", "D"),
        ("The answer is B. A and C cannot be.", "B"),
        ("so I choose C", "C"),
        ("<think>The answer is A.</think> D", "D"),
        ("The answer is a mixture, hence B", "B"),
        ("I think the answer is Z, or C", "C"),
        (r"The answer is \(\boxed{C}\). A common mistake is a factor of 2.", "C"),
        ("**Answer:** \\(C\\)\n\n(Option A would need T > 0.)", "C"),
        ("**Correct option**: D\nA and B are not.", "D"),
        ("Thus \\[\\boxed{\\mathbf{C}}\\]\n\nThis rules out A.", "C"),
        ("The answer would be C rather than A", "C"),
        ("so C.\nA reader may ask why", "C"),
        ("My final answer: I choose C.", "C"),
        ("Answer: I'd say C", "C"),
        ("so C, as E = 3 J, and F follows", "C"),
        ("B looks tempting, but the answer is E.", None),
        ("Eliminating A. Therefore: \\boxed{H}", None),
        ("It is CO2 in 3D, a gas", None),
        ("", None),
    ],
)
def test_gpqa_finds_the_chosen_letter(response: str, chosen: str | None, rollout_args: Args) -> None:
    args = rollout_args(rm_type="gpqa")
    scores = {letter: score(args, response, letter) for letter in "ABCD"}
    assert scores == {letter: float(letter == chosen) for letter in "ABCD"}


@pytest.mark.parametrize(
    ("label", "metadata", "right"),
    [
        ("A", {"correct_letter": "c"}, "C"),
        ("b", {}, "B"),
        ("(B)", {"choices": PLANETS}, "B"),
        (1, {"choices": PLANETS}, "B"),
        ("2", {"choices": PLANETS}, "C"),
        ("42", {"choices": PLANETS}, "D"),
        (" the  EARTH ", {"choices": PLANETS}, "C"),
        ("Venus", {"choices": {"D": "Mercury", "A": "Venus"}}, "A"),
        ("J", {"choices": [f"choice {i}" for i in range(10)]}, "J"),
        ("I", {}, "I"),
    ],
)
def test_gpqa_knows_the_right_letter(label: Any, metadata: dict[str, Any], right: str, rollout_args: Args) -> None:
    args = rollout_args(rm_type="gpqa")
    assert score(args, f"The answer is {right}", label, **metadata) == 1.0
    wrong = "A" if right != "A" else "D"
    assert score(args, f"The answer is {wrong}, though others say {right}", label, **metadata) == 0.0


def test_gpqa_without_a_letter_looks_for_the_answers_text(rollout_args: Args) -> None:
    args = rollout_args(rm_type="gpqa")
    assert score(args, "It must be\nVENUS!", 1, choices=PLANETS) == 1.0
    assert score(args, "It must be Mercury", 1, choices=PLANETS) == 0.0
    assert score(args, "about 3.5 eV", "3.5 eV") == 1.0
    assert score(args, "about 13.5 eV", "3.5 eV") == 0.0
    assert score(args, "<think>3.5 eV</think> no idea", "3.5 eV") == 0.0
    assert score(args, "no letter", "B") == 0.0
    assert score(args, "I think that I'd choose B", "I") == 0.0
    assert score(rollout_args(rm_type="boxed_gpqa"), r"Not A but \boxed{B}, not C", "B") == 1.0
    for label in (None, " "):
        with pytest.raises(
            BadInputError, match=r"gpqa needs metadata\['correct_letter'\] or a label, sample 3 has neith"
        ):
            score(args, "B", label)


def test_degenerate_responses_take_no_time(rollout_args: Args) -> None:
    started = time.monotonic()
    for piece in (
        "A is ",
        "answer is ",
        "final answer ",
        "(",
        "A   ",
        " ",
        "the answer is: **",
        "\n",
        "- ",
        "\\boxed{",
    ):
        text = piece * (60_000 // len(piece))
        score(rollout_args(rm_type="gpqa"), text, "B")
        everything = {name: given for name, given, _, _ in CASES}
        ids = {"instruction_id_list": list(everything), "kwargs": list(everything.values())}
        score(rollout_args(rm_type="ifbench"), text + "x", **ids)
    assert time.monotonic() - started < 100


CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("keywords:existence", {"keywords": ["Sun", "moon"]}, ["the sun and the MOON"], ["the sun"]),
    ("keywords:frequency", {"keyword": "ha", "frequency": 2, "relation": "at least"}, ["Ha ha"], ["ha"]),
    ("keywords:frequency", {"keyword": "ha", "frequency": 2, "relation": "less than"}, ["ha"], ["ha ha"]),
    ("keywords:forbidden_words", {"forbidden_words": ["cat", "dog"]}, ["category"], ["a Dog."]),
    ("keywords:letter_frequency", {"letter": "e", "let_frequency": 3, "let_relation": "at least"}, ["Eeé e"], ["ee"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, ["two words"], ["now it's"]),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n***\nb", "a\n***\nb\n***"],
        ["a", "a***b***c"],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
        ["one\n\nthen, two"],
        ["one\n\ntwo", "then", "one\n\nthen\n\nthree"],
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[name] of [city]"], ["[name]", "[]"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["bye\n p. s. more"], ["bye", "ps"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, ["* a\n- b"], ["* a", "* a\n- b\n* c", "**a**\n* b"]),
    ("detectable_format:constrained_response", {}, ["Well. My answer is no."], ["No."]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, ["*a* and **b**"], ["*a*", "* a\n* b"]),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        ["SECTION 1\na\nSECTION 2\nb"],
        ["SECTION 1\na", "SECTION a SECTION b"],
    ),
    ("detectable_format:json_format", {}, ['{"a": 1}', "```json\n[1]\n```", "9" * 5000], ["{a: 1}", "a", "[" * 3000]),
    ("detectable_format:title", {}, ["<<A day>>\ntext"], ["<<>>", "<A day>", "<< >>"]),
    ("combination:two_responses", {}, ["a ****** b"], ["a", "a******a", "a******b******c"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, ["say it. I do"], ["I say it."]),
    ("startend:end_checker", {"end_phrase": "Is that all?"}, ['Yes. "is that all?"'], ["Is that all? Yes"]),
    ("startend:quotation", {}, ['"all of it"'], ["all of it", '"', '"half']),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["NASA and ESA"],
        ["NASA and Esa"],
    ),
    ("change_case:english_capital", {}, ["ALL 4 OF IT"], ["All of it"]),
    ("change_case:english_lowercase", {}, ["all 4 of it"], ["All of it"]),
    ("punctuation:no_comma", {}, ["a; b"], ["a, b"]),
]


@pytest.mark.parametrize(("name", "given", "good", "bad"), CASES, ids=[case[0] for case in CASES])
def test_ifbench_checks(name: str, given: dict[str, Any], good: list[str], bad: list[str], rollout_args: Args) -> None:
    args = rollout_args(rm_type="ifbench")
    verdicts = [score(args, text, instruction_id_list=[name], kwargs=[given]) for text in (*good, *bad, "", " ")]
    assert verdicts == [1.0] * len(good) + [0.0] * (len(bad) + 2)


def test_every_checker_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(instructions.CHECKERS)


def test_all_instructions_must_be_followed(rollout_args: Args) -> None:
    args = rollout_args(rm_type="ifbench")
    ids = ["punctuation:no_comma", "keywords:existence"]
    both = {"instruction_id_list": ids, "kwargs": [None, {"keywords": ["sun"], "num_words": None}]}
    assert score(args, "the sun", **both) == 1.0
    assert score(args, "<think>Well, the moon?</think>\nthe sun", **both) == 1.0
    assert score(args, "the sun, yes", **both) == score(args, "the moon", **both) == 0.0


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {},
            r"needs metadata\['instruction_id_list'\] and metadata\['kwargs'\], lists of one length, in sample 3: is -",
        ),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}, "lists of one length"),
        (
            {"instruction_id_list": ["startend:quotation"], "kwargs": [{"x": 1}]},
            r"'startend:quotation' does not take .*'x'",
        ),
        (
            {"instruction_id_list": ["keywords:existence"], "kwargs": [{}]},
            r"'keywords:existence' does not take .* \{\}",
        ),
        (
            {"instruction_id_list": ["no:such"], "kwargs": [{}]},
            r"'no:such' is not one of slime's \(keywords.* on PYTHONPATH",
        ),
        (
            {
                "instruction_id_list": ["length_constraints:number_words"],
                "kwargs": [{"num_words": 3, "relation": "around"}],
            },
            "a relation is 'at least' or 'less than', not 'around'",
        ),
    ],
)
def test_instructions_that_cannot_be_checked_say_why(metadata: Any, message: str, rollout_args: Args) -> None:
    # Also where another instruction was not followed.
    with pytest.raises(BadInputError, match=message):
        score(rollout_args(rm_type="ifbench"), "one, two", **metadata)


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A registry with the interface of IFBench's."""
    (tmp_path / "instructions_registry.py").write_text(
        "class StartsWith:\n"
        "    def __init__(self, name): self.name, self.start, self.prompt = name, None, None\n"
        "    def build_description(self, start=None, prompt=None):\n"
        "        self.start, self.prompt = start or self.start, prompt\n"
        "    def get_instruction_args(self): return {'start': self.start, 'prompt': None}\n"
        "    def check_following(self, value): return value.startswith(self.start) and self.prompt == 'the prompt'\n"
        "INSTRUCTION_DICT = {'words:start': StartsWith}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    instructions._others_checkers.cache_clear()
    yield
    instructions._others_checkers.cache_clear()
    sys.modules.pop("instructions_registry", None)


@pytest.mark.usefixtures("others")
def test_checkers_on_the_import_path_are_asked_for_the_rest(rollout_args: Args) -> None:
    args = rollout_args(rm_type="ifbench")
    metadata = {
        "instruction_id_list": ["words:start", "punctuation:no_comma"],
        "kwargs": [{"start": "Well"}, {}],
        "prompt_text": "the prompt",
    }
    assert score(args, "Well then", **metadata) == 1.0
    assert score(args, "No then", **metadata) == score(args, "Well, then", **metadata) == 0.0
    with pytest.raises(BadInputError, match=r"'no:such' is not one of slime's \([^;]*\)$"):
        score(args, "Well", instruction_id_list=["no:such"], kwargs=[{}])
