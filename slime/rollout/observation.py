"""Turns of a response: what an environment says, appended and never trained on, and what the model has said."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.data import Sample, Status
from slime.data.rows.tokenizer import load_tokenizer
from slime.rollout.engine.generation import room_left


def append_observation(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], text: str, *, special_tokens: bool = False
) -> bool:
    """Append ``text`` to the response with mask 0, and say whether the model has room to go on. If not even one token
    of an answer fits behind it, nothing is appended, and the status is ``TRUNCATED``.

    Only the new text is tokenised: what was there before stays as the engine made it. ``max_new_tokens`` of the
    ``sampling_params`` counts the whole response, the environment's words included. With ``special_tokens``
    ``<|im_end|>`` and the like in ``text`` become special tokens. Leave it off for what a tool or a document says: it
    could end the model's turn, or speak as the user.
    """
    tokenizer = load_tokenizer(args.hf_checkpoint)
    tokens = tokenizer(text, add_special_tokens=False, split_special_tokens=not special_tokens)["input_ids"]
    room = room_left(args, sample, sampling_params["max_new_tokens"])
    if room is not None and len(tokens) >= room:
        sample.status = Status.TRUNCATED
        return False
    sample.append_response_tokens(args, tokens=tokens, trainable=False, text=text)
    return True


def response_text(args: Namespace, sample: Sample, start: int = 0, *, skip_special_tokens: bool = False) -> str:
    """The text of the response from its token ``start`` on.

    Remember where a turn begins as a number of tokens: ``sample.response`` is for reading, and may change in length.
    The engine's text ends at a stop string where its last token reaches further, and a response that goes on after an
    interruption is decoded anew.
    """
    tokens = sample.tokens[len(sample.tokens) - sample.response_length + start :]
    text: str = load_tokenizer(args.hf_checkpoint).decode(tokens, skip_special_tokens=skip_special_tokens)
    return text
