"""Arguments of tool calls that a model writes as bare text, between tags: which are text, and which JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

Types = frozenset[str] | None
"""The types, by JSON Schema's names, that a value may have; None where any may be."""
_WORDS: Mapping[str, tuple[str, Any]] = {
    "True": ("boolean", True),
    "False": ("boolean", False),
    "None": ("null", None),
}
"""What chat templates in Jinja write of values that are none of text -> its type, and what it is."""
_DEPTH = 16


def argument(text: str, parameters: Any, name: str) -> Any:
    """What an argument is, by the JSON schema of its tool's parameters.

    Text where the schema lets it be text, is none or says nothing: ``123`` is only a number where it must be one. The
    word null where the schema has it is null. Else what JSON says, or text where that cannot be read.
    """
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    types = _types(schema, parameters)
    word = text.strip()
    if types is not None and "null" in types and word == "null":
        return None
    if types is None or "string" in types:
        return text
    kind, value = _WORDS.get(word, ("", None))
    if kind in types:
        return value
    try:
        return read_json(text)
    except ValueError:
        return text


def read_json(text: str) -> Any:
    """What JSON says; ValueError, too, for what no client could read of it: NaN, numbers without end, deep nesting."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def _types(schema: Any, root: Any, depth: int = 0) -> Types:
    """What a schema allows; ``root`` is the one that its references are to."""
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return None
    found: list[Types] = []
    if isinstance(given := schema.get("type"), str):
        found.append(frozenset([given]))
    elif isinstance(given, list):
        found.append(frozenset(str(each) for each in given))
    if isinstance(values := schema.get("enum"), list):
        found.append(frozenset(map(_type_of, values)))
    if "const" in schema:
        found.append(frozenset([_type_of(schema["const"])]))
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), list):
            found.append(_any(_types(each, root, depth + 1) for each in options))
    if isinstance(parts := schema.get("allOf"), list):
        found += [_types(each, root, depth + 1) for each in parts]
    if isinstance(reference := schema.get("$ref"), str):
        found.append(_types(_at(root, reference), root, depth + 1))
    known = [each for each in found if each is not None]
    if not known:
        return None
    both = frozenset.intersection(*known)
    return both | {"null"} if schema.get("nullable") is True else both


def _any(options: Iterable[Types]) -> Types:
    types: frozenset[str] = frozenset()
    for option in options:
        if option is None:
            return None
        types |= option
    return types


def _at(root: Any, reference: str) -> Any:
    """What ``#/$defs/Name`` refers to; None where there is no such part."""
    beginning, *path = reference.split("/")
    for key in path:
        root = root.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root if beginning == "#" else None


def _type_of(value: Any) -> str:
    # A bool is an int, too.
    names = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")
