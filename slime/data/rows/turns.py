"""Where the assistant's turns are in a rendered conversation, by construction: no text is searched for in content.

A turn is what an engine would generate after the prompt of the conversation so far: it begins where the generation
prompt ends, and ends with the token that generation stops at. The template itself says where each message begins
(`ChatTemplate.marked`); what it writes whatever a turn says is learnt from the same conversation with other turns.
"""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass
from typing import Any

from slime.data.rows.chat_template import SPOKEN, ChatTemplate, Marked
from slime.data.rows.messages import Messages, RowError

_TAG = re.compile(r"<[^<>\s]+>")
"""What may be one token: a turn does not begin within it."""
_OTHER = ("\U000f0001", "\U000f0002")
"""Characters of a private use area: what the turns of other conversations say."""
_CONTENTS = (_OTHER[0], f"<think>\n{_OTHER[1]}\n</think>\n\n{_OTHER[1]}")
_QUESTION = {"role": "user", "content": "?"}


@dataclass(frozen=True)
class Turns:
    """A rendered conversation, with the character ranges of it that are trained."""

    text: str
    spans: list[tuple[int, int]]


def find_turns(template: ChatTemplate, messages: Messages, tools: Any, *, last_only: bool) -> Turns:
    """The assistant's turns in a conversation that `ChatTemplate.prepared` gave, or the last only, but for those of
    step_loss_mask 0. RowError where the template refuses it, or it cannot be proven where a turn begins or ends.

    What a template marks as ``{% generation %}`` is taken as it is. Where a template ends a turn by the next role's
    token, as GLM's do, that token is part of the turn, and is appended to the text where the conversation ends.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    wanted = [i for i in (turns[-1:] if last_only else turns) if messages[i].get("step_loss_mask", 1) == 1]
    whole = template.marked(messages, tools)
    if whole.text != template.text(messages, tools):
        raise RowError("the chat template renders another text while it is followed: the loss mask is undefined")
    finder = _Finder(template, messages, tools, whole)
    for i in wanted:
        finder.check(i)
    if template.has_generation_blocks:
        return Turns(whole.text, [span for i in wanted for span in _generated(whole, i)])
    spans = [finder.span(i) for i in wanted]
    return Turns(finder.text, spans)


def _generated(whole: Marked, number: int) -> list[tuple[int, int]]:
    first, last = _piece(whole, number)
    return [span for span in whole.generated if first <= span[0] < span[1] <= last]


def _piece(whole: Marked, number: int) -> tuple[int, int]:
    if number in whole.repeated:
        raise RowError(f"the chat template renders message {number} more than once: the loss mask is undefined")
    if number not in whole.pieces:
        raise RowError(f"the chat template does not render message {number}, a turn of the assistant's, as one message")
    return whole.pieces[number]


class _Finder:
    def __init__(self, template: ChatTemplate, messages: Messages, tools: Any, whole: Marked) -> None:
        self._template, self._messages, self._tools, self._whole = template, messages, tools, whole
        self._others: dict[int, Marked | None] = {}
        """The conversation with one of `_CONTENTS` for all turns; None where the template refuses it."""
        self.text = whole.text
        """Ends by the token that ends the last turn, where the template leaves that to the next role."""

    def check(self, number: int) -> None:
        """Raise RowError where a turn's piece lacks its tool calls, or has what is not the assistant's."""
        first, last = _piece(self._whole, number)
        piece = self._whole.text[first:last]
        if self._messages[number].get("tool_calls") and self._without_calls is not None:
            first, last = self._without_calls.pieces.get(number, (0, 0))
            if self._without_calls.text[first:last] == piece:
                raise RowError(f"the chat template leaves out the tool calls of message {number}")
        if self._other_results is not None:
            first, last = self._other_results.pieces.get(number, (0, 0))
            if self._other_results.text[first:last] != piece:
                raise RowError(f"the chat template renders tool results within message {number}, a turn to be trained")

    def span(self, number: int) -> tuple[int, int]:
        """Characters of a turn."""
        first, last = _piece(self._whole, number)
        end = self._end(number, first, last)
        return self._start(number, first, min(end, last)), end

    def _start(self, number: int, first: int, last: int) -> int:
        text, prompt = self._whole.text, self._prompt(number)
        if prompt is not None and number - 1 in self._whole.pieces and number - 1 in prompt.pieces:
            here, there = self._whole.pieces[number - 1][0], prompt.pieces[number - 1][0]
            start = here + len(prompt.text) - there
            if text.startswith(prompt.text[there:], here) and start <= last:
                return start
        opening = self._opening(number, prompt)
        if text.startswith(opening, first) and first + len(opening) <= last:
            return first + len(opening)
        return first + self._shared(number, opening, text[first:last])

    def _prompt(self, number: int) -> Marked | None:
        """What an engine answers by a turn; None where the template refuses to render it."""
        if number == 0:
            return None
        prompt = self._rendered(self._messages[:number], generation_prompt=True)
        if prompt is None:
            return None
        if prompt.text[: prompt.head] != self._whole.text[: self._whole.head]:
            raise RowError(f"the chat template rewrites the turns before message {number}, its loss mask is undefined")
        return prompt

    def _opening(self, number: int, prompt: Marked | None) -> str:
        """The generation prompt: what a template writes behind the messages."""
        before = self._messages[:number] if prompt else self._template.prepared([_QUESTION])
        prompt = prompt or self._template.marked(before, self._tools, generation_prompt=True)
        closed = self._template.marked(before, self._tools).text if prompt.tail == len(prompt.text) else None
        written_with_last_message = closed is not None and prompt.text.startswith(closed)
        return prompt.text[len(closed) if closed is not None and written_with_last_message else prompt.tail :]

    def _shared(self, number: int, opening: str, piece: str) -> int:
        """How much of a turn is of the generation prompt, where the turn has not all of that.

        Templates leave out of earlier turns a <think> that the prompt opens. What the turn says itself may begin as the
        rest of the prompt does, so it is compared with turns that say something else.
        """
        others = [self._other_piece(number, which) for which in range(len(_CONTENTS))]
        fixed = others[0].partition(_OTHER[0])[0]
        if opening and fixed.endswith(opening) and piece.startswith(fixed):
            return len(fixed)  # the template opens the conversation within its first message
        columns = zip(opening, piece, *others, strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda column: len({*column}) == 1, columns))
        for tag in _TAG.finditer(opening):
            if tag.start() < shared < tag.end():
                shared = tag.start()
        if opening and not shared:
            raise RowError(f"message {number} does not begin as a generation prompt does: the loss mask is undefined")
        return shared

    def _other_piece(self, number: int, which: int) -> str:
        if which not in self._others:
            turn = self._template.prepared([_saying(which)])[0]
            self._others[which] = self._rendered(
                [turn.copy() if message["role"] == "assistant" else message for message in self._messages]
            )
        other = self._others[which]
        if other is not None and number in other.pieces and number not in other.repeated:
            first, last = other.pieces[number]
        else:
            other = self._template.marked(self._template.prepared([_QUESTION, _saying(which)]), self._tools)
            first, last = _piece(other, 1)
        return other.text[first:last]

    @functools.cached_property
    def _without_calls(self) -> Marked | None:
        silent = [
            {"content": ""} | {key: value for key, value in message.items() if key != "tool_calls"}
            for message in self._messages
        ]
        return self._rendered(silent)

    @functools.cached_property
    def _other_results(self) -> Marked | None:
        """The conversation with other tool results; None where it has none."""
        changed = [
            message if message["role"] in SPOKEN else self._template.prepared([message | {"content": _OTHER[0]}])[0]
            for message in self._messages
        ]
        return self._rendered(changed) if any(message["role"] not in SPOKEN for message in self._messages) else None

    def _rendered(self, messages: Messages, *, generation_prompt: bool = False) -> Marked | None:
        try:
            return self._template.marked(messages, self._tools, generation_prompt=generation_prompt)
        except RowError:
            return None

    def _end(self, number: int, first: int, last: int) -> int:
        piece, other = self._whole.text[first:last], self._other_piece(number, 0)
        if _OTHER[0] not in other:
            raise RowError(f"the chat template leaves out what message {number} says: the loss mask is undefined")
        closing = other.rpartition(_OTHER[0])[2]
        if not closing.strip():
            return self._end_by_next_role(number, last)
        if not piece.endswith(closing):
            raise RowError(f"the chat template does not end message {number} by {closing.strip()!r}")
        return first + len(piece.rstrip())  # the model stops at the token, a line break behind it is the template's

    def _end_by_next_role(self, number: int, last: int) -> int:
        tokens = self._template.role_tokens
        if number + 1 < len(self._messages):
            following = (token for token in tokens.values() if token and self.text.startswith(token, last))
            return last + len(next(following, ""))
        calls = self._messages[number].get("tool_calls") or self._messages[number].get("metadata")
        self.text = self.text[:last] + tokens["tool" if calls else "user"]
        return len(self.text)


def _saying(which: int) -> dict[str, Any]:
    return {"role": "assistant", "content": _CONTENTS[which]}
