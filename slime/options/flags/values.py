"""What a value of any option may be, whichever way it is given: text that files and processes can carry, numbers that
mean something, JSON and YAML without surprises."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import yaml

_MERGE = "tag:yaml.org,2002:merge"
_BITS = 64
_SHOWN, _END = 200, 80
"""Characters of a long word that an error quotes from its beginning and its end."""
_LONG_WORD = re.compile(rf"[^\s]{{{2 * (_SHOWN + _END)},}}")


def problem_of(value: Any) -> str | None:
    """Why a value can be none of an option's, or None: text with a NUL byte or half a surrogate pair (bytes that are
    no UTF-8), nan, an infinite number, an integer beyond 64 bits; in a list or mapping, of any of its values."""
    if isinstance(value, str):
        if "\0" in value:
            return "has a NUL byte in it"
        return "is not UTF-8" if any("\ud800" <= char <= "\udfff" for char in value) else None
    if isinstance(value, float):
        return None if math.isfinite(value) else f"must be a finite number, not {value}"
    if isinstance(value, int):
        bits = value.bit_length()
        return None if bits < _BITS else f"must be an integer of {_BITS} bits, not one of {bits}"
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    problems = (problem_of(each) for each in value) if isinstance(value, (list, tuple, set)) else ()
    return next((problem for problem in problems if problem), None)


def json_value(text: str) -> Any:
    """A value given as JSON; ValueError: the text is none, or has values in it that no option takes."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    if problem := problem_of(value):
        raise ValueError(problem)
    return value


def shortened(text: str) -> str:
    """An error with its very long words cut in the middle: a line that nobody can read names nothing."""
    return _LONG_WORD.sub(lambda word: f"{word[0][:_SHOWN]}...({len(word[0])} characters)...{word[0][-_END:]}", text)


class _OneOfAKey(yaml.SafeLoader):
    """A mapping with a key twice is an error: YAML forbids it, and the library keeps the last one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen and key.tag != _MERGE:
                problem = f"the key {key.value!r} is there twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def read_yaml(path: str) -> Any:
    """What a YAML file holds; ValueError, which does not name it: it is not a file or no YAML, or refers to itself."""
    place = os.path.expanduser(path)
    if not os.path.isfile(place):
        raise ValueError("it is not a file" if os.path.exists(place) else "there is no such file")
    try:
        with open(place, "rb") as file:
            value = yaml.load(file.read().decode("utf-8-sig"), _OneOfAKey)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 (byte {error.start})") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except OSError as error:
        raise ValueError(str(error.strerror)) from error
    except yaml.YAMLError as error:
        told = str(error).replace(' in "<unicode string>",', " in")
        raise ValueError(" ".join(told.split())) from error
    if _refers_to_itself(value, ()):
        raise ValueError("it refers to itself")
    return value


def _refers_to_itself(value: Any, within: tuple[int, ...]) -> bool:
    if not isinstance(value, (list, dict)):
        return False
    inside = (*within, id(value))
    items = value.values() if isinstance(value, dict) else value
    return id(value) in within or any(_refers_to_itself(item, inside) for item in items)
