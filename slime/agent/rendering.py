"""Turns as token ids: a first prompt is rendered whole, and behind a turn only what was said since.

What a chat template writes behind a turn of the assistant's must not depend on what was said before it, or the tokens
of earlier turns, which an engine made, would have to be rendered again. `TurnRenderer` proves that of a template, for
the user's words and for tool results, before it relies on it.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from slime.data.rows.chat_template import ChatTemplate, Marked, chat_template
from slime.data.rows.messages import Messages, RowError, check_messages

logger = logging.getLogger(__name__)

_MARK = "\U000f0003"
"""What the turn before the appended messages says, of a private use area."""
_SHIELD = ("\U000f0004", "\U000f0005")
_USER = {"role": "user", "content": "?"}
_TOOLS = [{"type": "function", "function": {"name": "probe", "parameters": {"type": "object", "properties": {}}}}]


def _calling(*ids: str) -> list[dict[str, Any]]:
    return [{"id": each, "type": "function", "function": {"name": "probe", "arguments": "{}"}} for each in ids]


_CALL, _CALLS = _calling("call_1"), _calling("call_1", "call_2")
_RESULT = {"role": "tool", "tool_call_id": "call_1", "name": "probe", "content": "1"}
_RESULTS = [_RESULT, _RESULT | {"tool_call_id": "call_2", "content": "2"}]
_BEFORE: tuple[Messages, ...] = (
    [_USER],
    [{"role": "system", "content": "Be short."}, _USER, {"role": "assistant", "content": "!"}, _USER],
    [_USER, {"role": "assistant", "content": "", "tool_calls": _CALL}, _RESULT],
    [
        *(_USER, {"role": "assistant", "content": "", "reasoning_content": "So.", "tool_calls": _CALLS}),
        *(*_RESULTS, {"role": "assistant", "content": "3"}, _USER),
    ],
)
"""Conversations before a turn; what follows the turn must be the same after each."""
_AFTER_WORDS: tuple[Messages, ...] = ([_USER], [_USER, _USER])
_AFTER_CALLS: tuple[tuple[list[dict[str, Any]], Messages], ...] = (
    (_CALL, [_RESULT]),
    (_CALLS, _RESULTS),
    (_CALL, [_RESULT, _USER]),
)


class _MovedError(RowError):
    """What was said behind a turn is not written there."""


class TurnRenderer:
    """Renders prompts by a tokenizer's chat template."""

    def __init__(self, tokenizer: Any, kwargs: str = "{}") -> None:
        """``kwargs`` is a JSON object of further arguments of the template."""
        self._tokenizer, self._kwargs = tokenizer, kwargs
        self._proven: dict[tuple[str, bool], str] = {}
        self._closings: dict[str, str] = {}
        self._warned: set[str] = set()

    def first(self, messages: Messages, tools: Any = None) -> list[int]:
        """The token ids of a whole prompt. RowError where the template refuses the conversation."""
        check_messages(messages, "the conversation")
        template, (shielded, shown, unshield) = self._template(tools), self._shielded(messages, tools)
        text = template.text(template.prepared(shielded), shown, generation_prompt=True)
        return self._encode(text, unshield)

    def next(
        self, calls: Sequence[dict[str, Any]] | None, appended: Messages, output: Sequence[int], tools: Any = None
    ) -> list[int] | None:
        """The token ids behind a turn of the assistant's, up to where its next one begins.

        None where the template does not let that be rendered for itself; RowError where it refuses the messages.

        Args:
            calls: the tool calls of the turn, in OpenAI's form.
            appended: what was said since, at least one message.
            output: the turn's token ids, of which the last ones may be what ends a turn.
            tools: of the conversation.
        """
        template, after_calls = self._template(tools), bool(calls)
        if why := self._why_not(template, after_calls):
            self._warn(f"{'tool results' if after_calls else 'the words'} behind a turn", why)
            return None
        named = [_without_arguments(call) for call in calls or []]
        shielded, shown, unshield = self._shielded(appended, tools)
        try:
            text = self._behind(template, [_USER], named, shielded, shown, warns=True)
        except _MovedError:
            return None
        return self._joined(template, text, output, unshield)

    def why_not(self, tools: bool = False) -> str:
        """Why the prompt behind a turn cannot be rendered for itself; empty where it can: behind one that calls tools,
        or one that does not."""
        return self._why_not(self._template(_TOOLS if tools else None, warns=False), tools)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, with all special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False, spaces_between_special_tokens=False)
        return text

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, with special tokens where it has their names."""
        return self._encode(text, str)

    def is_special(self, token: int) -> bool:
        """Whether a token is none of text."""
        return token in self._special_ids

    # ---- what is behind a turn

    def _template(self, tools: Any, *, warns: bool = True) -> ChatTemplate:
        return chat_template(self._tokenizer, tools or None, self._kwargs, warns=warns)

    def _behind(
        self,
        template: ChatTemplate,
        before: Messages,
        calls: list[dict[str, Any]],
        appended: Messages,
        tools: Any,
        *,
        warns: bool = False,
    ) -> str:
        """What the template writes behind what a turn says, with what ends the turn; RowError where it cannot be told
        apart."""
        turn: dict[str, Any] = {"role": "assistant", "content": "" if calls else _MARK}
        turn |= {"tool_calls": calls} if calls else {}
        messages = template.prepared([*before, turn, *appended], warns=warns)
        said = template.marked(messages, tools, generation_prompt=True)
        piece, (_, end) = _piece(said, len(before)), said.pieces[len(before)]
        for number, message in enumerate(appended, len(before) + 1):
            if message["role"] == "system" and said.pieces.get(number, (0, 0))[0] < end:
                raise _MovedError("the chat template has a later system message at the beginning")
        closing = self._closing(template) if calls else piece.rpartition(_MARK)[2]
        if not piece.endswith(closing):
            raise RowError("a turn that calls tools does not end as others do")
        return closing + said.text[end:]

    def _closing(self, template: ChatTemplate) -> str:
        """What a template writes at the end of a turn of words."""
        if template.source not in self._closings:
            turn = {"role": "assistant", "content": _MARK}
            said = template.marked(template.prepared([_USER, turn, _USER], warns=False))
            self._closings[template.source] = _piece(said, 1).rpartition(_MARK)[2]
        return self._closings[template.source]

    def _why_not(self, template: ChatTemplate, after_calls: bool) -> str:
        key = template.source, after_calls
        if key not in self._proven:
            try:
                self._proven[key] = self._proof(template, after_calls)
            except RowError as error:
                self._proven[key] = str(error)
        return self._proven[key]

    def _proof(self, template: ChatTemplate, after_calls: bool) -> str:
        """Try what may follow a turn behind each of `_BEFORE`; what differs."""
        tools = _TOOLS if after_calls else None
        cases = _AFTER_CALLS if after_calls else [([], after) for after in _AFTER_WORDS]
        proven = 0
        for calls, after in cases:
            named = [_without_arguments(call) for call in calls]
            try:
                expected = self._behind(template, [_USER], named, after, tools)
            except RowError as error:
                if len(calls) < 2:
                    return str(error)
                continue  # it takes one call at a time
            for before in _BEFORE:
                try:
                    found = self._behind(template, before, named, after, tools)
                except RowError:
                    continue  # it takes no such conversation, so none is asked of it
                if found != expected:
                    return "the chat template writes something else behind a turn when something else was said before"
                proven += 1
        return "" if proven > 1 else "the chat template refuses conversations of several turns"

    def _joined(
        self, template: ChatTemplate, text: str, output: Sequence[int], unshield: Callable[[str], str]
    ) -> list[int]:
        """The ids of ``text``, without what the model has written of it itself: the token that ends its turn."""
        last = self.decode(output[-1:])
        ends = _first_token(self._tokenizer, text)
        if ends and last == ends:
            return self._encode(text[len(ends) :], unshield)
        return self._encode(text, unshield)

    # ---- text and tokens

    def _encode(self, text: str, unshield: Callable[[str], str]) -> list[int]:
        ids: list[int] = []
        for number, part in enumerate(re.split(f"{_SHIELD[0]}(.*?){_SHIELD[1]}", text)):
            # Every second part is what somebody said that looks like a special token.
            shielded = bool(number % 2)
            words = unshield(part) if shielded else part
            if words:
                options = {"split_special_tokens": True} if shielded else {}
                ids += self._tokenizer(words, add_special_tokens=False, **options)["input_ids"]
        return ids

    def _shielded(self, messages: Messages, tools: Any) -> tuple[Messages, Any, Callable[[str], str]]:
        """Messages and tools in which nothing that is said has a special token: it could end a turn, or speak as
        somebody else."""
        special, shielded = self._special_tokens, [*self._specials, *_SHIELD]
        numbers = {token: number for number, token in enumerate(shielded)}

        def shield(value: Any) -> Any:
            if isinstance(value, str):
                return special.sub(lambda found: f"{_SHIELD[0]}{numbers[found.group()]}{_SHIELD[1]}", value)
            if isinstance(value, dict):
                return {shield(name): shield(each) for name, each in value.items()}
            return [shield(each) for each in value] if isinstance(value, list) else value

        return shield(messages), shield(tools or None), lambda number: shielded[int(number)]

    @functools.cached_property
    def _specials(self) -> list[str]:
        return [token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special]

    @functools.cached_property
    def _special_ids(self) -> set[int]:
        return {number for number, token in self._tokenizer.added_tokens_decoder.items() if token.special}

    @functools.cached_property
    def _special_tokens(self) -> re.Pattern[str]:
        longest_first = sorted([*self._specials, *_SHIELD], key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)))

    def _warn(self, what: str, why: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("prompts are rendered whole, as %s cannot be for themselves: %s", what, why)


def _without_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A call as what follows it may name it."""
    function = call.get("function", call)
    return {
        "id": call.get("id", ""),
        "type": "function",
        "function": {"name": function.get("name", ""), "arguments": "{}"},
    }


def _piece(marked: Marked, number: int) -> str:
    if number in marked.repeated or number not in marked.pieces:
        raise RowError("the chat template does not render a turn of the assistant's as one message")
    start, end = marked.pieces[number]
    return marked.text[start:end]


def _first_token(tokenizer: Any, text: str) -> str:
    """The special token that a text begins with; empty where it begins with none."""
    tokens = (token.content for token in tokenizer.added_tokens_decoder.values())
    return max((token for token in tokens if text.startswith(token)), key=len, default="")
