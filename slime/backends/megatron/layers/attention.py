"""Core attention over packed sequences: grouped queries, tensor and context parallelism, CPU and GPU.

Context parallelism gathers keys and values over Megatron's zigzag layout: rank r holds chunks r and 2n-1-r of the 2n
chunks of every sequence. Each local chunk attends, as a sequence of its own, to everything of its sequence up to the
chunk's end; causal masks are aligned to the bottom right where there are fewer queries than keys. Which tokens those
are depends on the lengths only: it is worked out once per micro-batch (`AttentionPlan`) and kept on `PackedSeqParams`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from slime.backends.megatron.layers.context import attend_in_context
from slime.backends.megatron.layers.rotary import Rotary, rotate
from slime.training.packing import chunk_length, chunks_of
from slime.utils.device import from_host

_PAD_SLACK = 8
"""Sequences whose lengths differ by no more than this share one padded SDPA call: cheaper than a call each while they
are short, and no dearer when they are long."""


def packed_params(lengths: Sequence[int]) -> PackedSeqParams:
    """Megatron's description of a micro-batch that packs sequences of ``lengths`` tokens (over all context ranks).

    The offsets stay in host memory, where `plan_of` reads them.
    """
    offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    longest = max(lengths)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


@dataclass(frozen=True)
class _PaddedGroup:
    batch: int
    query_rows: int
    """batch * queries, rows of the padded layout in which groups follow one another."""
    key_rows: int
    mask: Tensor | None
    """bool [batch, 1, queries, keys]; None where a plain causal mask does."""


class AttentionPlan:
    """Who attends to whom in one micro-batch, on one context-parallel rank.

    Attributes:
        queries: tokens of each local sequence (under context parallelism: of each local chunk).
        keys: tokens that the same sequence's last query may see, all from its beginning.
        key_index: int64 positions of those keys in the gathered stream; None without context parallelism.
        positions: int64 [local tokens], of each token in its sequence.
        longest: the most of ``queries`` and of ``keys``.
    """

    def __init__(self, lengths: Sequence[int], cp_size: int, cp_rank: int, device: torch.device) -> None:
        self.device = device
        self.queries: list[int] = []
        self.keys: list[int] = []
        index: list[Tensor] = []
        positions: list[Tensor] = []
        local_total, local_start = sum(lengths) // cp_size, 0
        for length in lengths:
            if length == 0:
                continue
            chunk = chunk_length(length, cp_size)
            homes = []
            for c in range(2 * cp_size):
                owner, second = (c, 0) if c < cp_size else (2 * cp_size - 1 - c, 1)
                homes.append(torch.arange(chunk) + owner * local_total + local_start + second * chunk)
            for c in chunks_of(cp_rank, cp_size):
                self.queries.append(chunk)
                self.keys.append((c + 1) * chunk)
                index += homes[: c + 1]
                positions.append(torch.arange(chunk) + c * chunk)
            local_start += length // cp_size
        self.key_index = from_host(torch.cat(index), device) if cp_size > 1 else None
        self.positions = from_host(torch.cat(positions), device)
        self.longest = (max(self.queries), max(self.keys))

    @functools.cached_property
    def query_offsets(self) -> Tensor:
        """int32 [sequences + 1]"""
        return self._offsets(self.queries)

    @functools.cached_property
    def key_offsets(self) -> Tensor:
        """int32 [sequences + 1]"""
        return self._offsets(self.keys)

    def _offsets(self, lengths: list[int]) -> Tensor:
        return from_host(torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32), self.device)

    @functools.cached_property
    def padded(self) -> tuple[list[_PaddedGroup], Tensor, Tensor]:
        """Groups of similar length, and where each packed query and key goes in their padded rows (int64)."""
        order = sorted(range(len(self.queries)), key=lambda i: (-self.keys[i], -self.queries[i]))
        members: list[list[int]] = []
        for i in order:
            first = members[-1][0] if members else i
            longest, fits = self.keys[first], self.queries[i] <= self.queries[first]
            if members and fits and longest - self.keys[i] <= _PAD_SLACK:
                members[-1].append(i)
            else:
                members.append([i])
        query_starts, key_starts = [0] * len(order), [0] * len(order)
        groups, query_row, key_row = [], 0, 0
        for group in members:
            queries, keys = self.queries[group[0]], self.keys[group[0]]
            for position, i in enumerate(group):
                query_starts[i] = query_row + position * queries
                key_starts[i] = key_row + position * keys
            mask = self._mask(group, queries, keys)
            groups.append(_PaddedGroup(len(group), len(group) * queries, len(group) * keys, mask))
            query_row += groups[-1].query_rows
            key_row += groups[-1].key_rows
        return groups, self._slots(query_starts, self.queries), self._slots(key_starts, self.keys)

    def _mask(self, group: list[int], queries: int, keys: int) -> Tensor | None:
        """Padding comes last, so that a causal mask keeps real queries from it by itself."""
        shift = [self.keys[i] - self.queries[i] for i in group]
        if not any(shift):
            return None
        last = torch.arange(queries)[None, :] + torch.tensor(shift)[:, None]
        return from_host((torch.arange(keys) <= last[..., None])[:, None], self.device)

    def _slots(self, starts: list[int], lengths: list[int]) -> Tensor:
        rows = [torch.arange(n) + start for start, n in zip(starts, lengths, strict=True)]
        return from_host(torch.cat(rows), self.device)


def plan_of(params: PackedSeqParams | None, cp_size: int, cp_rank: int, device: torch.device) -> AttentionPlan:
    """The plan of a micro-batch, computed at its first use; ValueError without ``params``."""
    if params is None:
        raise ValueError("this model takes packed sequences only: pass packed_seq_params")
    plan: AttentionPlan | None = params.__dict__.get("attention_plan")
    if plan is None:
        padded = params.cu_seqlens_q_padded
        offsets = padded if padded is not None else params.cu_seqlens_q
        plan = AttentionPlan(offsets.diff().tolist(), cp_size, cp_rank, device)
        params.__dict__["attention_plan"] = plan
    return plan


Kernel = Callable[[Tensor, Tensor, Tensor, AttentionPlan, float], Tensor]
"""What computes attention: `kernels.packed_attention`, or what takes and gives the same."""


def is_recomputed(config: TransformerConfig) -> bool:
    """Whether every layer computes its attention again for the gradient: then only one keeps its inputs at a time."""
    if config.recompute_granularity == "selective":
        return "core_attn" in (config.recompute_modules or ())
    return config.recompute_granularity == "full" and config.recompute_method == "uniform"


class PackedAttention(MegatronModule):
    """Megatron's ``core_attention`` for packed causal sequences, with the rotary embedding before it, unless ``rotary``
    is None, as where queries and keys are rotated already."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        *,
        rotary: Rotary | None,
        kernel: Kernel,
    ) -> None:
        super().__init__(config=config)
        self.rotary = rotary
        self.kernel = kernel
        self.recomputed = is_recomputed(config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.cp_group = groups.cp
        self.scale = softmax_scale or config.kv_channels**-0.5
        if config.attention_dropout if attention_dropout is None else attention_dropout:
            raise ValueError("--attention-dropout must be 0: packed attention has no dropout")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """[tokens, heads, channels] of this rank -> [tokens, heads * value channels]."""
        plan = plan_of(packed_seq_params, self.cp_group.size(), self.cp_group.rank(), query.device)
        if self.rotary is not None:
            cos, sin = self.rotary.angles(plan)
            query, key = (rotate(x, cos, sin, self.rotary.interleaved, self.rotary.fused) for x in (query, key))

        def attend(keys: Tensor, values: Tensor) -> Tensor:
            return self.kernel(query, keys, values, plan, self.scale)

        if plan.key_index is None:
            return attend(key, value).flatten(1)
        again = not self.recomputed
        return attend_in_context(attend, key, value, plan.key_index, self.cp_group, again=again).flatten(1)
