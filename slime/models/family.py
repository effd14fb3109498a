"""How a model family's weights map between Hugging Face and Megatron-core: one table of rows, read in both directions.

A row says of which Hugging Face tensors a Megatron parameter is put together. Its rule lists, for one tensor-parallel
rank, the *pieces* of those tensors in the order in which the rank's shard holds them; loading, sharding, gathering and
exporting all follow from that list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

HEADS_PREFIX = "mtp."
"""How Megatron's names of the parameters of MTP heads begin, in the model and in checkpoints."""
ADAPTER_MARK = ".lora."
"""In Megatron's names of the parameters of adapters, after the name of the layer that they are beside."""
OUTPUT_PREFIX = "output_layer."
VALUE_HEAD_KEY = "value_head.weight"
"""A critic's head in checkpoints: not the language head's name, which an actor's checkpoint holds in another shape."""
MODEL_PREFIXES = ("decoder.", "embedding.", OUTPUT_PREFIX, HEADS_PREFIX)
"""How keys of a model begin in checkpoints; others are of its optimizer."""
_IGNORED_EXTRA = re.compile(r"\.rotary_emb\.inv_freq$")


def holds_heads(keys: Iterable[str]) -> bool:
    """Whether a checkpoint of these keys has MTP heads."""
    return any(key.startswith(HEADS_PREFIX) for key in keys)


class Source(Protocol):
    """A tensor, or a tensor in a file of which slices can be read."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor: ...


@dataclass(frozen=True)
class Shape:
    """What the rules need to know of a model."""

    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    """Of a dense layer."""
    vocab_size: int
    tied: bool
    """Whether the output layer is the input embedding."""
    num_experts: int = 0
    moe_layers: tuple[bool, ...] = ()
    """Per layer, whether its MLP is a mixture of experts; empty for a dense model."""
    given: frozenset[str] = frozenset()
    """The Megatron arguments that are on, for rows that not every model of a family has."""
    next_token_heads: int = 0
    """Multi-token prediction (MTP) heads, where these are trained."""

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer ``layer`` (from 0) has experts."""
        return bool(self.moe_layers) and self.moe_layers[layer]


@dataclass(frozen=True)
class Piece:
    """``start:stop`` of Hugging Face tensor number ``source`` of a row, along the row's dimension."""

    source: int
    start: int
    stop: int


Rule = Callable[[Shape, int, int], list[Piece]]
"""(shape, extent of the shard along the row's dimension, tensor-parallel rank) -> pieces in the shard's order."""


def whole(shape: Shape, extent: int, rank: int) -> list[Piece]:
    """One tensor under another name, cut into even chunks."""
    return [Piece(0, rank * extent, (rank + 1) * extent)]


def gate_up(shape: Shape, extent: int, rank: int) -> list[Piece]:
    """Gate and up projection of a gated MLP in one matrix; each rank holds its chunk of either."""
    half = extent // 2
    return [Piece(source, rank * half, (rank + 1) * half) for source in (0, 1)]


def fused_gate_up(shape: Shape, extent: int, rank: int) -> list[Piece]:
    """The same of one tensor that has the rows of the gate projection, then those of the up projection."""
    half = extent // 2
    return [Piece(0, first + rank * half, first + (rank + 1) * half) for first in (0, shape.ffn_hidden_size)]


def swapped_halves(shape: Shape, extent: int, rank: int) -> list[Piece]:
    """One tensor that has the second half first; not cut."""
    half = extent // 2
    return [Piece(0, half, extent), Piece(0, 0, half)]


def vocabulary(shape: Shape, extent: int, rank: int) -> list[Piece]:
    """Rows of the vocabulary; Megatron's last shards may be padded beyond it."""
    return [Piece(0, min(rank * extent, shape.vocab_size), min((rank + 1) * extent, shape.vocab_size))]


def qkv(shape: Shape, extent: int, rank: int) -> list[Piece]:
    """Query, key and value, interleaved by query group: [queries of the group | its key | its value].

    Ranks hold even chunks; with more ranks than groups a chunk is part of a group.
    """
    queries = shape.num_attention_heads // shape.num_query_groups * shape.kv_channels
    first, last = rank * extent, (rank + 1) * extent
    pieces: list[Piece] = []
    row = 0
    for group in range(shape.num_query_groups):
        for source, rows in ((0, queries), (1, shape.kv_channels), (2, shape.kv_channels)):
            start, stop = max(first, row), min(last, row + rows)
            if start < stop:
                shift = group * rows - row
                pieces.append(Piece(source, start + shift, stop + shift))
            row += rows
    return pieces


@dataclass(frozen=True)
class Row:
    """One line of a family's table; ``{}`` stands for the layer and, a second time, for the expert."""

    megatron: str
    hf: tuple[str, ...]
    rule: Rule = whole
    dim: int | None = None
    """The dimension that tensor parallelism cuts; None: every rank holds all of it."""
    layers: str = "all"
    """Which layers have it: "all", "dense" or "moe"; or it is of an MTP "head", or of one whose
    Hugging Face names go on counting "after" the layers."""
    if_tied: str | None = None
    """With tied embeddings: the tensor to read instead; then the row is not written."""
    when: str | None = None
    """The Megatron argument without which a model does not have it."""
    unless: str | None = None
    """The Megatron argument with which a model does not have it."""
    same_bucket: str | None = None
    """What a layer has in rows of the same word goes to engines at once: they make one tensor of it, and forget what
    came in another call."""
    along: int = 0
    """Where every rank holds all of it, the dimension that the rule's pieces are of."""

    @property
    def pieces_dim(self) -> int:
        """The dimension that the rule's pieces are of."""
        return self.along if self.dim is None else self.dim

    def indices(self, shape: Shape) -> Iterator[tuple[int, ...]]:
        """The layer and expert numbers the row stands for."""
        if self.when is not None and self.when not in shape.given:
            return
        if self.unless in shape.given:
            return
        depth = self.megatron.count("{}")
        if depth == 0:
            yield ()
            return
        for layer in self._layers(shape):
            if depth == 1:
                yield (layer,)
            else:
                yield from ((layer, expert) for expert in range(shape.num_experts))

    def _layers(self, shape: Shape) -> Iterator[int]:
        if self.layers in ("head", "after"):
            yield from range(shape.next_token_heads)
            return
        for layer in range(shape.num_layers):
            if self.layers == "all" or (self.layers == "moe") == shape.is_moe_layer(layer):
                yield layer

    def sources(self, shape: Shape, index: tuple[int, ...]) -> list[str]:
        """The Hugging Face names of a layer and expert."""
        if self.layers == "after":
            index = (shape.num_layers + index[0], *index[1:])
        return [hf.format(*index) for hf in self.hf]

    def targets(self, shape: Shape, index: tuple[int, ...]) -> list[str]:
        """The Hugging Face names that a layer and expert is written to; none for a tied output layer."""
        return [] if shape.tied and self.if_tied else self.sources(shape, index)

    def in_order(self, shape: Shape, local_shape: Sequence[int]) -> bool:
        """Whether a shard that is all of its parameter holds the Hugging Face tensors one after the other."""
        extent = local_shape[self.pieces_dim]
        pieces = self.rule(shape, extent, 0)
        places = [(piece.source, piece.start) for piece in pieces]
        complete = sum(piece.stop - piece.start for piece in pieces) == extent
        return complete and places == sorted(places) and (self.pieces_dim == 0 or len(pieces) == 1)


def _none(config: Any) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class Heads:
    """How a family's MTP heads predict: see `slime.backends.megatron.layers.mtp`."""

    rows: tuple[Row, ...]
    """Their projection reads the embedding before the hidden state, as megatron-core's does."""
    mask_first_embedding: bool
    """Whether the first token of a sequence sees no embedding, as in the engines' class of the model."""
    copies: tuple[str, ...] = ()
    """How names within a head begin of what is a copy of the model's embedding and output layer: these stay carried."""


@dataclass(frozen=True)
class Family:
    """The architectures that share one table.

    Megatron parameter names are *global*: layer and expert numbers count over all pipeline and expert ranks.
    """

    model_types: tuple[str, ...]
    """Values of ``model_type`` in config.json; the first has a class in transformers, which reads them all."""
    rows: tuple[Row, ...]
    megatron_args: Callable[[Any], dict[str, Any]]
    """Hugging Face config -> Megatron-LM argument names and values."""
    carried: Callable[[Any], tuple[str, ...]] = _none
    """Hugging Face config -> how the names of tensors begin that the Megatron model does without. Loading leaves them
    out, and what is saved as a Hugging Face directory has them as they were in the one that the model came from."""
    heads: Heads | None = None
    """Of what is carried, the heads that can be trained instead."""

    def untrained(self, config: Any, shape: Shape) -> tuple[str, ...]:
        """`carried`, of a model of that shape: where its heads are trained, only their copies."""
        if not shape.next_token_heads or self.heads is None:
            return self.carried(config)
        return tuple(head + copy for head in self.carried(config) for copy in self.heads.copies)

    def row(self, name: str) -> tuple[Row, tuple[int, ...]]:
        """The row of a global Megatron parameter name, and its layer and expert numbers; KeyError without one."""
        parts = name.split(".")
        template = ".".join("{}" if part.isdigit() else part for part in parts)
        row = self._by_template.get(template)
        if row is None:
            raise KeyError(f"no row for the Megatron parameter {name} in the table of {', '.join(self.model_types)}")
        return row, tuple(int(part) for part in parts if part.isdigit())

    def parameters(self, shape: Shape) -> Iterator[str]:
        """Every global Megatron parameter name of a model, always in the same order."""
        for row in self._rows():
            for index in row.indices(shape):
                yield row.megatron.format(*index)

    def _rows(self) -> tuple[Row, ...]:
        return self.rows + (self.heads.rows if self.heads else ())

    @cached_property
    def _by_template(self) -> dict[str, Row]:
        """Of rows with one name, the first."""
        return {row.megatron: row for row in reversed(self._rows())}

    def sources(self, name: str, shape: Shape) -> list[str]:
        """The Hugging Face tensors that ``name`` is read from."""
        row, index = self.row(name)
        if shape.tied and row.if_tied:
            return [row.if_tied]
        return row.sources(shape, index)

    def hf_names(self, name: str, shape: Shape) -> list[str]:
        """The Hugging Face tensors that ``name`` is written to; none for a tied output layer."""
        row, index = self.row(name)
        return row.targets(shape, index)

    def shard(
        self, name: str, get: Callable[[str], Source], shape: Shape, local_shape: Sequence[int], rank: int
    ) -> Tensor:
        """Tensor-parallel rank ``rank``'s part of a Megatron parameter, of shape ``local_shape``; ValueError where the
        tensors do not have the shapes that the model's configuration implies.

        Only the slices of the Hugging Face tensors that this part holds are read. Vocabulary padding is zero.
        """
        row, _ = self.row(name)
        names = self.sources(name, shape)
        dim = row.pieces_dim
        pieces = row.rule(shape, local_shape[dim], rank if row.dim is not None else 0)
        parts = []
        for piece in pieces:
            source = get(names[piece.source])
            if piece.stop > source.shape[dim] or len(source.shape) != len(local_shape):
                raise ValueError(_wrong_shape(name, names, [get(n) for n in names], local_shape))
            parts.append(source[(*[slice(None)] * dim, slice(piece.start, piece.stop))])
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
        missing = local_shape[dim] - tensor.shape[dim]
        if missing and row.rule is vocabulary:
            tensor = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
        if tuple(tensor.shape) != tuple(local_shape):
            raise ValueError(_wrong_shape(name, names, [get(n) for n in names], local_shape))
        return tensor

    def join(self, name: str, shards: Sequence[Tensor], shape: Shape) -> list[tuple[str, Tensor]]:
        """The Hugging Face tensors of a Megatron parameter, from its shards in the order of tensor-parallel ranks.

        Works on meta tensors too. The result may be views of the shards.
        """
        row, index = self.row(name)
        dim = row.pieces_dim
        names = row.targets(shape, index)
        parts: list[list[tuple[int, Tensor]]] = [[] for _ in names]
        for rank, shard in enumerate(shards if row.dim is not None else shards[:1]):
            offset = 0
            for piece in row.rule(shape, shard.shape[dim], rank) if names else ():
                length = piece.stop - piece.start
                parts[piece.source].append((piece.start, shard.narrow(dim, offset, length)))
                offset += length
        ordered = ([part for _, part in sorted(own, key=lambda p: p[0])] for own in parts)
        tensors = (own[0] if len(own) == 1 else torch.cat(own, dim=dim) for own in ordered)
        return list(zip(names, tensors, strict=True))


def _wrong_shape(name: str, names: Sequence[str], sources: Sequence[Source], local_shape: Sequence[int]) -> str:
    found = ", ".join(f"{n} {list(source.shape)}" for n, source in zip(names, sources, strict=True))
    return f"cannot make {name} {list(local_shape)} of {found}: the weights do not fit the shape in config.json"


def check_names(
    family: Family, shape: Shape, names: Iterable[str], directory: Path, carried: tuple[str, ...] = ()
) -> None:
    """Raise ValueError listing the tensors that a checkpoint lacks or has too many, but for what it may carry."""
    found = set(names)
    wanted = {source for name in family.parameters(shape) for source in family.sources(name, shape)}
    extra = {name for name in found - wanted if not (_IGNORED_EXTRA.search(name) or name.startswith(carried))}
    if shape.tied:
        extra.discard("lm_head.weight")
    problems = [
        f"{title}: {', '.join(sorted(some)[:10])}{f' and {len(some) - 10} more' if len(some) > 10 else ''}"
        for title, some in (("missing", wanted - found), ("unexpected", extra))
        if some
    ]
    if problems:
        raise ValueError(f"{directory}: weights do not fit config.json; {'; '.join(problems)}")
