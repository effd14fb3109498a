"""A Hugging Face directory to a Megatron torch_dist checkpoint, one parameter in memory at a time.

The Megatron model is built of fake tensors, which have shapes and no memory: it says which parameters there are and
under which keys and offsets Megatron stores them. Every part of the checkpoint is then read from the safetensors files
when its turn to be written comes. Under torchrun each rank writes its share of the parts.
"""

from __future__ import annotations

import contextlib
import io
import os
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from slime.backends.megatron import patches

patches.install()  # before anything imports megatron.core

from megatron.core import parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config  # noqa: E402
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories  # noqa: E402

from slime.backends.megatron.model import build_model  # noqa: E402
from slime.backends.megatron.weights.checkpoint import model_state  # noqa: E402
from slime.backends.megatron.weights.checkpoint_validation import built_shape, check_hf  # noqa: E402
from slime.backends.megatron.weights.weights_io import global_weights  # noqa: E402
from slime.convert.running import Progress, check_room  # noqa: E402
from slime.files import atomic_io  # noqa: E402
from slime.files.checkpoints import COMMON, LATEST, RELEASE, is_release  # noqa: E402
from slime.files.hf_reader import HFWeights, kept_dtype  # noqa: E402
from slime.models import Family, Shape, family_of, hf_config, weight_shape  # noqa: E402
from slime.models.family import check_names  # noqa: E402
from slime.training.checkpoint_dirs import commit_directory, staging_directory  # noqa: E402
from slime.utils.errors import BadInputError  # noqa: E402

_DEADLINE = timedelta(hours=6)
"""Until the slowest rank has written its share."""
_OF_A_CHECKPOINT = (".metadata", "metadata.json", COMMON, "*.distcp")


@dataclass(frozen=True)
class Part:
    """A piece of a stored tensor, and which part of which Megatron parameter it is."""

    key: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    name: str
    local_shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    """Where the piece starts in the parameter's memory, in elements."""
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(self.key, torch.Size(self.offsets))

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Where it is in the stored tensor; leading dimensions are those that count layers and experts."""
        leading = (1,) * (len(self.global_shape) - len(self.size))
        return ChunkStorageMetadata(torch.Size(self.offsets), torch.Size((*leading, *self.size)))


def check_target(save: Path, *, force: bool) -> None:
    """Refuse, by a BadInputError, a directory that has something in it, other than what an interrupted conversion left
    there or, with ``force``, an earlier one wrote."""
    final, latest = save / RELEASE, save / LATEST
    leftovers = {atomic_io.unfinished(final), atomic_io.replaced(final), atomic_io.unfinished(latest)}
    present = set(save.iterdir()) - leftovers if save.is_dir() else {save} if save.exists() else set()
    # A conversion that is killed between its renames leaves only the file, one that is killed after them only the
    # directory, which is whole.
    if not present or (present == {latest} and is_release(save)):
        return
    if not (present == {final} or is_release(save)):
        raise BadInputError(f"--save {save} has other things in it than an earlier conversion: name another directory")
    inside = sorted(final.iterdir()) if final.is_dir() else []
    if other := next((path for path in inside if not any(map(path.match, _OF_A_CHECKPOINT))), None):
        raise BadInputError(f"--save {save}: {other} is of no earlier conversion: name another directory")
    if not force:
        unnamed = "" if latest in present else f", or write {RELEASE} into {latest} to take what is there"
        raise BadInputError(f"--save {save} holds a checkpoint already; pass --force to replace it{unnamed}")


@contextlib.contextmanager
def joined_ranks() -> Iterator[None]:
    """Within: one with the other ranks of torchrun, or alone. Nothing here computes, so they talk over gloo."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=_DEADLINE)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def parts_of_model(args: Namespace) -> tuple[list[Part], list[ShardedObject], list[Any]]:
    """What Megatron stores of the model, in the model's order: pieces of tensors, and objects that hold no weights; and
    the model, of fake tensors. BadInputError where it has weights that no table of `slime.models` knows."""
    # Fake parameters cannot be moved, and those of a model that is not computed with need not be.
    with FakeTensorMode(), mock.patch.object(torch.nn.Module, "to", lambda module, *args, **kwargs: module):
        chunks = build_model(args)
        sources: _Sources = {}
        for name, tensor in global_weights(chunks):
            sources.setdefault(tensor.untyped_storage()._cdata, []).append((name, tensor))
        state = model_state(chunks)
        apply_factories(state)
    tensors: list[Part] = []
    objects: list[ShardedObject] = []
    for entry in nested_values(state):
        if isinstance(entry, ShardedTensor):
            tensors += _parts(entry, sources)
        elif isinstance(entry, ShardedObject):
            objects.append(entry)
    return tensors, objects, chunks


_Sources = dict[int, list[tuple[str, Tensor]]]
"""Memory of the fake model -> the parameters in it; the experts of a layer share theirs."""


def _parts(stored: ShardedTensor, sources: _Sources) -> Iterator[Part]:
    data = stored.data
    owners = sources.get(data.untyped_storage()._cdata)
    if owners is None:
        raise BadInputError(f"Megatron's model stores {stored.key}, which has no name in Hugging Face's format")
    first_dim = len(stored.global_shape) - data.dim()
    several = len(owners) > 1
    for i, piece in enumerate(data.split(1) if several else [data]):
        offsets = list(stored.global_offset)
        if several:
            offsets[first_dim] += i
        offset = piece.storage_offset()
        name, whole = next((n, t) for n, t in owners if 0 <= offset - t.storage_offset() < t.numel())
        yield Part(
            stored.key,
            tuple(stored.global_shape),
            tuple(offsets),
            name,
            tuple(whole.shape),
            offset - whole.storage_offset(),
            tuple(piece.shape),
            tuple(piece.stride()),
        )


class _Reader:
    def __init__(self, weights: HFWeights, family: Family, shape: Shape) -> None:
        self._weights, self._family, self._shape = weights, family, shape
        self._last: tuple[str, Tensor] | None = None

    def dtypes(self, parts: list[Part]) -> dict[str, torch.dtype]:
        """Of each stored tensor: the widest of the Hugging Face tensors that it is made of."""
        found: dict[str, torch.dtype] = {}
        for part in parts:
            for source in self._family.sources(part.name, self._shape):
                own = kept_dtype(self._weights[source])
                found[part.key] = torch.promote_types(found.get(part.key, own), own)
        return found

    def read(self, part: Part) -> Tensor:
        """The part, contiguous."""
        if self._last is None or self._last[0] != part.name:  # gate and up projection are two parts of one
            self._last = None
            whole = self._family.shard(part.name, self._weights.__getitem__, self._shape, part.local_shape, 0)
            self._last = part.name, whole.contiguous()
        return self._last[1].as_strided(part.size, part.stride, part.start).contiguous()


class _Planner(dcp.DefaultSavePlanner):
    """Writes this rank's parts, each read when its turn comes; the first rank also the objects."""

    def __init__(
        self,
        parts: list[Part],
        dtypes: dict[str, torch.dtype],
        objects: list[ShardedObject],
        reader: _Reader,
        progress: Progress,
    ) -> None:
        super().__init__(flatten_state_dict=False)
        self._parts = {part.index: part for part in parts}
        self._objects = {MetadataIndex(each.unique_key): each for each in objects}
        self._dtypes, self._reader, self._progress = dtypes, reader, progress

    def create_local_plan(self) -> SavePlan:
        items = [WriteItem(index, WriteItemType.BYTE_IO) for index in self._objects]
        for index, part in self._parts.items():
            data = TensorWriteData(
                part.chunk, TensorProperties(dtype=self._dtypes[part.key]), torch.Size(part.global_shape)
            )
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            data = io.BytesIO()
            torch.save([self._objects[write_item.index].data], data)
            return data
        part = self._parts[write_item.index]
        tensor = self._reader.read(part).to(self._dtypes[part.key])
        self._progress.add(tensor.nbytes)
        return tensor.view(part.chunk.sizes)


def convert(args: Namespace, save: Path) -> None:
    """Write ``SAVE/release``, which ``SAVE/latest_checkpointed_iteration.txt`` names; collective over all ranks.

    The model's ``args`` are of `slime.convert.arguments.parse_model_args`. ValueError where the weights do not fit
    config.json or the model of the flags, BadInputError where there is no room.
    """
    hf_dir = Path(args.hf_checkpoint)
    config = hf_config(hf_dir)
    family, shape = family_of(config), built_shape(weight_shape(config, with_heads=args.enable_mtp_training), args)
    parts, objects, chunks = parts_of_model(args)
    rank, final = dist.get_rank(), save.absolute() / RELEASE
    with HFWeights(hf_dir) as weights:
        check_names(family, shape, weights, hf_dir, family.untrained(config, shape))
        check_hf(hf_dir, weights, chunks, dict(global_weights(chunks)), family, shape)
        reader = _Reader(weights, family, shape)
        dtypes = reader.dtypes(parts)
        sizes = [prod(part.size) * dtypes[part.key].itemsize for part in parts]
        shares = deal(sizes, dist.get_world_size())
        # The first rank alone: another's end must not empty what the first is about to rename into place.
        with atomic_io.removed_on_failure(final) if rank == 0 else contextlib.nullcontext():
            if rank == 0:
                check_room(final, sum(sizes))
            directory = staging_directory(final)
            progress = Progress("hf to torch_dist", sum(sizes[i] for i in shares[rank]), shown=rank == 0)
            own = [parts[i] for i in shares[rank]]
            _save(directory, _Planner(own, dtypes, objects if rank == 0 else [], reader, progress), progress)
            if rank == 0:
                torch.save({}, directory / COMMON)
                save_config(CheckpointingConfig("torch_dist", 1), str(directory))
            commit_directory(final)
    if rank == 0:
        atomic_io.write_file(save.absolute() / LATEST, lambda path: path.write_text(RELEASE))
    dist.barrier()


def _save(directory: Path, planner: _Planner, progress: Progress) -> None:
    """Collective: a rank that was interrupted, or had no room, is that error, which torch takes for any; BadInputError
    says how one failed otherwise."""
    try:
        dcp.save({}, storage_writer=dcp.FileSystemWriter(directory, per_thread_copy_ahead=0), planner=planner)
    except dcp.api.CheckpointException as error:
        causes = {rank: cause for rank, (cause, _) in error.failures.items()}
        for kind in (KeyboardInterrupt, OSError):
            for cause in causes.values():
                if isinstance(cause, kind) and not isinstance(cause, FileNotFoundError):
                    raise cause from error
        raise BadInputError("; ".join(f"rank {rank}: {cause}" for rank, cause in causes.items())) from error
    finally:
        progress.close()


def deal(sizes: list[int], ranks: int) -> list[list[int]]:
    """Which of the parts each rank writes: consecutive ones, about as many bytes each."""
    total, done = sum(sizes), 0
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for i, size in enumerate(sizes):
        shares[min(ranks - 1, done * ranks // max(1, total))].append(i)
        done += size
    return shares
