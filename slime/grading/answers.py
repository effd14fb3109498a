"""Finding the answer in a response, and the labels it is compared with."""

from __future__ import annotations

import math
import re
from typing import Any

_EXACT = 2.0**53
"""Below it a float is one integer."""
_BOXES = re.compile(
    r"\\(?:boxed|fbox)\s*(?:(?P<opens>\{)|(?P<bare>\\?(?:frac\S+|[-+]?[\d.]\S*|[A-Za-z]+(?=\s*\$))))"
    r"|(?P<escaped>\\[^A-Za-z])|(?P<brace>[{}])"
)
"""Braces that LaTeX counts, and what begins or is a box; ``\\boxed 4`` has no braces."""


def label_problem(label: Any) -> str | None:
    """Why no response can be compared with a label, to follow its name; None where one can.

    An object has answers in it and is none: its text stands in no response. A number that is none is what a table makes
    of an empty cell.
    """
    many = label if isinstance(label, list) else [label]
    if any(each is None or (isinstance(each, float) and not math.isfinite(each)) for each in many if many is label):
        return "holds null or NaN, which is not an answer"
    if isinstance(label, float) and not math.isfinite(label):
        return f"is {label}, which is not an answer"
    if any(isinstance(each, bytes | bytearray) for each in many):
        return f"{'holds' if many is label else 'is'} bytes, which are no answer: write the column as text"
    found = next((each for each in many if isinstance(each, dict)), None)
    if found is None:
        return None
    keys = ", ".join(map(repr, found))
    return (
        f"{'is' if found is label else 'holds'} an object with the keys {keys}, which is not an answer: name the key "
        "too, as in --label-key reward_model.ground_truth"
    )


def empty_label_problem(label: Any) -> str | None:
    """That a label has no answer in it, to follow its name; None of another, and of a missing one."""
    return None if label is None or accepted_labels(label) else "is empty: no response equals it"


def label_text(label: Any) -> str:
    """The text of one label. A table with empty cells makes floats of integers, so that 4.0 is 4."""
    whole = isinstance(label, float) and label.is_integer() and abs(label) < _EXACT
    return str(int(label) if whole else label)


def accepted_labels(label: Any) -> list[str]:
    """The text of a label, or of each of a list of them, but for empty ones; without the box that one is in."""
    texts = [label_text(each) for each in (label if isinstance(label, list) else [label])]
    texts = [last_boxed(text) or "" if "\\boxed" in text else text for text in texts]
    return [text for text in texts if text.strip()]


def last_boxed(text: str) -> str | None:
    """The content of the last complete ``\\boxed{...}`` or ``\\fbox{...}``, braces matched; None without one.

    Escaped braces are text. A number or a fraction behind a box without braces, as in ``\\boxed 4``, is its content.
    """
    # In one pass: a model that repeats itself writes thousands of boxes and closes none.
    open_braces: list[int | None] = []
    last: tuple[int, int] | None = None
    for match in _BOXES.finditer(text):
        if match["bare"]:
            end = match.start("bare") + len(match["bare"].rstrip(".,;:$)"))
            last = max(last or (0, 0), (match.start("bare"), end))
        elif match["opens"]:
            open_braces.append(match.end())
        elif match["brace"] == "{":
            open_braces.append(None)
        elif match["brace"] and open_braces and (start := open_braces.pop()) is not None:
            last = max(last or (0, 0), (start, match.start()))
    return None if last is None else text[last[0] : last[1]]


def after_reasoning(response: str) -> str:
    """What follows the last ``</think>``; the whole response without one."""
    return response.rpartition("</think>")[2]
