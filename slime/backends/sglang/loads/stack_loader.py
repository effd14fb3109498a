"""Loads stacked experts into a server's fused parameters, in a few copies a layer, where the layer is a plain one."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from slime.files.expert_stacks import Stack

_TARGETS = {
    "gate_proj.weight": ("w13_weight", "w1"),
    "up_proj.weight": ("w13_weight", "w3"),
    "down_proj.weight": ("w2_weight", "w2"),
}
"""Of each part of an expert: the parameter, and what SGLang calls its place in it."""
_CUT = {"w1": 0, "w3": 0, "w2": 1}
"""The dimension of an expert's matrix that tensor parallelism cuts."""


def load_stack(model: torch.nn.Module, stack: Stack, rows: torch.Tensor) -> list[torch.nn.Parameter]:
    """Load ``rows`` as the layer's own loader would, expert by expert; which parameters they went to.

    Empty, and nothing is loaded, where the layer is none that is known to take them so: it is quantised, has another
    layout, adapters around it, or several copies of an expert; or it is not on this rank.
    """
    layer = _plain_layer(model, stack)
    if layer is None:
        return []
    runs = list(_runs(layer, stack))
    reached: dict[int, torch.nn.Parameter] = {}
    for end, column in stack.columns(rows):
        name, place = _TARGETS[end]
        parameter = getattr(layer, name)
        reached[id(parameter)] = parameter
        load = layer._load_w2 if place == "w2" else layer._load_w13
        rank = {"tp_rank": layer.moe_tp_rank} if "tp_rank" in inspect.signature(load).parameters else {}  # until 0.5.17
        for local, first, count in runs:
            load(
                expert_data=parameter.data[local : local + count],
                shard_dim=1 + _CUT[place],  # after that of experts
                shard_id=place,
                loaded_weight=column[first : first + count],
                **rank,
            )
    return list(reached.values())


def _plain_layer(model: torch.nn.Module, stack: Stack) -> Any:
    """The layer of the stack, if it may be filled so; None otherwise."""
    fused: Any = importlib.import_module("sglang.srt.layers.moe.fused_moe_triton.layer").FusedMoE
    plain: Any = importlib.import_module("sglang.srt.layers.quantization.unquant").UnquantizedFusedMoEMethod
    try:
        layer: Any = model.get_submodule(stack.module)
    except AttributeError:
        return None
    if not isinstance(layer, fused) or type(layer).weight_loader is not fused.weight_loader:
        return None
    if layer.quant_config is not None or type(layer.quant_method) is not plain or not layer.moe_runner_config.is_gated:
        return None
    if getattr(layer, "weight_load_method", None) is not None or layer._dwdp_bound:
        return None
    if getattr(layer, "is_draft", False):  # 0.5.23: its module is called as one of the model that it drafts for
        return None
    if layer.use_triton_kernels or layer.use_flashinfer_trtllm_moe or layer.use_presharded_weights:
        return None
    if any(end not in _TARGETS for end, _ in stack.parts):
        return None
    parameters = (layer.w13_weight, layer.w2_weight)
    if any(getattr(each, "is_transposed", False) or each.dim() != 3 for each in parameters):
        return None
    return None if any(getattr(each, "_sglang_require_global_experts", False) for each in parameters) else layer


def _runs(layer: Any, stack: Stack) -> Iterator[tuple[int, int, int]]:
    """Experts of this rank that follow one another here and in the stack: the first one's place in either, and how
    many."""
    location: Any = None
    if getattr(layer, "uses_expert_location", True):  # 0.5.23 says which layers do
        location = importlib.import_module("sglang.srt.eplb.expert_location").get_global_expert_location_metadata()
    run: tuple[int, int, int] | None = None
    for i in range(stack.count):
        for local in _places(layer, location, stack.first + i):
            if run is not None and (local, i) == (run[0] + run[2], run[1] + run[2]):
                run = (run[0], run[1], run[2] + 1)
                continue
            if run is not None:
                yield run
            run = (local, i, 1)
    if run is not None:
        yield run


def _places(layer: Any, location: Any, expert: int) -> Sequence[int]:
    """Where this rank has an expert, as `FusedMoE.weight_loader` finds it."""
    physical = [expert] if location is None else location.logical_to_all_physical(layer.layer_id, expert, False)
    found = (layer._map_global_expert_id_to_local_expert_id(each) for each in physical)
    return [local for local in found if 0 <= local < layer.num_local_experts]
