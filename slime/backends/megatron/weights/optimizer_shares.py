"""Which rank stores what of a distributed optimizer: each some of the parameters of which it has a part.

Megatron-core cuts the parameters that ranks have in common into equal shares, wherever that is. To store state by
parameters, as its ``fully_reshardable`` format wants it, it gathers all of it on each rank, twelve bytes a parameter of
the whole, and the first writes it; to load it each rank reads all. Here a rank stores about as much as its share is,
whole parameters, and only what a cut divides is sent, either way. What is stored is the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch import Tensor
from torch.nn import Parameter

from slime.utils import device

_CHUNK = 16 << 20
"""Elements of a message."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A rank's part of a parameter: from which of its elements to which, and as what rank of the group."""

    rank: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Shared:
    """A parameter of a distributed optimizer, who has what of it, and who stores it."""

    parameter: Parameter
    pieces: Sequence[Piece]
    storer: int

    def of(self, rank: int) -> Piece | None:
        """What a rank has of it."""
        return next((piece for piece in self.pieces if piece.rank == rank), None)


def pieces_of(buffer: Any, ranks: int) -> dict[Parameter, list[Piece]]:
    """By parameter of a gradient buffer, in the buffer's order, who of ``ranks`` has what of it."""
    found = {}
    for parameter, (start, end, number) in buffer.param_index_map.items():
        bucket = buffer.buckets[number]
        share = bucket.grad_data.numel() // ranks
        holders = range((start - bucket.offset) // share, (end - 1 - bucket.offset) // share + 1)
        bounds = ((rank, bucket.offset + rank * share) for rank in holders)
        found[parameter] = [
            Piece(rank, max(start, begin) - start, min(end, begin + share) - start) for rank, begin in bounds
        ]
    return found


def shared_out(buffers: Sequence[Any], ranks: int) -> list[Shared]:
    """The parameters of buffers in Megatron's order. The largest are given away first, each to the holder that stores
    the least until then."""
    found = [of_one for buffer in buffers for of_one in pieces_of(buffer, ranks).items()]
    stored, storers = [0] * ranks, [0] * len(found)
    for number in sorted(range(len(found)), key=lambda number: -found[number][0].numel()):
        parameter, pieces = found[number]
        storers[number] = min(pieces, key=lambda piece: (stored[piece.rank], piece.start - piece.end)).rank
        stored[storers[number]] += parameter.numel()
    return [Shared(*of_one, storer) for of_one, storer in zip(found, storers, strict=True)]


def sharded_by_storers(
    self: Any, model_sharded_state_dict: Mapping[str, Any], is_loading: bool = False, metadata: Any = None
) -> Any:
    """In place of `DistributedOptimizer.sharded_param_state_fully_reshardable`; collective over its group.

    By the number of a parameter, float32 tensors of the parameter's shape of those that this rank stores; while
    ``is_loading``, to be filled. ValueError where the model stores a parameter not at all.
    """
    group = self.data_parallel_group
    bases, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    stored_as = {base.data: base for base in nested_values(bases)}
    everything = shared_out(self.buffers, group.size())
    missing = next((shared.parameter for shared in everything if shared.parameter not in stored_as), None)
    if missing is not None:
        raise ValueError(
            f"a trained parameter of shape {tuple(missing.shape)} is not in what the model stores of itself: the "
            "sharded_state_dict of its module leaves it out"
        )
    if not is_loading:
        _connect(group)
    state: dict[int, dict[str, Any]] = {}
    for number, shared in enumerate(everything):
        if values := _empty(self, shared) if is_loading else _collected(self, shared):
            base = stored_as[shared.parameter]
            # Replica 0 counts, and there is no other one but of further instances of the optimizer.
            replica = (*base.replica_id[:-1], self.distributed_optimizer_instance_id)
            state[number] = {key: _stored(base, key, value, replica) for key, value in values.items()}
    # An empty dictionary would be something that ranks have in common, and differ in.
    return state or LocalNonpersistentObject({})


@torch.no_grad()
def load_from_storers(self: Any, state_dict: Mapping[int, Mapping[str, Tensor]]) -> None:
    """In place of `DistributedOptimizer.load_parameter_state_from_fully_reshardable`, of what `sharded_by_storers`
    asked for; collective."""
    group, keys = self.data_parallel_group, _keys(self)
    rank = group.rank()
    _connect(group)
    for number, shared in enumerate(shared_out(self.buffers, group.size())):
        own, values = shared.of(rank), dict[str, Tensor]()
        if rank == shared.storer:
            for piece in shared.pieces:
                parts = {key: state_dict[number][key].flatten()[piece.start : piece.end] for key in keys}
                if piece.rank == rank:
                    values = parts
                else:
                    _send(parts.values(), piece.rank, shared.parameter.device, group)
        elif own is not None:
            values = {key: torch.empty(own.end - own.start, device=shared.parameter.device) for key in keys}
            _receive(values.values(), shared.storer, shared.parameter.device, group)
        if values:
            self._set_main_param_and_optimizer_states(shared.parameter, values)


def _keys(optimizer: Any) -> tuple[str, ...]:
    """megatron-core 0.16.1 has Adam's alone."""
    return ("param", *getattr(optimizer, "optimizer_state_keys", ("exp_avg", "exp_avg_sq")))


def _empty(optimizer: Any, shared: Shared) -> dict[str, Tensor]:
    is_here = optimizer.data_parallel_group.rank() == shared.storer
    return {key: torch.empty(shared.parameter.numel()) for key in _keys(optimizer)} if is_here else {}


def _collected(optimizer: Any, shared: Shared) -> dict[str, Tensor]:
    """The state of a whole parameter, flat and in host memory, on the rank that stores it; nothing on others.

    Of a parameter that is whole on a rank without a GPU it is the live state, which changes in the next step, and no
    copy.
    """
    group, keys, where = optimizer.data_parallel_group, _keys(optimizer), shared.parameter.device
    rank, own = group.rank(), shared.of(group.rank())
    parts: dict[str, Tensor] = {}
    if own is not None:
        state = optimizer._get_main_param_and_optimizer_states(shared.parameter)
        parts = {key: state[key].detach().flatten() for key in keys}
    if rank != shared.storer:
        _send(parts.values(), shared.storer, where, group)
        return {}
    if len(shared.pieces) == 1:
        # Not by Megatron's writer: that takes pinned memory, a power of two for each tensor, which torch keeps.
        return {key: part.to("cpu", torch.float32) for key, part in parts.items()}
    whole = {key: torch.empty(shared.parameter.numel()) for key in keys}
    for piece in shared.pieces:
        of_piece = {key: values[piece.start : piece.end] for key, values in whole.items()}
        if piece.rank != rank:
            _receive(of_piece.values(), piece.rank, where, group)
            continue
        for key, values in of_piece.items():
            values.copy_(parts[key])
    return whole


def _send(parts: Iterable[Tensor], receiver: int, where: torch.device, group: dist.ProcessGroup) -> None:
    """By way of a device, in chunks, which have to fit into it beside all else."""
    for part in parts:
        for chunk in part.split(_CHUNK):
            _pass(dist.isend, chunk.to(where, torch.float32), receiver, group)


def _receive(parts: Iterable[Tensor], sender: int, where: torch.device, group: dist.ProcessGroup) -> None:
    """What `_send` sends, into float32 tensors of the same sizes, on the device or in host memory."""
    for part in parts:
        for chunk in part.split(_CHUNK):
            received = torch.empty_like(chunk, device=where)
            _pass(dist.irecv, received, sender, group)
            chunk.copy_(received)


def _connect(group: dist.ProcessGroup) -> None:
    """With all ranks: NCCL's communicator, which it makes at first use, would wait for them at the first piece."""
    dist.all_reduce(torch.zeros(1, device=device.current_device()), group=group)


def _pass(way: Any, values: Tensor, other: int, group: dist.ProcessGroup) -> None:
    """Send to or receive from a rank of the group. In a batch, if of one: so it goes by the group's communicator, and
    not by one that is made for the two ranks. All ranks go through the parameters in one order, so that none waits for
    another that waits for it."""
    for request in dist.batch_isend_irecv([dist.P2POp(way, values, dist.get_global_rank(group, other), group)]):
        request.wait()


def _stored(base: Any, key: str, value: Tensor, replica: tuple[int, ...]) -> Any:
    """``value`` as what is stored of the optimizer where ``base`` is of the model."""
    changes: dict[str, Any] = {
        "key": f"optimizer.state.{key}.{base.key}",
        "data": value.reshape(base.data.shape),
        "replica_id": replica,
    }
    if isinstance(base, ShardedTensor):
        changes["dtype"] = value.dtype
    stored = dataclasses.replace(base, **changes)
    stored.validate_metadata_integrity()
    return stored
