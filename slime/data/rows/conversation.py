"""Conversations: rendered by a chat template, and for supervised training as tokens, some of them the assistant's."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime.data import Sample, Status
from slime.data.rows.chat_template import chat_template
from slime.data.rows.messages import Messages, RowError, check_messages
from slime.data.rows.tokenizer import load_tokenizer
from slime.data.rows.turns import find_turns
from slime.utils.errors import BadInputError


def render(tokenizer: Any, messages: Messages, tools: Any, kwargs: str, *, generation_prompt: bool = True) -> str:
    """The text of a conversation by the tokenizer's chat template, with further arguments ``kwargs``, a JSON object.
    RowError where the template refuses it, or a message has what no template takes."""
    template = chat_template(tokenizer, tools or None, kwargs)
    return template.text(template.prepared(messages), tools or None, generation_prompt=generation_prompt)


def with_answer(prompt: str | Messages, label: Any) -> Messages:
    """The conversation of a prompt: a string is the user's message, and the label what the assistant has not said, a
    plain value, else RowError. JSON text of messages is read before, by `messages_of_json`."""
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


class ConversationEncoder:
    """Encodes conversations by a tokenizer and its chat template."""

    def __init__(self, checkpoint: str, chat_template_kwargs: str = "{}", last_only: bool = False) -> None:
        """Raises BadInputError where the tokenizer has no chat template, or does not tell which characters a token
        is."""
        self._tokenizer = load_tokenizer(checkpoint)
        self._kwargs = chat_template_kwargs
        self._last_only = last_only
        if not self._tokenizer.chat_template:
            raise BadInputError(f"--loss-type sft_loss: the tokenizer of {checkpoint} has no chat template")
        if not self._tokenizer.is_fast:
            raise BadInputError(f"--loss-type sft_loss: {checkpoint} has a slow tokenizer, without character offsets")

    def encode(self, messages: Messages, tools: Any = None) -> Encoded:
        """Tokens and mask of a conversation; RowError where it is none, its template refuses it, or no token is
        trained."""
        check_messages(messages, "the conversation")
        template = chat_template(self._tokenizer, tools or None, self._kwargs)
        turns = find_turns(template, template.prepared(messages), tools or None, last_only=self._last_only)
        tokens, starts, ends = self._tokens(turns.text, [edge for span in turns.spans for edge in span])
        mask = np.zeros(len(starts), dtype=np.uint8)
        for start, end in turns.spans:
            mask |= ((ends > start) & (starts < end)).astype(np.uint8)
        mask[:1] = 0  # nothing comes before the first token to predict it from
        if not mask.any():
            raise RowError(
                "no token of the conversation is trained: it has no assistant turn, or all have step_loss_mask 0"
            )
        length = int(np.flatnonzero(mask)[-1]) + 1
        first, last = min(start for start, _ in turns.spans), max(end for _, end in turns.spans)
        return Encoded(tokens[:length], mask[:length], turns.text[first:last])

    def _tokens(self, text: str, edges: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids, and where in ``text`` they begin and end; no token reaches over an edge.

        An engine's prompt is tokenised for itself, so what the model says begins with a token of its own, even where
        the two would be one token (a line break before a line break).
        """
        ids, starts, ends = self._tokenised(text)
        crossed = [edge for edge in sorted({*edges}) if ((starts < edge) & (ends > edge)).any()]
        if not crossed:
            return ids, starts, ends
        bounds = [0, *crossed, len(text)]
        parts = []
        for start, end in itertools.pairwise(bounds):
            part, first, last = self._tokenised(text[start:end])
            parts.append((part, first + start, last + start))
        ids, starts, ends = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        return ids, starts, ends

    def _tokenised(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        try:
            encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        except (TypeError, UnicodeError) as error:  # half a surrogate pair
            raise RowError(f"the conversation is not text that can be tokenised: {error}") from error
        starts, ends = np.asarray(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
        return np.asarray(encoding["input_ids"], dtype=np.int32), starts, ends
