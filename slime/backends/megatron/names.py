"""Global names of a rank's parameters: layer and expert numbers count over all pipeline and expert ranks."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from megatron.core import parallel_state

from slime.backends.megatron.model import unwrap

EXPERTS = ".mlp.experts."
_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")


def global_namer(chunk: torch.nn.Module) -> Callable[[str], str]:
    """What turns a name within a chunk into one whose layer number counts over all pipeline stages."""
    layers = {name: module.layer_number - 1 for name, module in unwrap(chunk).decoder.layers.named_children()}
    return lambda name: _LAYER.sub(lambda match: str(layers[match[0]]), name)


def local_experts(chunk: torch.nn.Module) -> range:
    """The numbers of this rank's experts; empty without experts."""
    count = (unwrap(chunk).config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
    first = count * parallel_state.get_expert_model_parallel_rank()
    return range(first, first + count)


def expert_name(name: str, expert: int) -> str:
    """The name of one expert's part of what experts share; any other name as it is."""
    before, experts, after = name.partition(EXPERTS)
    return f"{before}{experts}{expert}.{after}" if experts else name
