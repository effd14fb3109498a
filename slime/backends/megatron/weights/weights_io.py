"""Hugging Face weights in and out of a sharded Megatron model, through the tables of `slime.models`."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron import lora
from slime.backends.megatron.layers.head import ValueHead
from slime.backends.megatron.model import EXPERTS, expert_name, global_namer, has_heads, local_experts, unwrap
from slime.backends.megatron.weights.checkpoint_validation import built_shape, check_hf
from slime.backends.megatron.weights.gather import Gatherer, tensor_group
from slime.files.hf_reader import HFWeights, tensors_that_begin, whole
from slime.files.hf_writer import HFWriter, save_tensors
from slime.models import Family, Shape, family_of, hf_config, weight_shape
from slime.models.adapters import adapter_family, is_adapter_name, module_names, peft_config
from slime.models.family import ADAPTER_MARK, check_names
from slime.utils.errors import BadInputError

_SHARD_BYTES = 4 * 2**30

_Gathered = tuple[Shape, bool | tuple[str, ...]]
"""What is gathered of a model: all experts or a rank's own, or adapters of which layers."""
Gatherers = dict[_Gathered, Gatherer]
"""Those of one model."""


def global_weights(chunks: Iterable[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """`global_parameters`, and the buffers that are a model's weights too: a router's biases."""
    chunks = list(chunks)
    yield from global_parameters(chunks)
    yield from _global(chunks, _stored_buffers)


def global_parameters(
    chunks: Iterable[torch.nn.Module],
    pick: Callable[[Any], Tensor] = torch.Tensor.detach,
    *,
    of_adapters: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of this rank, with layer and expert numbers that count over all pipeline and expert ranks.

    The tensors share the memory of what ``pick`` takes of each parameter, by default of its value. A rank's experts are
    one parameter: here each has its own name and its own part of it. Adapters' are there alone, or not.
    """
    return _global(
        chunks,
        lambda model: (
            (name, pick(parameter))
            for name, parameter in model.named_parameters()
            if (ADAPTER_MARK in name) == of_adapters
        ),
    )


def _stored_buffers(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    stored = model.state_dict()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in stored)


def _global(
    chunks: Iterable[torch.nn.Module], tensors_of: Callable[[Any], Iterable[tuple[str, Tensor]]]
) -> Iterator[tuple[str, Tensor]]:
    for chunk in chunks:
        model, global_name, experts = unwrap(chunk), global_namer(chunk), local_experts(chunk)
        for name, tensor in tensors_of(model):
            if name == "output_layer.weight" and isinstance(model.output_layer, ValueHead):
                continue  # Hugging Face directories have none
            name = global_name(name)
            if EXPERTS not in name:
                yield name, tensor
                continue
            for number, expert in zip(experts, tensor, strict=True):
                yield expert_name(name, number), expert


@torch.no_grad()
def load_hf(chunks: Sequence[torch.nn.Module], hf_dir: str | Path) -> None:
    """Fill the model's weights from a Hugging Face directory; collective. Each rank reads only slices that it holds.

    FileNotFoundError where there are no safetensors files; ValueError names tensors that are missing, unexpected or of
    another shape.
    """
    directory = Path(hf_dir)
    config = hf_config(directory)
    family, shape = family_of(config), _shape_of(chunks, config)
    parameters = dict(global_weights(chunks))
    with HFWeights(directory) as weights:
        try:
            check_names(family, shape, weights, directory, family.untrained(config, shape))
        except ValueError as error:
            raise BadInputError(str(error)) from None
        check_hf(directory, weights, chunks, parameters, family, shape)
        for name, tensor in parameters.items():
            rank = tensor_group(name).rank()
            tensor.copy_(family.shard(name, weights.__getitem__, shape, tuple(tensor.shape), rank))


def _shape_of(chunks: Sequence[torch.nn.Module], config: Any) -> Shape:
    return built_shape(weight_shape(config, with_heads=has_heads(chunks)), unwrap(chunks[0]).config)


def export_hf_buckets(
    chunks: Sequence[torch.nn.Module],
    family: Family,
    shape: Shape,
    bucket_bytes: int,
    *,
    own_experts: bool = False,
    gatherers: Gatherers | None = None,
) -> Iterator[list[tuple[str, Tensor]]]:
    """The whole model as Hugging Face tensors, in buckets of at most ``bucket_bytes`` (or one tensor, if larger, or
    what `Row.same_bucket` keeps together).

    Collective over all ranks: each gets the same buckets, in the same order at every call, with full tensors on its
    device. They share one buffer per bucket, which is freed when its tensors are. Tied output layers are left out, the
    vocabulary's padding is stripped, and what adapters add is in the matrices beside which they are.

    Args:
        own_experts: without those of other expert-parallel ranks, which are then not gathered; each rank has as many.
        gatherers: of this model, from earlier calls; one that is not there is made and kept.
    """
    parameters = dict(global_weights(chunks))
    gatherer = _kept(
        gatherers, (shape, own_experts), lambda: Gatherer(parameters, family, shape, own_experts=own_experts)
    )
    return gatherer.buckets(bucket_bytes, lora.merging(parameters, chunks))


def export_adapter_buckets(
    chunks: Sequence[torch.nn.Module],
    family: Family,
    shape: Shape,
    targets: Sequence[str],
    bucket_bytes: int,
    gatherers: Gatherers | None = None,
) -> Iterator[list[tuple[str, Tensor]]]:
    """The adapters alone, under PEFT's names; otherwise as `export_hf_buckets`.

    Among them, for sources that are not targeted of layers that are, second matrices of nothing but 0.
    """
    parameters = dict(global_parameters(chunks, of_adapters=True))
    gatherer = _kept(
        gatherers, (shape, tuple(targets)), lambda: Gatherer(parameters, adapter_family(family, targets), shape)
    )
    return gatherer.buckets(bucket_bytes, parameters.__getitem__)


def _kept(gatherers: Gatherers | None, key: _Gathered, make: Callable[[], Gatherer]) -> Gatherer:
    gatherers = {} if gatherers is None else gatherers
    if key not in gatherers:
        gatherers[key] = make()
    return gatherers[key]


def save_hf(chunks: Sequence[torch.nn.Module], directory: str | Path, origin_hf_dir: str | Path) -> None:
    """Write sharded safetensors and the origin's config and tokenizer files into the existing directory ``directory``;
    collective, rank 0 writes, one file at a time."""
    target, origin = Path(directory), Path(origin_hf_dir)
    config, with_heads = hf_config(origin), has_heads(chunks)
    buckets = export_hf_buckets(chunks, family_of(config), _shape_of(chunks, config), _SHARD_BYTES)
    if dist.get_rank() == 0:
        write_hf(buckets, target, origin, with_heads=with_heads)
    else:
        for _ in buckets:
            pass
    dist.barrier()


def save_adapters(
    chunks: Sequence[torch.nn.Module], family: Family, shape: Shape, args: Namespace, directory: str | Path
) -> None:
    """Write the adapters into the existing directory ``directory`` as PEFT reads them; collective, rank 0 writes."""
    tensors: dict[str, Tensor] = {}
    targets = args.lora_target_modules
    for bucket in export_adapter_buckets(chunks, family, shape, targets, _SHARD_BYTES):
        if dist.get_rank() == 0:
            tensors |= {name: tensor.cpu() for name, tensor in bucket if is_adapter_name(name, targets)}
    if dist.get_rank() == 0:
        save_tensors(tensors, Path(directory, "adapter_model.safetensors"))
        modules, base = module_names(family, shape, targets), args.ref_load or args.hf_checkpoint
        config = peft_config(args.lora_rank, args.lora_alpha, base, modules)
        Path(directory, "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    dist.barrier()


def write_hf(
    buckets: Iterable[list[tuple[str, Tensor]]], target: Path, origin: Path, *, with_heads: bool = False
) -> None:
    """Write buckets of tensors, one safetensors file each, and what else makes a Hugging Face directory; MTP heads from
    the origin, unless the buckets are ``with_heads``."""
    writer = HFWriter(target, origin)
    for bucket in chain(buckets, _carried(origin, with_heads=with_heads)):
        writer.add(bucket)
    writer.finish()


def _carried(origin: Path, *, with_heads: bool) -> Iterator[list[tuple[str, Tensor]]]:
    """What the family carries along of a directory's tensors, in buckets; of one without weights nothing."""
    config = hf_config(origin)
    prefixes = family_of(config).untrained(config, weight_shape(config, with_heads=with_heads))
    with tensors_that_begin(origin, prefixes) as found:
        bucket: list[tuple[str, Tensor]] = []
        for name, tensor in found.items():
            bucket.append((name, whole(tensor)))
            if sum(tensor.nbytes for _, tensor in bucket) >= _SHARD_BYTES:
                yield bucket
                bucket = []
        if bucket:
            yield bucket
