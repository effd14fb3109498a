"""Values of data files: JSON parsed with one line for whatever is wrong, and what no sample can carry."""

from __future__ import annotations

import json
import math
from typing import Any

_DEEPEST = 100
_NOT_FINITE = "which is no number: write null, or leave such rows out"


class JsonError(ValueError):
    """Why a text is no JSON, in one line."""


def parse_json(text: str) -> Any:
    """What a JSON text holds; JsonError where it is no JSON, names a key twice, is nested too deeply, or has a number
    too long to be read."""
    try:
        return _DECODER.decode(text)
    except JsonError:
        raise
    except json.JSONDecodeError as error:
        at = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        raise JsonError(f"{error.msg} at {at}") from error
    except RecursionError:
        raise JsonError("it is nested too deeply") from None
    except ValueError as error:  # Python refuses to make an integer of so many digits
        raise JsonError("it has a number of too many digits") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise JsonError(f"it has the key {twice!r:.60} twice")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def value_problem(value: Any, room: int = _DEEPEST) -> str | None:
    """Why no sample can carry a value, to follow its name; None where one can.

    Text with half of a surrogate pair is no UTF-8, so that no tokenizer, engine or log takes it. NaN and infinity are
    no JSON, and every comparison with them fails. What is nested very deeply cannot be copied between processes.
    """
    if isinstance(value, str):
        return None if value.isascii() else _surrogate(value)
    if isinstance(value, float):
        return None if math.isfinite(value) else f"is or holds {value}, {_NOT_FINITE}"
    if not isinstance(value, (dict, list, tuple)):
        return None
    if not room:
        return f"is nested more than {_DEEPEST} deep"
    if not isinstance(value, dict):
        return next(filter(None, (value_problem(item, room - 1) for item in value)), None)
    for key, item in value.items():
        if not isinstance(key, str):
            return f"has the key {key!r:.60}, which is no text"
        if (problem := _surrogate(key) or value_problem(item, room - 1)) is not None:
            return problem
    return None


def _surrogate(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"has half a character ({text[error.start]!a}, a surrogate without its pair) at position {error.start}"
    return None
