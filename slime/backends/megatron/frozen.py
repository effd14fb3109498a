"""Parameters that keep their weights: those that ``--freeze-params-name-list`` or ``--only-train-params-name-list``
say, before data parallelism and the optimizer take account of what has gradients."""

from __future__ import annotations

import logging
import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.megatron.model import global_namer
from slime.options.learning.algorithm import PARAMETER_LISTS
from slime.utils.errors import BadInputError

logger = logging.getLogger(__name__)

_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"


def freeze(args: Namespace, model_chunks: Sequence[torch.nn.Module], *, is_critic: bool) -> None:
    """Freeze what the options say; collective over all ranks.

    A pattern is searched for in the names of Megatron's parameters, with the numbers of layers in the whole model. Tied
    embeddings are one parameter, also where two pipeline stages have a copy each. BadInputError, on every rank, where a
    pattern is in no name of the actor's, or a pipeline stage has nothing to train.
    """
    given = {name: patterns for name in PARAMETER_LISTS if (patterns := getattr(args, name))}
    if not given:
        return
    ((option, patterns),) = given.items()
    names = [name for chunk in model_chunks for name, _ in _named(chunk)]
    found = {pattern for pattern in patterns if any(re.search(pattern, name) for name in names)}
    for chunk in model_chunks:
        chunk.is_partly_frozen = True  # type: ignore[assignment]
        for name, parameter in _named(chunk):
            is_named = any(re.search(pattern, name) for pattern in patterns)
            parameter.requires_grad_(is_named == (option == "only_train_params_name_list"))
        if chunk.pre_process and not any(p.requires_grad for p in chunk.get_submodule("embedding").parameters()):
            # Recomputed layers, and pipeline stages, only have gradients where an input wants one.
            chunk.get_submodule("embedding").register_forward_hook(lambda _, __, hidden: hidden.requires_grad_())
    trained = sum(p.requires_grad for chunk in model_chunks for p in chunk.parameters())
    logger.info(f"{trained} of this rank's {len(names)} parameters are trained")
    _check(PARAMETER_LISTS[option], patterns, names, set(patterns) if is_critic else found, trained)


def is_partly_frozen(model_chunks: Sequence[torch.nn.Module]) -> bool:
    """Whether `freeze` had something to freeze, on whichever rank."""
    return bool(getattr(model_chunks[0], "is_partly_frozen", False))


def _check(flag: str, patterns: Sequence[str], names: list[str], found: set[str], trained: int) -> None:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (found, trained, names[0]))
    missing = [pattern for pattern in patterns if not any(pattern in theirs for theirs, _, _ in every)]
    if missing:
        raise BadInputError(f"{flag} {missing[0]}: no parameter has that in its name, as {every[0][2]} has others")
    counts = [count for _, count, _ in every]
    if 0 in counts:
        raise BadInputError(f"{flag} {' '.join(patterns)}: rank {counts.index(0)} has nothing to train")


def _named(chunk: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    global_name, tied = global_namer(chunk), getattr(chunk, "share_embeddings_and_output_weights", False)
    for name, parameter in chunk.named_parameters():
        yield _EMBEDDING if tied and name == _OUTPUT else global_name(name), parameter
