"""The reward of the compared runs, by its file's path: it imports nothing, so that it is the same in each revision."""

from __future__ import annotations

from typing import Any


async def lower_half(args: Any, sample: Any, **kwargs: Any) -> float:
    """The share of a response's tokens whose id is in the lower half of the vocabulary: a model of random weights, too,
    gets rewards that differ."""
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    return sum(token < args.vocab_size / 2 for token in response) / max(1, len(response))
