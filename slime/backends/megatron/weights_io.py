"""Hugging Face weights in and out of a sharded Megatron model, through the tables of `slime.models`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig

from slime.backends.megatron.gather import Gatherer
from slime.backends.megatron.head import ValueHead
from slime.backends.megatron.model import unwrap
from slime.models import Family, Shape, family_of, weight_shape
from slime.utils.hf_writer import INDEX_NAME, HFWriter

_IGNORED_EXTRA = re.compile(r"\.rotary_emb\.inv_freq$")
_SHARD_BYTES = 4 * 2**30
_EXPERTS = ".mlp.experts."
_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")


def global_weights(chunks: Iterable[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """`global_parameters`, and the buffers that are a model's weights too: a router's biases."""
    chunks = list(chunks)
    yield from global_parameters(chunks)
    yield from _global(chunks, _stored_buffers)


def global_parameters(
    chunks: Iterable[torch.nn.Module], pick: Callable[[Any], Tensor] = torch.Tensor.detach
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of this rank, with layer and expert numbers that count over all pipeline and expert ranks.

    The tensors share the memory of what ``pick`` takes of each parameter, by default of its value. A rank's experts are
    one parameter: here each has its own name and its own part of it.
    """
    return _global(chunks, lambda model: ((name, pick(parameter)) for name, parameter in model.named_parameters()))


def _stored_buffers(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    stored = model.state_dict()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in stored)


def _global(
    chunks: Iterable[torch.nn.Module], tensors_of: Callable[[Any], Iterable[tuple[str, Tensor]]]
) -> Iterator[tuple[str, Tensor]]:
    expert_rank = parallel_state.get_expert_model_parallel_rank()
    expert_ranks = parallel_state.get_expert_model_parallel_world_size()
    for chunk in chunks:
        model = unwrap(chunk)
        layers = {name: module.layer_number - 1 for name, module in model.decoder.layers.named_children()}
        first_expert = (model.config.num_moe_experts or 0) // expert_ranks * expert_rank
        for name, tensor in tensors_of(model):
            if name == "output_layer.weight" and isinstance(model.output_layer, ValueHead):
                continue  # Hugging Face directories have none
            name = _with_layer(name, layers)
            before, experts, after = name.partition(_EXPERTS)
            if not experts:
                yield name, tensor
                continue
            for i, expert in enumerate(tensor):
                yield f"{before}{experts}{first_expert + i}.{after}", expert


def _with_layer(name: str, layers: dict[str, int]) -> str:
    return _LAYER.sub(lambda match: str(layers[match[0]]), name)


class _FileTensor:
    """A tensor in a safetensors file; indexing reads that part only."""

    def __init__(self, handle: Any, name: str) -> None:
        self._slice = handle.get_slice(name)
        self.shape: Sequence[int] = self._slice.get_shape()

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        return self._slice[index]


class HFWeights:
    """The tensors of a Hugging Face directory by name, read on demand; files are opened once and memory-mapped."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.file_of = _files_of(directory)
        self._stack = ExitStack()
        self._handles: dict[str, Any] = {}

    def __enter__(self) -> HFWeights:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> _FileTensor:
        file = self.file_of[name]
        if file not in self._handles:
            self._handles[file] = self._stack.enter_context(safe_open(self.directory / file, framework="pt"))
        return _FileTensor(self._handles[file], name)


def _files_of(directory: Path) -> dict[str, str]:
    """Tensor name -> file name.

    Raises:
        FileNotFoundError: neither an index nor a single safetensors file, or a file of the index is missing.
    """
    index = directory / INDEX_NAME
    if index.is_file():
        files = json.loads(index.read_text())["weight_map"]
        missing = sorted({file for file in files.values() if not (directory / file).is_file()})
        if missing:
            raise FileNotFoundError(f"{index} names files that are not there: {', '.join(missing)}")
        return files
    single = directory / "model.safetensors"
    if not single.is_file():
        raise FileNotFoundError(f"{directory} has no {INDEX_NAME} and no model.safetensors")
    with safe_open(single, framework="pt") as handle:
        return dict.fromkeys(handle.keys(), single.name)


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


@torch.no_grad()
def load_hf(chunks: Sequence[torch.nn.Module], hf_dir: str | Path) -> None:
    """Fill the model's weights from a Hugging Face directory; each rank reads only the slices that it holds.

    Raises:
        FileNotFoundError: no safetensors files.
        ValueError: missing, unexpected or wrongly shaped tensors, by name.
    """
    directory = Path(hf_dir)
    config = AutoConfig.from_pretrained(directory)
    family, shape = family_of(config), weight_shape(config)
    with HFWeights(directory) as weights:
        check_names(family, shape, weights.file_of, directory, family.carried(config))
        for name, tensor in global_weights(chunks):
            rank = _shard_rank(name)
            tensor.copy_(family.shard(name, weights.__getitem__, shape, tuple(tensor.shape), rank))


def _shard_rank(name: str) -> int:
    if ".experts." in name:
        return parallel_state.get_expert_tensor_parallel_rank()
    return parallel_state.get_tensor_model_parallel_rank()


def export_hf_buckets(
    chunks: Sequence[torch.nn.Module], family: Family, shape: Shape, bucket_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """The whole model as Hugging Face tensors, in buckets of at most ``bucket_bytes`` (or one tensor, if larger).

    Collective over all ranks: each gets the same buckets, in the same order at every call, with full tensors on its
    device. They share one buffer per bucket, which is freed when its tensors are. Tied output layers are left out, the
    vocabulary's padding is stripped.
    """
    return Gatherer(dict(global_weights(chunks)), family, shape).buckets(bucket_bytes)


def save_hf(chunks: Sequence[torch.nn.Module], directory: str | Path, origin_hf_dir: str | Path) -> None:
    """Write the model as a Hugging Face directory: sharded safetensors and the origin's config and tokenizer files.

    Collective; rank 0 writes, one file at a time, into the existing directory ``directory``. The caller makes the
    directory visible under its final name afterwards.
    """
    target, origin = Path(directory), Path(origin_hf_dir)
    config = AutoConfig.from_pretrained(origin)
    buckets = export_hf_buckets(chunks, family_of(config), weight_shape(config), _SHARD_BYTES)
    if dist.get_rank() == 0:
        write_hf(buckets, target, origin)
    else:
        for _ in buckets:
            pass
    dist.barrier()


def write_hf(buckets: Iterable[list[tuple[str, Tensor]]], target: Path, origin: Path) -> None:
    """Write buckets of tensors, one safetensors file each, and what else makes a Hugging Face directory."""
    writer = HFWriter(target, origin)
    for bucket in chain(buckets, _carried(origin)):
        writer.add(bucket)
    writer.finish()


def _carried(origin: Path) -> Iterator[list[tuple[str, Tensor]]]:
    """What the family carries along of a directory's tensors, in buckets; of one without weights nothing."""
    config = AutoConfig.from_pretrained(origin)
    prefixes = family_of(config).carried(config)
    if not prefixes or not any(origin.glob("*.safetensors")):
        return
    with HFWeights(origin) as weights:
        bucket: list[tuple[str, Tensor]] = []
        for name in sorted(name for name in weights.file_of if name.startswith(prefixes)):
            bucket.append((name, weights[name][:,]))
            if sum(tensor.nbytes for _, tensor in bucket) >= _SHARD_BYTES:
                yield bucket
                bucket = []
        if bucket:
            yield bucket
