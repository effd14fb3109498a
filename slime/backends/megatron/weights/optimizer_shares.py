"""Which rank stores what of a distributed optimizer: each the state of those parameters of which it has the most.

Megatron-core cuts the parameters that ranks have in common into equal shares, wherever that is, and gathers all state
on each rank to store it by parameters, as its ``fully_reshardable`` format wants it: twelve bytes a parameter of the
whole, on every rank, of which the first writes all. Here only what a cut divides is sent, and every rank writes its
share. What is stored is the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch import Tensor
from torch.nn import Parameter

from slime.utils import device


@dataclasses.dataclass(frozen=True)
class Piece:
    """A rank's part of a parameter: from which of its elements to which, and as what rank of the group."""

    rank: int
    start: int
    end: int


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


def sharded_by_holders(
    self: Any, model_sharded_state_dict: Mapping[str, Any], is_loading: bool = False, metadata: Any = None
) -> dict[int, dict[str, Any]]:
    """In place of `DistributedOptimizer.sharded_param_state_fully_reshardable`; collective over its group.

    By the number of a parameter, float32 tensors of the parameter's shape: of those that this rank stores, or, while
    ``is_loading``, of those of which it has a part, to be filled.
    """
    group = self.data_parallel_group
    bases, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    stored_as = {base.data: base for base in nested_values(bases)}
    keys = ("param", *getattr(self, "optimizer_state_keys", ("exp_avg", "exp_avg_sq")))
    if not is_loading:
        # With all ranks: NCCL's communicator, which it makes at first use, would wait for them at the first piece.
        dist.all_reduce(torch.zeros(1, device=device.current_device()), group=group)
    state: dict[int, dict[str, Any]] = {}
    number = -1
    for buffer in self.buffers:
        for parameter, pieces in pieces_of(buffer, group.size()).items():
            number += 1
            if is_loading:
                is_held = any(piece.rank == group.rank() for piece in pieces)
                values = {key: torch.empty(parameter.numel()) for key in keys} if is_held else {}
            else:
                values = _assembled(self, parameter, pieces, keys)
            # That of the rank that stores it counts: replica 0.
            replica = (group.rank() - _storer(pieces)) % group.size() + self.distributed_optimizer_instance_id
            if values:
                base = stored_as[parameter]
                state[number] = {key: _stored(base, key, value, replica) for key, value in values.items()}
    return state


def _storer(pieces: Sequence[Piece]) -> int:
    """The rank that has the most."""
    return max(pieces, key=lambda piece: piece.end - piece.start).rank


def _assembled(optimizer: Any, parameter: Parameter, pieces: Sequence[Piece], keys: Sequence[str]) -> dict[str, Tensor]:
    """The state of a whole parameter, flat and in host memory, on the rank that stores it; nothing on others."""
    group, storer = optimizer.data_parallel_group, _storer(pieces)
    rank = group.rank()
    own = [piece for piece in pieces if piece.rank == rank]
    parts = {key: value.detach() for key, value in _state(optimizer, parameter).items()} if own else {}
    if rank != storer:
        if own:
            flat = torch.stack([parts[key].to(parameter.device, torch.float32).flatten() for key in keys])
            _wait(dist.P2POp(dist.isend, flat, dist.get_global_rank(group, storer), group))
        return {}
    if len(pieces) == 1:
        return {key: parts[key].to("cpu", torch.float32) for key in keys}
    whole = {key: torch.empty(parameter.numel()) for key in keys}
    for piece in pieces:
        if piece.rank == rank:
            values: Sequence[Tensor] = [parts[key] for key in keys]
        else:
            flat = torch.empty(len(keys), piece.end - piece.start, device=parameter.device)
            _wait(dist.P2POp(dist.irecv, flat, dist.get_global_rank(group, piece.rank), group))
            values = flat.unbind()
        for key, value in zip(keys, values, strict=True):
            whole[key][piece.start : piece.end] = value.flatten()
    return whole


def _state(optimizer: Any, parameter: Parameter) -> dict[str, Tensor]:
    state: dict[str, Tensor] = optimizer._get_main_param_and_optimizer_states(parameter)
    return state


def _wait(operation: dist.P2POp) -> None:
    """In a batch of its own: so it goes by the group's communicator, and not by one that is made for the two ranks."""
    for request in dist.batch_isend_irecv([operation]):
        request.wait()


def _stored(base: Any, key: str, value: Tensor, replica: int) -> Any:
    """``value`` as what is stored of the optimizer where ``base`` is of the model."""
    changes: dict[str, Any] = {
        "key": f"optimizer.state.{key}.{base.key}",
        "data": value.reshape(base.data.shape),
        "replica_id": (*base.replica_id[:-1], replica),
    }
    if isinstance(base, ShardedTensor):
        changes["dtype"] = value.dtype
    stored = dataclasses.replace(base, **changes)
    stored.validate_metadata_integrity()
    return stored
