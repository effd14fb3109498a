"""What the model said: the text of a response without the tokens that mean something to engine and template alone."""

from __future__ import annotations

import functools
import json
import re
from argparse import Namespace
from collections.abc import Collection
from pathlib import Path
from typing import Any

from slime.data import Sample
from slime.data.rows.tokenizer import load_tokenizer

_READ_BY_GRADERS = ("<think>", "</think>")
"""Kept even where a tokenizer marks them as special: what follows the reasoning is judged."""
_SHORTEST = 3
"""Letters of a special token's text. A tokenizer that pads with "!" does not mean that nobody may say it."""
_USUAL = re.compile(
    r"<\|(?=[^<>|\n]*[A-Za-z][^<>|\n]*[A-Za-z])[^<>|\n]{1,64}\|>|<\uff5c[^<>\uff5c\n]{1,64}\uff5c>|</?s>|<(?:bos|eos|pad|unk|start_of_turn|end_of_turn)>"
)
"""Where there is no tokenizer to ask. ``P(A<|B|>C)`` has none."""


def response_without_special_tokens(args: Namespace, sample: Sample) -> str:
    """The text of ``sample.response`` without special tokens, which is what the built-in rewards judge.

    Special are the tokens that the tokenizer of ``args.hf_checkpoint`` marks so, its added ones included, wherever
    their text stands, and at the end the token of ``--rollout-stop-token-ids`` or of the checkpoint's ``eos_token_id``
    that ended the response. ``<think>`` and ``</think>`` stay, whatever the tokenizer says of them.
    """
    checkpoint = getattr(args, "hf_checkpoint", None)
    if not sample.response or not checkpoint:
        return without_usual_special_tokens(sample.response)
    text = sample.response
    if stop := _stop_text(args, checkpoint, sample):
        text = text.removesuffix(stop)
    special = _special_tokens(checkpoint)
    return text if special is None else special.removed_from(text)


def without_usual_special_tokens(text: str) -> str:
    """``text`` without what looks like a special token of one of the usual tokenizers."""
    return _USUAL.sub("", text)


def _stop_text(args: Namespace, checkpoint: str, sample: Sample) -> str | None:
    if not sample.tokens or not sample.response_length:
        return None
    last = sample.tokens[-1]
    if last not in _eos_token_ids(checkpoint) and last not in (getattr(args, "rollout_stop_token_ids", None) or ()):
        return None
    text: str = load_tokenizer(checkpoint).decode([last])
    return None if text in _READ_BY_GRADERS else text


class _Texts:
    """Strings to take out of texts, the longest that fits first. They are looked up, not tried in turn as alternatives
    of a pattern are: of some models there are thousands."""

    def __init__(self, texts: Collection[str]) -> None:
        self._texts = frozenset(texts)
        self._lengths = sorted({len(text) for text in texts}, reverse=True)
        self._starts = re.compile("|".join(sorted({re.escape(text[0]) for text in texts})))

    def removed_from(self, text: str) -> str:
        kept, end = [], 0
        for match in self._starts.finditer(text):
            start = match.start()
            if start < end:
                continue
            if length := next((n for n in self._lengths if text[start : start + n] in self._texts), 0):
                kept.append(text[end:start])
                end = start + length
        return "".join([*kept, text[end:]])


@functools.lru_cache(maxsize=8)
def _special_tokens(checkpoint: str) -> _Texts | None:
    tokenizer = load_tokenizer(checkpoint)
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    texts = {*tokenizer.all_special_tokens, *(token.content for token in added.values() if token.special)}
    texts = {text for text in texts if len(text) >= _SHORTEST and not text.isalnum() and text not in _READ_BY_GRADERS}
    return _Texts(texts) if texts else None


@functools.lru_cache(maxsize=8)
def _eos_token_ids(checkpoint: str) -> frozenset[int]:
    """Those that the engine ends a response at besides the tokenizer's."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = Path(checkpoint, name)
        ids = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return frozenset(found)
