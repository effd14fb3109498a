"""Upstream's name for DAPO's reward, for functions of users that import it."""

from __future__ import annotations

from typing import Any

from slime.grading.algebra import answers_equal_now
from slime.grading.answers import accepted_labels, last_boxed
from slime.grading.graders import dapo_answer, dapo_readings, shown_answer
from slime.rollout.rm_hub.special_tokens import without_usual_special_tokens


def compute_score(
    solution_str: str, ground_truth: Any, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> dict[str, Any]:
    """``{"score": 1 or -1, "acc", "pred"}`` of a response's text, as ``--rm-type dapo`` judges, or with
    ``strict_box_verify`` by the last box, as ``boxed_dapo`` does. Where the comparison takes algebra it holds up the
    caller, for 10 s at the most. ``pause_tokens_index`` is taken for the sake of callers, and not read."""
    text = without_usual_special_tokens(solution_str)
    answer = last_boxed(text) if strict_box_verify else dapo_answer(text)
    labels = [] if ground_truth is None else accepted_labels(ground_truth)
    correct = any(answers_equal_now(reading, label) for reading in dapo_readings(answer) for label in labels)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": shown_answer(answer)}
