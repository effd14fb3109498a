"""In which order servers on CPUs attend: SGLang's torch_native computes one request after the other."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

_SHORT = 32
"""Up to so many queries or keys are padded to each other; more to less than twice as many."""
_MOST_SCORES = 1 << 20
"""Of a group, for each head: bounds what padding and masks take. A request that has more is a group of its own."""


@dataclass(frozen=True)
class Group:
    """Requests that are attended to together, padded to one size."""

    queries: torch.Tensor
    """int64 [requests, queries]: rows of the batch's queries; the last of a request is repeated."""
    is_query: torch.Tensor
    """bool [requests, queries]: which of them are not padding."""
    keys: torch.Tensor
    """int64 [requests, keys]: places in the cache; the first of a request is repeated, for a place that no request has
    may hold NaN, which a mask does not hide in the values."""
    mask: torch.Tensor
    """bool [requests, 1, queries, keys]: who attends to whom."""


def attend_together() -> None:
    """Has torch_native attention compute the requests of a batch together, padded to similar lengths.

    SGLang's own computes one request after the other, which takes half the time of a small model. Each is padded by its
    own length alone, so that its bits do not depend on the others where torch has one thread, as in engines on CPUs,
    and prompts are computed whole. Attention to an encoder is left as it is.
    """
    backend: Any = importlib.import_module("sglang.srt.layers.attention.torch_native_backend").TorchNativeAttnBackend
    prepare = backend.init_forward_metadata
    decode_alone, extend_alone = backend._run_sdpa_forward_decode, backend._run_sdpa_forward_extend

    def init_forward_metadata(self: Any, batch: Any) -> None:
        prepare(self, batch)
        self.groups_of_pass = {}  # layers share them

    def attend(
        self: Any, tensors: list[Any], places: tuple[torch.Tensor, ...], causal: bool, options: dict[str, Any]
    ) -> torch.Tensor:
        window = options["sliding_window_size"]
        if (causal, window) not in self.groups_of_pass:
            self.groups_of_pass[causal, window] = list(groups_of(*places, causal=causal, window=window))
        query, output, keys, values = tensors
        groups = self.groups_of_pass[causal, window]
        return attend_in_groups(query, output, keys, values, groups, scale=options["scaling"])

    def decode(self: Any, *of_batch: Any, **options: Any) -> torch.Tensor:
        *tensors, tokens, requests, lengths, encoder_lengths = of_batch
        if encoder_lengths is not None:
            alone: torch.Tensor = decode_alone(self, *of_batch, **options)
            return alone
        return attend(self, tensors, (tokens, requests, lengths - 1, torch.ones_like(lengths)), True, options)

    def extend(self: Any, *of_batch: Any, **options: Any) -> torch.Tensor:
        *tensors, tokens, requests, _, prefix_lengths, new_lengths, encoder_lengths = of_batch
        if encoder_lengths is not None:
            alone: torch.Tensor = extend_alone(self, *of_batch, **options)
            return alone
        return attend(self, tensors, (tokens, requests, prefix_lengths, new_lengths), options["causal"], options)

    backend.init_forward_metadata = init_forward_metadata
    backend._run_sdpa_forward_decode, backend._run_sdpa_forward_extend = decode, extend


def attend_one_by_one() -> None:
    """Has torch_native attention compute prompts as it decodes, one query at a time.

    SDPA gives a query other bits beside others, so that a token would have others as part of a prompt than when it was
    made, as those of earlier turns are.
    """
    backend: Any = importlib.import_module("sglang.srt.layers.attention.torch_native_backend").TorchNativeAttnBackend

    def extend(
        self: Any,
        query: torch.Tensor,
        output: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tokens: torch.Tensor,
        requests: torch.Tensor,
        lengths: torch.Tensor,
        prefix_lengths: torch.Tensor,
        new_lengths: torch.Tensor,
        *rest: Any,
        causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        ends = [torch.arange(p + 1, n + 1) for p, n in zip(prefix_lengths.tolist(), lengths.tolist(), strict=True)]
        of_queries = requests.repeat_interleave(new_lengths), torch.cat(ends)
        attended: torch.Tensor = self._run_sdpa_forward_decode(
            query, output, keys, values, tokens, *of_queries, *rest, causal=False, **options
        )
        return attended

    backend._run_sdpa_forward_extend = extend


def groups_of(
    tokens: torch.Tensor,
    requests: torch.Tensor,
    prefix_lengths: torch.Tensor,
    new_lengths: torch.Tensor,
    *,
    causal: bool,
    window: int | None,
) -> Iterator[Group]:
    """The requests of a batch by similar lengths.

    Args:
        tokens: [requests of the engine, longest context], places in the cache.
        requests: int64 [requests], rows of ``tokens``.
        prefix_lengths: [requests], tokens that are in the cache and no queries.
        new_lengths: [requests], tokens after these, which are the batch's queries, one request after the other.
        causal: whether a query attends to no later token.
        window: how many tokens before itself a query attends to; None or less than 0: to all.
    """
    of_sizes: dict[tuple[int, int], list[int]] = {}
    lengths = zip(prefix_lengths.tolist(), new_lengths.tolist(), strict=True)
    for i, (before, new) in enumerate(lengths):
        if new:
            of_sizes.setdefault((_padded(new), _padded(before + new)), []).append(i)
    starts = new_lengths.cumsum(0) - new_lengths
    for (most_queries, most_keys), members in of_sizes.items():
        at_once = max(_MOST_SCORES // (most_queries * most_keys), 1)
        for first in range(0, len(members), at_once):
            chosen = torch.tensor(members[first : first + at_once])
            before, new = prefix_lengths[chosen, None], new_lengths[chosen, None]
            # Not to the longest of the group: a request's bits depend on how far it is padded, and so on itself alone.
            query, key = torch.arange(most_queries), torch.arange(most_keys)
            exists = key < before + new
            places = tokens[requests[chosen][:, None], torch.where(exists, key, 0)]
            at, of = (before + query)[:, :, None], key[None, None]  # positions of queries and keys in their requests
            mask = exists[:, None].expand(-1, len(query), -1)
            if causal:
                mask = mask & (of <= at)
            if window is not None and window >= 0:
                mask = mask & (of >= at - window)
            is_query = query < new
            yield Group(
                starts[chosen, None] + query.minimum(new - 1),
                is_query,
                places.long(),
                # A query that only pads has keys, too, for of none it would be NaN.
                (mask | ~is_query[:, :, None])[:, None],
            )


def attend_in_groups(
    query: torch.Tensor,
    output: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    groups: list[Group],
    *,
    scale: float | None,
) -> torch.Tensor:
    """Writes into ``output`` [queries, heads, value channels], and returns it.

    Args:
        query: [queries, heads, channels].
        key_cache: [places, key heads, channels].
        value_cache: [places, key heads, value channels].
        scale: of the scores before softmax; None is one by the square root of the channels.
    """
    for group in groups:
        keys, values = (
            cache.index_select(0, group.keys.flatten()).unflatten(0, group.keys.shape).transpose(1, 2).to(query.dtype)
            for cache in (key_cache, value_cache)
        )
        attended = scaled_dot_product_attention(
            query[group.queries].transpose(1, 2),
            keys,
            values,
            attn_mask=group.mask,
            scale=scale,
            enable_gqa=query.size(1) != key_cache.size(1),
        )
        output[group.queries[group.is_query]] = attended.transpose(1, 2)[group.is_query]
    return output


def _padded(length: int) -> int:
    return 1 if length == 1 else max(1 << (length - 1).bit_length(), _SHORT)
