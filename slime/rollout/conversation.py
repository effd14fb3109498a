"""Conversations: rendered by a chat template, and for supervised training as tokens, some of them the assistant's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime.rollout.tokenizer import load_tokenizer
from slime.utils.errors import BadInputError
from slime.utils.types import Sample, Status

Messages = list[dict[str, Any]]
Render = Callable[[Messages, bool], str]

_PROBE = "slime-end-of-turn-probe"


class RowError(BadInputError):
    """What is wrong with one row."""


def check_messages(messages: Any, what: str) -> None:
    """Raise RowError unless ``messages`` is a non-empty list of dicts with a ``role``."""
    if not isinstance(messages, list):
        raise RowError(f"{what} is a {type(messages).__name__}; a string or a list of chat messages is expected")
    if not messages:
        raise RowError(f"{what} is an empty list of messages")
    for position, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError(f"message {position} of {what} is not an object with a 'role': {message!r:.80}")


def render(tokenizer: Any, messages: Messages, tools: Any, kwargs: str, *, generation_prompt: bool = True) -> str:
    """The text of a conversation by the tokenizer's chat template.

    Args:
        kwargs: further arguments of the template, a JSON object.

    Raises:
        RowError: the template refuses the conversation.
    """
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=generation_prompt, **json.loads(kwargs)
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise RowError(f"the chat template refuses the conversation: {error}") from error


def with_answer(prompt: str | Messages, label: Any) -> Messages:
    """The conversation of a prompt: a string is the user's message, and the label what the assistant has not said.

    Raises:
        RowError: the label would be said, and is no plain value.
    """
    messages: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if label is not None and not any(message.get("role") == "assistant" for message in messages):
        if isinstance(label, (dict, list)):
            raise RowError(f"the label, which is the assistant's answer here, is a {type(label).__name__}, not a text")
        return [*messages, {"role": "assistant", "content": str(label)}]
    return messages


@dataclass(frozen=True)
class Encoded:
    """Tokens (int32) up to the last trained one, and a mask (uint8) of as many entries: 1 where it is trained."""

    tokens: np.ndarray
    mask: np.ndarray
    response: str
    """The text from the first trained character on."""

    @property
    def response_length(self) -> int:
        """Tokens from the first trained one on."""
        return len(self.mask) - int(self.mask.argmax())

    def fill(self, sample: Sample) -> None:
        """Make ``sample`` a finished one of this conversation."""
        sample.tokens = self.tokens.tolist()
        sample.response = self.response
        sample.response_length = self.response_length
        sample.loss_mask = self.mask[-self.response_length :].tolist()
        sample.reward = 0.0
        sample.status = Status.COMPLETED


def assistant_spans(
    messages: Messages, text: str, render_messages: Render, closing: str, *, last_only: bool
) -> list[tuple[int, int]]:
    """Where in ``text``, the rendering of ``messages``, the assistant's turns are: character ranges.

    A turn is what the model has to produce after the generation prompt, its end-of-turn token included. It is found by
    rendering: it begins where the rendering of the messages before it, with the generation prompt, ends. So what the
    template puts into that prompt (an opened reasoning block, say) is not trained, and what it puts into the turn is.

    Args:
        render_messages: ``(messages, generation_prompt) -> text``.
        closing: what the template puts behind an assistant's turn (`turn_closing`).
        last_only: only the last of the assistant's turns.

    Raises:
        RowError: the template renders earlier turns differently once later ones follow, so that turns cannot be found.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    spans = []
    for i in turns[-1:] if last_only else turns:
        if messages[i].get("step_loss_mask", 1) != 1:
            continue
        start = _turn_start(messages[:i], text, render_messages)
        through = text if i == len(messages) - 1 else render_messages(messages[: i + 1], False)
        end = _turn_end(through, text, start, closing)
        if end < 0:
            raise RowError(f"the end of message {i} is not to be found in the rendered conversation")
        spans.append((start, end))
    return spans


def turn_closing(render_messages: Render) -> str:
    """What the chat template puts behind the content of an assistant's last turn."""
    probe = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
    return render_messages(probe, False).rpartition(_PROBE)[2]


def _turn_start(before: Messages, text: str, render_messages: Render) -> int:
    prompt = render_messages(before, True)
    if text.startswith(prompt):
        return len(prompt)
    closed = render_messages(before, False) if before else ""
    if not text.startswith(closed):
        raise RowError(f"the chat template rewrites the turns before message {len(before)}, its loss mask is undefined")
    # The generation prompt opens something, such as <think>, that this turn does not have.
    common = next((i for i, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), len(text))
    return max(len(closed), common)


def _turn_end(through: str, text: str, start: int, closing: str) -> int:
    """End of the turn that begins at ``start``, -1 if not found; ``through`` is the conversation up to this turn."""
    # The model stops at the end-of-turn token; a line break behind it is the template's. Without such a token the
    # line break is all there is to stop at.
    marker = closing.rstrip() or closing
    if text.startswith(through):
        return len(through) - (len(closing) - len(marker))
    # Templates drop the reasoning of a turn that is not the last one.
    end = text.find(marker, start) if marker else -1
    return end if end < 0 else end + len(marker)


class ConversationEncoder:
    """Encodes conversations by a tokenizer and its chat template."""

    def __init__(self, checkpoint: str, chat_template_kwargs: str = "{}", last_only: bool = False) -> None:
        """
        Raises:
            BadInputError: the tokenizer has no chat template, or cannot tell which characters a token stands for.
        """
        self._tokenizer = load_tokenizer(checkpoint)
        self._kwargs = chat_template_kwargs
        self._last_only = last_only
        self._closing: str | None = None
        if not self._tokenizer.chat_template:
            raise BadInputError(f"--loss-type sft_loss: the tokenizer of {checkpoint} has no chat template")
        if not self._tokenizer.is_fast:
            raise BadInputError(f"--loss-type sft_loss: {checkpoint} has a slow tokenizer, without character offsets")

    def encode(self, messages: Messages, tools: Any = None) -> Encoded:
        """Tokens and mask of a conversation.

        Raises:
            RowError: it is no conversation, its template refuses it, or none of its tokens is trained.
        """
        check_messages(messages, "the conversation")

        def render_messages(part: Messages, generation_prompt: bool) -> str:
            return render(self._tokenizer, part, tools, self._kwargs, generation_prompt=generation_prompt)

        text = render_messages(messages, False)
        if self._closing is None:
            self._closing = turn_closing(render_messages)
        spans = assistant_spans(messages, text, render_messages, self._closing, last_only=self._last_only)
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts, ends = np.asarray(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
        mask = np.zeros(len(starts), dtype=np.uint8)
        for start, end in spans:
            mask |= ((ends > start) & (starts < end)).astype(np.uint8)
        mask[:1] = 0  # nothing comes before the first token to predict it from
        if not mask.any():
            raise RowError(
                "no token of the conversation is trained: it has no assistant turn, or all have step_loss_mask 0"
            )
        length = int(np.flatnonzero(mask)[-1]) + 1
        tokens = np.asarray(encoding["input_ids"], dtype=np.int32)
        return Encoded(
            tokens[:length], mask[:length], text[min(start for start, _ in spans) : max(e for _, e in spans)]
        )
