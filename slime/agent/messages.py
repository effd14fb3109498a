"""When two conversations are the same as far as the model's own turns go, however a client writes them down again.

Clients send all of a conversation with every turn, and not as they got it: without thinking, with the keys of JSON in
another order, with tool results merged or in other parts. What a model has said is known by what is left when all that
is taken away.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from slime.data.rows.messages import Messages

_ASSISTANT, _TOOL = "assistant", "tool"
_THOUGHT_END = "</think>"
_INTO_DIRECTORY = re.compile(r"^\s*cd\s+\S+\s*&&")
_ESCAPES = re.compile(r"\\+")
_PLACES = 2048
"""Of messages that are remembered beside those of one conversation: a client that changes its first message with every
turn would otherwise have all of its conversation remembered as often."""
Key = bytes
"""Of a conversation, up to and with a message."""


@dataclass(frozen=True)
class Chain:
    """A conversation's keys.

    Attributes:
        answered: number of messages -> key, after each of the assistant's messages, the last one first.
        open: the key of all of it, to which an answer is added.
    """

    answered: tuple[tuple[int, Key], ...]
    open: Key

    def with_reply(self, reply: Mapping[str, Any]) -> Key:
        """The key once the assistant has answered."""
        return _next(self.open, _said(reply))


class Chainer:
    """Makes chains, and remembers how conversations went on: clients send the same messages with every turn."""

    def __init__(self) -> None:
        self._begun: dict[bytes, _Place] = {}
        """By tools."""
        self._places = 0

    def chain(self, messages: Messages, tools: Any = None) -> Chain:
        """The keys of a conversation with these tools, in OpenAI's form."""
        tools = tools or []
        if self._places > _PLACES + 2 * len(messages):
            self._begun, self._places = {}, 0  # they are made again of what is sent
        if (place := self._begun.get(raw := _raw(tools))) is None:
            place = self._begun[raw] = _Place(_next(b"", _canonical(tools)))
        answered = []
        for end, message in enumerate(messages, 1):
            raw = _raw(message)
            if (known := place.followed.get(raw)) is None:
                known = place.follow(message, raw)
                self._places += 1
            place = known
            if place.is_answer:
                answered.append((end, place.key))
        return Chain(tuple(reversed(answered)), place.open)


@dataclass(eq=False, slots=True)
class _Place:
    """Where a conversation has come to.

    Attributes:
        key: of all up to the last of the assistant's messages.
        others: what was said since, and by whom.
        followed: by what was said next, where that led.
    """

    key: Key
    others: tuple[tuple[str, str], ...] = ()
    is_answer: bool = False
    followed: dict[bytes, _Place] = field(default_factory=dict)

    @property
    def open(self) -> Key:
        """The key of all of it."""
        return _next(self.key, _between(self.others)) if self.others else self.key

    def follow(self, message: dict[str, Any], raw: bytes) -> _Place:
        """Where one more message leads, as JSON ``raw``."""
        role = str(message["role"])
        if role == _ASSISTANT:
            place = _Place(_next(self.open, _said(message)), is_answer=True)
        else:
            place = _Place(self.key, (*self.others, (role, _squeezed(_words(message.get("content"))))))
        self.followed[raw] = place
        return place


def _raw(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except (TypeError, ValueError):  # a number beyond 64 bits, half a surrogate pair
        return json.dumps(value, default=str).encode()


def chain_of(messages: Messages, tools: Any = None) -> Chain:
    """The keys of one conversation."""
    return Chainer().chain(messages, tools)


def _said(message: Mapping[str, Any]) -> str:
    """What a turn says and does, without its thoughts and the ids of its calls."""
    words = _words(message.get("content")).rpartition(_THOUGHT_END)[2]
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    return _canonical([_squeezed(words), [[call.get("name"), _value(call.get("arguments"))] for call in calls]])


def _between(parts: Sequence[tuple[str, str]]) -> str:
    """What was said to the model, by role: tool results in any order, everything else as one text a role."""
    words: dict[str, str] = {}
    for role, said in parts:
        if role != _TOOL:
            words[role] = words.get(role, "") + said
    return _canonical([sorted(said for role, said in parts if role == _TOOL), words])


def _words(content: Any) -> str:
    """A content's text; of a part that is none, what it is."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return _canonical(content)
    return "".join(
        part
        if isinstance(part, str)
        else part["text"]
        if isinstance(part, Mapping) and isinstance(part.get("text"), str)
        else _canonical(part)
        for part in content
    )


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _value(arguments: Any) -> Any:
    """What a call's arguments come to, which clients send as an object or as text of one."""
    value = arguments or {}
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else {}
        except ValueError:
            return _squeezed(arguments)
    if not isinstance(value, dict):
        return value
    said = {name: _argument(each) for name, each in value.items()}
    # Which an option is that was not given.
    return {name: text for name, text in said.items() if text not in ("false", "null")}


def _argument(value: Any) -> str:
    """One argument, less what Claude Code makes of it for its next request: it writes text of numbers as numbers and
    defaults where there was nothing, takes white space off the ends of lines, the ``cd`` to where it is already off
    commands, and makes two backslashes one. To take that for another answer would begin a path with each such call."""
    text = value if isinstance(value, str) else _canonical(value)
    return _squeezed(_ESCAPES.sub(r"\\", _INTO_DIRECTORY.sub("", text)))


def _canonical(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)


def _plain(value: Any) -> Any:
    """Numbers of one value are one number: JavaScript writes 1.0 as 1."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _next(key: Key, step: str) -> Key:
    return hashlib.blake2b(key + step.encode(errors="surrogatepass"), digest_size=16).digest()
