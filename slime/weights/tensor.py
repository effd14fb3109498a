"""Weights to engines on the same devices: by CUDA IPC or, without GPUs, shared memory; only handles travel by HTTP."""

from __future__ import annotations

import functools
import os
from argparse import Namespace
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.files.hf_writer import NamedTensors
from slime.utils import device
from slime.weights.engines import EngineAddress
from slime.weights.payload import FlattenedTensorMetadata, flat_layout, serialize, stacked
from slime.weights.publisher import Wait, WeightPublisher, trainer_world_size

_EXPERTS_IN_ORDER: dict[str, Any] = {
    **{"sglang_moe_dp_size": 1, "sglang_ep_num_redundant_experts": 0},
    **{"sglang_enable_eplb": False, "sglang_init_expert_location": "trivial"},
    **{"sglang_max_ep_size": None, "sglang_dwdp_size": 1},
}
"""Flags of engines, so far as the installed SGLang has them, by which the first rank has the first experts, and so on:
their defaults."""


class SharedBuffer:
    """A flat uint8 tensor that engines on the same host can open.

    Without GPUs it is an anonymous memory file, opened through ``/proc/PID/fd/N``, which ends with the last process
    that maps it. torch's own sharing of CPU tensors would leave files in /dev/shm when a trainer is killed, fills a
    container's small /dev/shm, and hands descriptors by a socket whose key the server does not know.
    """

    def __init__(self, nbytes: int) -> None:
        if device.is_cuda():
            self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device.current_device())
            return
        self._file = os.fdopen(os.memfd_create("slime-weights"), "rb+")
        self._file.truncate(nbytes)
        self._path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        self.tensor = device.open_bytes(self._path, nbytes)

    def reduce(self, pickled: object) -> Any:
        """How a receiver builds ``pickled``, for `pickle.Pickler.reducer_override`."""
        if pickled is not self.tensor:
            return NotImplemented
        if not self.tensor.is_cuda:
            return device.open_bytes, (self._path, self.tensor.numel())
        return device.share(self.tensor)


def flat_parts(layout: list[FlattenedTensorMetadata], bucket: NamedTensors) -> Iterator[tuple[int, Tensor]]:
    """What to copy into the flat buffer, as bytes, and where each part begins.

    Tensors that already lie in memory as they will in the buffer are one part. Most of a bucket does: thousands of
    copies would take the host longer than the device.
    """

    def shift(placed: tuple[FlattenedTensorMetadata, Tensor]) -> tuple[int, int]:
        place, tensor = placed
        return tensor.untyped_storage().data_ptr(), tensor.data_ptr() - place.start_idx

    contiguous = (tensor.detach().contiguous() for _, tensor in bucket)
    for _, part in groupby(zip(layout, contiguous, strict=True), shift):
        placed = list(part)
        (first, tensor), (last, _) = placed[0], placed[-1]
        view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        start, nbytes = tensor.storage_offset() * tensor.itemsize, last.end_idx - first.start_idx
        yield first.start_idx, view.set_(tensor.untyped_storage(), start, (nbytes,), (1,))


def can_push_local_experts(args: Namespace, engines: Sequence[EngineAddress]) -> bool:
    """Whether every engine rank computes with just those experts that the training rank beside it trains. Then none of
    them need be gathered for a push to ``engines``, nor be brought to ranks that would drop them. Both sides divide
    experts evenly and in order; what differs is which ranks cut an expert among them."""
    size, cut = args.expert_model_parallel_size, args.expert_tensor_parallel_size
    placed = {"sglang_ep_size": size} | _EXPERTS_IN_ORDER
    if size == 1 or args.update_weight_transport != "tensor" or args.lora_sync == "adapter":
        return False
    if any(getattr(args, name, value) != value for name, value in placed.items()):
        return False
    if any(engine.apart for engine in engines):
        return False
    # A rank of an engine computes with the experts that it counts itself among the first, second, ... to have.
    pairs = [(rank * size // e.num_gpus, slot // cut % size) for e in engines for rank, slot in enumerate(e.slots)]
    return all(theirs == ours for theirs, ours in pairs)


class TensorPublisher(WeightPublisher):
    """Training rank r shares its device with engine slot r, and serves that slot.

    The buckets are the same on every rank, so each slot's rank hands out its own copy and no byte crosses devices. All
    of an engine's payloads go to its one address; of several nodes too, each of its ranks opens that of its own slot.
    The ranks beside an engine form a group, in which the first one gathers the payloads and sends them, to that engine
    alone. Ranks without an engine beside them gather buckets with the others, and have no other part.
    """

    def __init__(self, args: Namespace, rank: int) -> None:
        super().__init__(args, rank)
        self._groups: dict[range, dist.ProcessGroup] = {}
        """By slots; kept when an engine leaves, for the next one there."""
        self._beside: EngineAddress | None = None
        """The engine that this rank is beside."""
        self._layouts: dict[
            tuple[str, ...], tuple[list[FlattenedTensorMetadata], list[FlattenedTensorMetadata], int]
        ] = {}
        self._buffers: list[SharedBuffer | None] = [None, None]
        """Filled in turns: meanwhile engines may be loading from the other one."""

    def _open(self) -> None:
        world_size = trainer_world_size()
        slots = [slot for engine in self._beside_ranks for slot in engine.slots]
        if world_size <= max(slots, default=-1):
            raise ValueError(
                f"--update-weight-transport tensor needs a training rank beside each engine rank, but there are "
                f"{world_size} training ranks and an engine rank in slot {max(slots)}, counted from 0; use "
                f"--update-weight-transport distributed"
            )
        if len(set(slots)) < len(slots):
            raise ValueError(f"engines share slots: {', '.join(f'{e.url} has {e.slots}' for e in self._beside_ranks)}")
        for engine in self._beside_ranks:
            # Other ranks as well: torch names a group by how many a process has been told of.
            if engine.num_gpus > 1 and engine.slots not in self._groups:
                limit = timedelta(seconds=self.timeout)
                self._groups[engine.slots] = dist.new_group(list(engine.slots), backend="gloo", timeout=limit)
        self._beside = next((engine for engine in self._beside_ranks if self.rank in engine.slots), None)

    @property
    def _beside_ranks(self) -> list[EngineAddress]:
        """The engines that are beside training ranks."""
        return self.engines

    @property
    def _sends(self) -> bool:
        return self._beside is not None and self.rank == self._beside.first_slot

    def _rank_of(self, engine: EngineAddress, index: int) -> int:
        return engine.slots[index]

    def close(self) -> None:
        self._buffers = [None, None]
        groups, self._groups = self._groups, {}
        for slots, group in groups.items():
            if self.rank in slots and dist.is_initialized():
                dist.destroy_process_group(group)

    def _stage(self, bucket: NamedTensors) -> list[str]:
        if self._beside is None:
            return []  # torch keeps memory of a GPU whose handle nobody opens
        group = self._groups.get(self._beside.slots)
        if group is None:
            return [self._fill(bucket)]
        # The sender comes here only after the engine has loaded the bucket before the last one: its buffers are free.
        dist.barrier(group)
        gathered = [""] * group.size() if self._sends else None
        dist.gather_object(self._fill(bucket), gathered, dst=self._beside.first_slot, group=group)
        return gathered or []

    def _fill(self, bucket: NamedTensors) -> str:
        layout, told, size = self._layout(bucket)
        self._buffers.reverse()
        if (buffer := self._buffers[0]) is None or buffer.tensor.numel() < size:
            buffer = self._buffers[0] = None  # the smaller one goes first: on a GPU there may be no room for both
            buffer = self._buffers[0] = SharedBuffer(size)
        flat = buffer.tensor
        for start, part in flat_parts(layout, bucket):
            flat[start : start + part.numel()].copy_(part)
        device.synchronize()
        return serialize({"flattened_tensor": flat, "metadata": told}, buffer.reduce)

    def _layout(self, bucket: NamedTensors) -> tuple[list[FlattenedTensorMetadata], list[FlattenedTensorMetadata], int]:
        """Where each tensor lies in the buffer, what engines are told of that, and its size: of each bucket, by its
        names, as in the push before."""
        names = tuple(name for name, _ in bucket)
        if names not in self._layouts:
            layout, size = flat_layout(bucket)
            # Servers of releases that slime's patches are not for have no loader of stacks.
            told = layout if self.args.allow_untested_versions else stacked(layout)
            self._layouts[names] = layout, told, size
        return self._layouts[names]

    def _deliver(self, bucket: NamedTensors, staged: list[str]) -> Wait:
        assert self._beside is not None
        push = self.control(self._beside).update_weights_from_tensor
        leaves_draft = self.args.drafts_apart
        return self.start("push", {self._beside.url: functools.partial(push, staged, leaves_draft=leaves_draft)})

    def _release(self) -> None:
        self._buffers = [None, None]
