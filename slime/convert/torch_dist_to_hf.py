"""A Megatron torch_dist checkpoint to a Hugging Face directory, through the tables of `slime.models`.

No model is built. The metadata says where the parts of every parameter are, whatever layout they were saved under: the
parts together are the parameter of a single rank.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from slime.convert.dcp_to_hf import places
from slime.convert.hf_files import Spec, stored_specs
from slime.convert.running import check_output, run_all, written_model
from slime.convert.stored import StoredTensors
from slime.files.block_scaled import SCALE_END
from slime.files.checkpoints import LATEST, checkpoint_directory, has_checkpoint, is_torch_dist, latest_name
from slime.files.hf_reader import HFWeights, kept_dtype, tensors_that_begin, whole
from slime.models import Family, Shape, family_of, hf_config, weight_shape
from slime.models.family import ADAPTER_MARK, MODEL_PREFIXES, holds_heads
from slime.utils.errors import BadInputError, abbreviate

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
"""megatron-core may store norms under the names that Transformer Engine gives them, as a part of the layer after."""
_EMBEDDING = "embedding.word_embeddings.weight"
_OF_THE_VOCABULARY = (_EMBEDDING, "output_layer.weight")
"""Whose rows may be padded."""
_ADD = "--add-missing-from-origin-hf takes them from --origin-hf-dir"


@dataclass(frozen=True)
class Location:
    """Where a parameter is: ``index`` of the leading dimensions of a stored tensor."""

    key: str
    index: tuple[int, ...] = ()
    """Layer and expert, as far as the stored tensor has them all in one."""
    expert_dim: int | None = None
    """Which of the leading dimensions counts experts."""


@dataclass(frozen=True)
class Task:
    """Parameters that are read at once: one, or the experts of one stored piece."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    leading: int
    """Dimensions before those of a parameter."""
    names: tuple[str, ...]
    """Of the parameters, in the order in which they follow each other."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one parameter."""
        return self.sizes[self.leading :]


def convert(
    source: Path,
    output: Path,
    origin: Path,
    *,
    vocab_size: int | None = None,
    add_missing: bool = False,
    shard_bytes: int,
    workers: int,
    force: bool,
) -> None:
    """Write a Hugging Face directory; BadInputError where the checkpoint does not hold the model that the origin's
    config.json describes, or there is no room for the output.

    Args:
        source: a checkpoint, or a directory of them, of which the latest is taken.
        origin: the Hugging Face directory that the model came from: its config, tokenizer and generation settings.
        vocab_size: rows of the embedding to keep; default as config.json says.
        add_missing: take what the checkpoint lacks from the origin.
        workers: threads; each holds one parameter, or the experts of one stored piece.
        output, shard_bytes, force: as of `fp8.convert`.
    """
    check_output(output, [source, origin], force=force)
    stored = StoredTensors(find_checkpoint(source))
    logger.info("reading %s", stored.directory)
    config = hf_config(origin)
    with_heads = holds_heads(stored)
    family, shape = family_of(config), weight_shape(config, with_heads=with_heads)
    if vocab_size is not None:
        shape = dataclasses.replace(shape, vocab_size=vocab_size)
    tasks, missing = _to_read(stored, family, shape, origin)
    specs = specs_of(stored, tasks, family, shape)
    _check_config(specs, origin, config, shape)
    with tensors_that_begin(origin, family.untrained(config, shape)) as carried:
        copied = {name: Spec(tuple(tensor.shape), kept_dtype(tensor)) for name, tensor in carried.items()}
    copied |= _taken_from_origin(specs, origin, missing, shape, add_missing, copied)
    changes = {} if vocab_size in (None, config.vocab_size) else {"vocab_size": vocab_size}
    with written_model("torch_dist to hf", output, specs | copied, shard_bytes, origin, changes) as write:

        def do(task: Task) -> None:
            tensors = stored.read(task.key, task.offsets, task.sizes).view(-1, *task.shape)
            for name, tensor in zip(task.names, tensors, strict=True):
                for hf_name, part in family.join(name, [tensor], shape):
                    write(hf_name, part)

        run_all(tasks, do, workers)
        if copied:
            with HFWeights(origin) as weights:
                for name in copied:
                    write(name, whole(weights[name]))


def find_checkpoint(directory: Path) -> Path:
    """A torch_dist checkpoint: the directory itself, or the latest in it; BadInputError where there is none."""
    if is_torch_dist(directory):
        return directory
    if has_checkpoint(directory):
        name = latest_name(directory)
        found = checkpoint_directory(directory, int(name)) if name.isdecimal() else directory / name
        if is_torch_dist(found):
            return found
        raise BadInputError(f"{directory / LATEST} names {found.name}, and there is no whole checkpoint of that name")
    whole_ones = sorted(path.name for path in directory.glob("*") if is_torch_dist(path))
    if whole_ones:
        raise BadInputError(
            f"{directory} has no {LATEST} that says which to take: name one in it: {abbreviate(whole_ones)}"
        )
    raise BadInputError(f"{directory} is not a torch_dist checkpoint (no metadata.json), and no directory of them")


def _to_read(stored: StoredTensors, family: Family, shape: Shape, origin: Path) -> tuple[list[Task], list[str]]:
    if any(ADAPTER_MARK in key for key in stored):
        raise BadInputError(
            f"{stored.directory} holds low-rank adapters and no model: resume from it by --load of train.py with "
            "--save-hf (merged weights) or --save-lora (the adapters)"
        )
    located, missing = locate_all(stored, family, shape)
    if left := list(unused(stored, located.values())):
        raise BadInputError(
            f"{stored.directory} holds what the model of {origin / 'config.json'} has no place for: "
            f"{abbreviate(left)}: is it another model's?"
        )
    return list(plan(stored, located)), missing


def locate(stored: Mapping[str, object] | StoredTensors, name: str) -> Location | None:
    """Where a global Megatron parameter is stored. Layers are in one tensor, with a leading dimension, where all of
    them are alike; the experts of a layer always are."""
    expert = _EXPERT.search(name)
    if expert is not None:
        name = name.replace(expert[0], ".experts.experts.", 1)
    experts = () if expert is None else (int(expert[1]),)
    for key in (name, *(name.replace(own, fused) for own, fused in _FUSED_NORMS.items() if name.endswith(own))):
        if key in stored:
            return Location(key, experts, 0 if experts else None)
        layer = _LAYER.search(key)
        stacked = key.replace(layer[0], ".layers.", 1) if layer else key
        if layer and stacked in stored:
            return Location(stacked, (int(layer[1]), *experts), 1 if experts else None)
    return None


def locate_all(stored: StoredTensors, family: Family, shape: Shape) -> tuple[dict[str, Location], list[str]]:
    """Where the parameters of a model are, and the Hugging Face tensors that are nowhere."""
    located: dict[str, Location] = {}
    missing: list[str] = []
    for name in family.parameters(shape):
        names = family.hf_names(name, shape)
        found = locate(stored, name) if names else None
        if found is not None:
            located[name] = found
        else:
            missing += names
    return located, missing


def unused(stored: StoredTensors, places: Iterable[Location]) -> Iterator[str]:
    """Keys of model weights that are at no place, or whose layers or experts are more than the places."""
    used: dict[str, set[tuple[int, ...]]] = {}
    for place in places:
        used.setdefault(place.key, set()).add(place.index)
    for key in stored:
        if not key.startswith(MODEL_PREFIXES) or key.endswith("._extra_state"):
            continue
        indices = used.get(key, set())
        leading = len(next(iter(indices), ()))
        if len(indices) < prod(stored.shape(key)[:leading]):
            yield key


def plan(stored: StoredTensors, located: Mapping[str, Location]) -> Iterator[Task]:
    """What to read: experts that are stored in one piece together, so that no piece is read twice."""
    groups: dict[tuple[str, tuple[int, ...], int], list[tuple[str, Location]]] = {}
    piece_of: dict[tuple[str, int], dict[int, int]] = {}
    for name, place in located.items():
        if place.expert_dim is None:
            groups[place.key, place.index, 0] = [(name, place)]
            continue
        own = (place.key, place.expert_dim)
        if own not in piece_of:
            piece_of[own] = {i: start for start, stop in stored.cuts(*own) for i in range(start, stop)}
        expert = place.index[place.expert_dim]
        piece = (place.key, place.index[: place.expert_dim], piece_of[own].get(expert, -1))
        groups.setdefault(piece, []).append((name, place))
    for (key, _, _), members in groups.items():
        members.sort(key=lambda member: member[1].index)
        size, leading = stored.shape(key), len(members[0][1].index)
        first, last = members[0][1].index, members[-1][1].index
        if any(i >= extent for i, extent in zip(last, size, strict=False)) or len(size) <= leading:
            raise BadInputError(
                f"{stored.directory}: {key} {list(size)} has no part {list(last)}: is it another model's?"
            )
        counts = tuple(stop - start + 1 for start, stop in zip(first, last, strict=True))
        offsets = (*first, *[0] * (len(size) - leading))
        yield Task(key, offsets, (*counts, *size[leading:]), leading, tuple(name for name, _ in members))


def specs_of(stored: StoredTensors, tasks: list[Task], family: Family, shape: Shape) -> dict[str, Spec]:
    """The Hugging Face tensors that the tasks make; BadInputError where the stored parameters do not have the shapes of
    the model's rules."""
    specs: dict[str, Spec] = {}
    for task in tasks:
        meta = torch.empty(task.shape, dtype=stored.dtype(task.key), device="meta")
        for name in task.names:
            try:
                specs |= {hf_name: Spec.of(tensor) for hf_name, tensor in family.join(name, [meta], shape)}
            except (RuntimeError, IndexError) as error:
                raise BadInputError(
                    f"{stored.directory}: {name} is {list(task.shape)}, which does not fit the model of config.json"
                ) from error
            used = sum(prod(specs[hf_name].shape) for hf_name in family.hf_names(name, shape))
            if used != meta.numel() and name not in _OF_THE_VOCABULARY:
                raise BadInputError(
                    f"{stored.directory}: {name} {list(task.shape)} has {meta.numel()} numbers, and the model of "
                    f"config.json takes {used} of them: is it another model's?"
                )
            if name == _EMBEDDING and task.shape[0] < shape.vocab_size:
                raise BadInputError(
                    f"{stored.directory}: the embedding has {task.shape[0]} rows, fewer than the vocabulary of "
                    f"{shape.vocab_size} (--vocab-size, else config.json)"
                )
    return specs


def _check_config(specs: Mapping[str, Spec], origin: Path, config: Any, shape: Shape) -> None:
    """Compare with the model that transformers would make of config.json; the origin need not have weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        # Eager: config.json may name kernels that only hosts with GPUs have.
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").state_dict()
    for name, spec in specs.items():
        meant = next((part.shape_of(tuple(model[key].shape)) for key, part in places(name) if key in model), spec.shape)
        if not _fits(spec.shape, meant, shape):
            raise BadInputError(
                f"the checkpoint's {name} is {list(spec.shape)}, and {origin / 'config.json'} means {list(meant)}: is "
                "it another model's?"
            )


def _fits(own: tuple[int, ...], other: tuple[int, ...], shape: Shape) -> bool:
    """Whether shapes are the same, but for the rows of the vocabulary that are kept."""
    return own[1:] == other[1:] and own[0] in (other[0], shape.vocab_size)


def _taken_from_origin(
    specs: Mapping[str, Spec],
    origin: Path,
    missing: list[str],
    shape: Shape,
    add_missing: bool,
    carried: Mapping[str, Spec],
) -> dict[str, Spec]:
    """The other tensors to copy from the origin, after checking those that come from the checkpoint against its."""
    if missing and not add_missing:
        raise BadInputError(f"the checkpoint lacks {abbreviate(missing)}; {_ADD}")
    # Only its config and tokenizer are needed.
    originals = stored_specs(origin) if any(origin.glob("*.safetensors")) else {}
    for name, spec in specs.items():
        original = originals.get(name, spec).shape
        if not _fits(spec.shape, original, shape):
            raise BadInputError(
                f"the checkpoint's {name} is {list(spec.shape)}, that of {origin} {list(original)}: is it another "
                "model's? (--vocab-size says how many rows of the embedding to keep)"
            )
    derived = (".rotary_emb.inv_freq", f"weight{SCALE_END}", *(("lm_head.weight",) if shape.tied else ()))
    known = {*specs, *missing, *carried}
    lacking = [*missing, *(name for name in originals if name not in known and not name.endswith(derived))]
    if not add_missing:
        if lacking:
            logger.warning("the checkpoint lacks, and the output will too: %s; %s", abbreviate(lacking), _ADD)
        return {}
    bad = [name for name in lacking if name not in originals or originals[name].dtype.itemsize == 1]
    if bad:
        raise BadInputError(
            f"--add-missing-from-origin-hf: {origin} does not have, or only quantised, {abbreviate(bad)}"
        )
    return {name: originals[name] for name in lacking}
