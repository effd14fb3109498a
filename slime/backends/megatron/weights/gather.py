"""Sharded Megatron parameters to full Hugging Face tensors on every rank, in bounded buckets and a fixed order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from slime.models import Family, Shape
from slime.utils import device


@dataclass(frozen=True)
class _Owner:
    """Where a parameter lives; parameters with one owner are gathered together."""

    is_expert: bool
    stage: int
    """Pipeline rank."""
    expert_rank: int
    """Expert-parallel rank; 0 for parameters outside experts, which all of them hold."""
    dtype: torch.dtype


_Held = tuple[_Owner, tuple[int, ...]]
"""Owner and shape of a shard."""
_Read = Callable[[str], Tensor]
"""What is gathered of a name, of the parameter's shape and type."""
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class _Entry:
    """One parameter, as every rank knows it."""

    name: str
    owner: _Owner
    local_shape: tuple[int, ...]
    """Of one tensor-parallel shard."""
    hf: tuple[tuple[str, tuple[int, ...]], ...]
    """Names and shapes of the Hugging Face tensors that it becomes."""
    in_order: bool
    """`Row.in_order`."""
    unit: tuple[str, ...]
    """What shares it goes into one bucket: `Row.same_bucket` and the layer, or the name alone."""

    @property
    def local_numel(self) -> int:
        return prod(self.local_shape)

    @property
    def hf_bytes(self) -> int:
        return sum(prod(shape) for _, shape in self.hf) * self.owner.dtype.itemsize


class Gatherer:
    """Gathers a model; constructing it agrees with the other ranks on who holds what (collective).

    It keeps no tensor: as long as names, shapes and the layout stay, it gathers whatever values there are.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], family: Family, shape: Shape, *, own_experts: bool = False
    ) -> None:
        """
        Args:
            parameters: this rank's, by global name.
            own_experts: leave out the experts of other expert-parallel ranks.
        """
        self.family, self.shape, self._own_experts = family, shape, own_experts
        self._forms: dict[tuple[str, tuple[int, ...]], tuple[list[tuple[int, ...]], bool]] = {}
        experts, stages = (
            parallel_state.get_expert_model_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
        )

        @functools.cache  # one object of each kind, which is pickled once
        def owner(is_expert: bool, dtype: torch.dtype) -> _Owner:
            return _Owner(is_expert, stages.rank(), experts.rank() if is_expert else 0, dtype)

        where: dict[str, _Held] = {
            name: (owner(".experts." in name, parameter.dtype), tuple(parameter.shape))
            for name, parameter in parameters.items()
        }
        # The ranks of one pipeline have the same expert-parallel rank.
        where = union(where, *([] if own_experts else [experts]), stages)
        entries = [self._entry(name, *where[name]) for name in family.parameters(shape) if name in where]
        self.entries = _by_unit(
            sorted((e for e in entries if e.hf), key=lambda e: (e.owner.is_expert, e.owner.stage, e.owner.expert_rank))
        )

    def _entry(self, name: str, owner: _Owner, local_shape: tuple[int, ...]) -> _Entry:
        row, index = self.family.row(name)
        unit = (row.same_bucket, *map(str, index)) if row.same_bucket else (name,)
        form = row.megatron, local_shape  # a row's layers and experts differ by name alone
        if form not in self._forms:
            shapes = [shape for _, shape in hf_shapes(self.family, self.shape, name, local_shape)]
            self._forms[form] = shapes, row.in_order(self.shape, local_shape)
        shapes, in_order = self._forms[form]
        hf = tuple(zip(row.targets(self.shape, index), shapes, strict=True))
        return _Entry(name, owner, local_shape, hf, in_order, unit)

    def buckets(self, bucket_bytes: int, read: _Read) -> Iterator[list[tuple[str, Tensor]]]:
        """Full tensors by Hugging Face name (collective); the same on every rank, or of each its own experts in place
        of as many others."""
        for bucket in _cut(self.entries, bucket_bytes):
            tensors: list[tuple[str, Tensor]] = []
            for owner, segment in groupby(bucket, key=lambda entry: entry.owner):
                tensors += self._segment(owner, list(segment), read)
            yield tensors

    @torch.no_grad()
    def _segment(self, owner: _Owner, entries: list[_Entry], read: _Read) -> list[tuple[str, Tensor]]:
        places = [place for entry in entries for place in entry.hf]
        sizes = [prod(shape) for _, shape in places]
        full = torch.empty(sum(sizes), dtype=owner.dtype, device=device.current_device())
        parts = zip(places, full.split(sizes), strict=True)
        tensors = [(name, part.view(shape)) for (name, shape), part in parts]
        if owner.stage == parallel_state.get_pipeline_model_parallel_rank():
            experts = parallel_state.get_expert_model_parallel_group()
            if not owner.is_expert or owner.expert_rank == experts.rank():
                self._fill(full, tensors, entries, read)
            if owner.is_expert and not self._own_experts:
                _broadcast(full, owner.expert_rank, experts)
        _broadcast(full, owner.stage, parallel_state.get_pipeline_model_parallel_group())
        return tensors

    def _fill(self, full: Tensor, tensors: list[tuple[str, Tensor]], entries: list[_Entry], read: _Read) -> None:
        """Gather the shards over tensor-parallel ranks, all in one collective, and put them where they belong."""
        group = tensor_group(entries[0].name)
        if group.size() == 1:
            torch.cat([tensor.flatten() for entry in entries for tensor in self._whole(entry, read)], out=full)
            return
        local = torch.cat([read(entry.name).flatten() for entry in entries])
        shards = local.new_empty(group.size(), local.numel())
        dist.all_gather_into_tensor(shards.view(-1), local, group=group)
        targets = iter(tensors)
        offset = 0
        for entry in entries:
            parts = shards[:, offset : offset + entry.local_numel].unflatten(1, entry.local_shape).unbind(0)
            for _, tensor in self.family.join(entry.name, parts, self.shape):
                next(targets)[1].copy_(tensor)
            offset += entry.local_numel

    def _whole(self, entry: _Entry, read: _Read) -> list[Tensor]:
        """A parameter that nothing cuts as tensors that, one after the other, are its Hugging Face tensors."""
        parameter = read(entry.name)
        if entry.in_order:
            return [parameter]
        return [tensor for _, tensor in self.family.join(entry.name, [parameter], self.shape)]


def hf_shapes(
    family: Family, shape: Shape, name: str, local_shape: tuple[int, ...]
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Names and shapes of the Hugging Face tensors that a parameter with shards of ``local_shape`` is written to."""
    shards = [torch.empty(local_shape, device="meta")] * tensor_group(name).size()
    return tuple((hf, tuple(tensor.shape)) for hf, tensor in family.join(name, shards, shape))


def tensor_group(name: str) -> dist.ProcessGroup:
    """The ranks that a parameter of this global name is cut over."""
    if ".experts." in name:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def union(own: dict[str, _Value], *groups: dist.ProcessGroup) -> dict[str, _Value]:
    """The union over one group after the other; where several ranks hold a name, the first one's value."""
    for group in groups:
        if group.size() > 1:
            gathered: list[dict[str, _Value]] = [{} for _ in range(group.size())]
            dist.all_gather_object(gathered, own, group=group)
            own = {name: value for part in reversed(gathered) for name, value in part.items()}
    return own


def _broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        dist.broadcast(tensor, group_src=source, group=group)


def _by_unit(entries: list[_Entry]) -> list[_Entry]:
    """The entries of a unit at the place of its first one; otherwise the same order."""
    first: dict[tuple[str, ...], int] = {}
    for position, entry in enumerate(entries):
        first.setdefault(entry.unit, position)
    return sorted(entries, key=lambda entry: first[entry.unit])


def _cut(entries: list[_Entry], limit: int) -> Iterator[list[_Entry]]:
    """Consecutive runs of whole units whose sizes add up to at most ``limit``, or one unit."""
    run: list[_Entry] = []
    used = 0
    for _, members in groupby(entries, key=lambda entry: entry.unit):
        unit = list(members)
        size = sum(entry.hf_bytes for entry in unit)
        if run and used + size > limit:
            yield run
            run, used = [], 0
        run += unit
        used += size
    if run:
        yield run
