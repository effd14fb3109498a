"""Whether weights are those of the model: its layers, experts and shapes, which flags may have made others.

With ``--allow-config-mismatch`` flags hold against config.json. A smaller model would be made of a part of each tensor,
without a word. Only names and headers are read here.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from slime.backends.megatron.layers.head import ValueHead
from slime.backends.megatron.model import has_heads, unwrap
from slime.backends.megatron.weights.gather import hf_shapes, union
from slime.files.hf_reader import HFWeights
from slime.models import Family, Shape
from slime.models.family import HEADS_PREFIX, MODEL_PREFIXES, OUTPUT_PREFIX, VALUE_HEAD_KEY
from slime.utils.errors import BadInputError, abbreviate

_ADVICE = "drop the flags that contradict config.json, or train from random weights (--random-weights of train.py)"


def built_shape(shape: Shape, built: Namespace | TransformerConfig) -> Shape:
    """The shape of config.json with the numbers by which a model, built of ``built``, cuts its matrices: flags may have
    made them others."""
    return replace(
        shape,
        num_attention_heads=built.num_attention_heads,
        num_query_groups=built.num_query_groups,
        kv_channels=getattr(built, "kv_channels", None) or shape.kv_channels,
        ffn_hidden_size=built.ffn_hidden_size,
    )


def check_hf(
    directory: Path,
    weights: HFWeights,
    chunks: Sequence[torch.nn.Module],
    parameters: Mapping[str, Tensor],
    family: Family,
    shape: Shape,
) -> None:
    """Compare a Hugging Face directory, whose names fit its config.json, with the model; collective. BadInputError
    where the model has others than all layers, experts and other tensors of config.json, or one of another shape.

    Args:
        parameters: this rank's weights, by global name.
        shape: of its config.json, with the numbers of `built_shape`.
    """
    _check_names(directory, chunks, parameters, family, shape)
    shape = replace(shape, vocab_size=unwrap(chunks[0]).unpadded_vocab_size)
    for name, parameter in parameters.items():
        for source, wanted in hf_shapes(family, shape, name, tuple(parameter.shape)):
            found = tuple(weights[source].shape)
            if found != wanted:
                raise BadInputError(_other_shape(directory, source, found, wanted))


def _check_names(
    directory: Path, chunks: Sequence[torch.nn.Module], parameters: Collection[str], family: Family, shape: Shape
) -> None:
    model = unwrap(chunks[0])
    own = dict.fromkeys(parameters, 0)
    if isinstance(getattr(unwrap(chunks[-1]), "output_layer", None), ValueHead):
        own[VALUE_HEAD_KEY] = 0
    held = union(
        own, parallel_state.get_expert_model_parallel_group(), parallel_state.get_pipeline_model_parallel_group()
    )
    is_critic = held.pop(VALUE_HEAD_KEY, None) is not None
    if not is_critic and model.share_embeddings_and_output_weights != shape.tied:
        kinds = ["its own output layer", "the embedding as output layer"]
        raise BadInputError(
            f"{directory}: the model of the flags has {kinds[not shape.tied]}, config.json means {kinds[shape.tied]}; "
            + _ADVICE
        )
    wanted = dict.fromkeys(family.parameters(shape))
    lacking = [name for name in wanted if name not in held and not name.startswith(OUTPUT_PREFIX)]
    more = [name for name in held if name not in wanted]
    if not (lacking or more):
        return
    counts = (
        ("layers", model.config.num_layers, shape.num_layers),
        ("experts", model.config.num_moe_experts or 0, shape.num_experts),
    )
    problems = [f"it has {built} {what}, config.json {meant}" for what, built, meant in counts if built != meant]
    if lacking:
        sources = [source for name in lacking for source in family.sources(name, shape)]
        problems.append(f"it lacks {abbreviate(sources)}")
    if more:
        problems.append(f"it has also {abbreviate(more)}")
    raise BadInputError(
        f"{directory}: the model of the flags is not that of config.json: {'; '.join(problems)}; {_ADVICE}"
    )


def check_torch_dist(
    directory: str | Path,
    present: Mapping[str, ShardedTensor],
    state: dict[str, Any],
    chunks: Sequence[torch.nn.Module],
) -> None:
    """Compare the stored tensors of a torch_dist checkpoint with the model; collective. BadInputError where it lacks
    one, has one more, or one of another shape.

    How many rows pad the vocabulary depends on the layout: only as many as tokens must be there.

    Args:
        present: what is stored, by key.
        state: of the model, as it is to be loaded; it is used up.
    """
    apply_factories(state)
    own = {entry.key: entry for entry in nested_values(state) if isinstance(entry, ShardedTensor)}
    for key, entry in own.items():
        if key == VALUE_HEAD_KEY:
            continue
        if key not in present:
            raise BadInputError(f"{directory} has no {key}, which the model of the flags has; {_ADVICE}")
        found, wanted = tuple(present[key].global_shape), tuple(entry.global_shape)
        if entry.allow_shape_mismatch:
            rows = unwrap(chunks[0]).unpadded_vocab_size
            wanted = (max(rows, found[0]), *wanted[1:])
        if found != wanted:
            raise BadInputError(_other_shape(directory, key, found, wanted))
    held = union(dict.fromkeys(own, 0), parallel_state.get_pipeline_model_parallel_group())
    # A critic has a value head instead of the output layer, on the last stage.
    unused = [HEADS_PREFIX] * (not has_heads(chunks)) + [OUTPUT_PREFIX] * (VALUE_HEAD_KEY in held)
    more = [
        key
        for key in present
        if key.startswith(MODEL_PREFIXES)
        and key not in held
        and not key.startswith(tuple(unused))
        and not key.endswith("._extra_state")
    ]
    if more:
        raise BadInputError(f"{directory} has {abbreviate(more)}, which the model of the flags lacks; {_ADVICE}")


def _other_shape(directory: str | Path, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    return (
        f"{directory}: {name} is {list(found)}, and {list(wanted)} in the model of config.json and the flags; {_ADVICE}"
    )
