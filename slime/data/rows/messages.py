"""Chat messages as rows have them, and as a chat template takes them."""

from __future__ import annotations

import contextlib
import json
from numbers import Number
from typing import Any

from slime.data.rows.reading import JsonError, parse_json, value_problem
from slime.utils.errors import BadInputError

Messages = list[dict[str, Any]]


class RowError(BadInputError):
    """What is wrong with one row."""


def check_messages(messages: Any, what: str) -> None:
    """Raise RowError unless ``messages`` is a non-empty list of dicts with a ``role``, each of which says something:
    templates render one that does not as an empty turn, or fail."""
    if not isinstance(messages, list):
        raise RowError(f"{what} is a {type(messages).__name__}; a string or a list of chat messages is expected")
    if not messages:
        raise RowError(f"{what} is an empty list of messages")
    for position, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError(f"message {position} of {what} is not an object with a 'role': {message!r:.80}")
        if message.get("content") is None and not message.get("tool_calls"):
            raise RowError(f"message {position} of {what} has neither 'content' nor 'tool_calls': {message!r:.80}")


def as_text(value: Any) -> Any:
    """A number as text, such as the index of a task; anything else as it is."""
    return str(value) if isinstance(value, Number) and not isinstance(value, (bool, complex)) else value


def messages_of_json(prompt: Any, what: str) -> Any:
    """The messages of a prompt that is JSON text of a list of messages; anything else as it is. RowError where its
    messages have what no sample can carry, or an object names a key twice."""
    if not isinstance(prompt, str) or not prompt.lstrip().startswith("["):
        return prompt
    try:
        value, problem = parse_json(prompt), None
    except JsonError as error:
        value, problem = None, f"cannot be read: {error}"
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(prompt)
    if not isinstance(value, list) or not value:
        return prompt
    if not all(isinstance(entry, dict) and isinstance(entry.get("role"), str) for entry in value):
        return prompt
    problem = problem or value_problem(value)
    if problem is not None:
        raise RowError(f"{what} is JSON text of messages, which {problem}")
    return value


def without_arrow_nulls(value: Any) -> Any:
    """A value of a parquet file without the nulls that Arrow puts into structs, to give all of a column the same keys;
    nulls in lists stay."""
    if isinstance(value, dict):
        return {key: without_arrow_nulls(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [without_arrow_nulls(entry) for entry in value]
    return value


def content_text(message: dict[str, Any], where: str) -> str | None:
    """What a message says: a text, a number, or parts of text, one after the other; None beside tool calls alone.
    RowError where it has something else than text."""
    content = as_text(message.get("content"))
    if isinstance(content, list):
        return "".join(
            _text_of_part(part, f"part {number} of the content of {where}") for number, part in enumerate(content)
        )
    if content is not None and not isinstance(content, str):
        raise RowError(f"the content of {where} is a {type(content).__name__}, not a text or a list of text parts")
    return content


def _text_of_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    is_text = isinstance(part, dict) and kind in ("text", None)
    text = part.get("text") if is_text else None
    if is_text and not isinstance(text, str):
        raise RowError(f"{where} has no text: {part!r:.80}")
    if not isinstance(text, str):
        raise RowError(f'{where} is not text but {kind!r}: only {{"type": "text", "text": ...}} can be rendered')
    return text


def with_arguments(calls: Any, where: str, *, as_json: bool) -> list[Any]:
    """Tool calls whose arguments are objects, or JSON text where ``as_json``; rows may have them either way, and
    SGLang's server parses those of earlier calls likewise. RowError where the calls are no list of objects, or
    arguments no object."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RowError(f"'tool_calls' of {where} is not a list of objects: {calls!r:.80}")
    changed = []
    for number, call in enumerate(calls):
        function = call.get("function", call)
        if isinstance(function, dict) and "arguments" in function:
            arguments = _arguments(function["arguments"], f"tool call {number} of {where}")
            shown = json.dumps(arguments, ensure_ascii=False) if as_json else arguments
            function = function | {"arguments": shown}
            call = call | {"function": function} if "function" in call else function
        changed.append(call)
    return changed


def _arguments(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = parse_json(value) if value.strip() else {}
        except JsonError as error:
            raise RowError(f"the arguments of {where} are a string that is not JSON: {error}") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RowError(f"the arguments of {where} are a {type(value).__name__}, not an object")
    if (problem := value_problem(value)) is not None:
        raise RowError(f"the object of the arguments of {where} {problem}")
    return value
