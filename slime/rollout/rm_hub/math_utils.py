"""Upstream's names for judging an answer in a box, for functions of users that import them."""

from __future__ import annotations

from typing import Any

from slime.grading.algebra import answers_equal_now
from slime.grading.answers import accepted_labels, last_boxed
from slime.rollout.rm_hub.special_tokens import without_usual_special_tokens


def extract_answer(passage: str) -> str | None:
    """The content of the last box of ``passage``, special tokens left out; None without one."""
    return last_boxed(without_usual_special_tokens(passage))


extract_boxed_answer = extract_answer


def grade_answer_verl(solution_str: str, ground_truth: Any) -> bool:
    """Whether the last box of ``solution_str`` has the value of ``ground_truth``, as ``--rm-type math`` judges.

    Where that takes algebra it holds up the caller, for 10 s at the most.
    """
    answer = extract_answer(solution_str)
    if answer is None or ground_truth is None:
        return False
    return any(answers_equal_now(answer, label) for label in accepted_labels(ground_truth))


def grade_answer_mathd(given_answer: str | None, ground_truth: Any) -> bool:
    """Whether two answers, without boxes, have the same value."""
    if given_answer is None or ground_truth is None:
        return False
    given_answer = without_usual_special_tokens(given_answer)
    return any(answers_equal_now(given_answer, label) for label in accepted_labels(ground_truth))


grade_answer_sympy = grade_answer_mathd
