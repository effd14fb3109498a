"""Low-rank adapters (LoRA) as rows of a family's table: which layers can have them, and how PEFT names their weights.

A Megatron matrix may be put together of several Hugging Face ones, its row's *sources* (query, key and value; gate and
up). PEFT gives each of these an adapter of its own, and so does the row here: ``lora.a`` [targeted sources * rank,
inputs] stacks the first matrices, ``lora.b`` [outputs, rank] holds the second ones in the matrix's own order of rows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from torch import Tensor

from slime.models.family import ADAPTER_MARK, Family, Piece, Row, Rule, Shape, whole

ALL_LINEAR = "all-linear"
"""The target that stands for every matrix of attention, MLP and experts."""
_PEFT, _FIRST, _SECOND = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def linear_rows(family: Family, shape: Shape) -> list[Row]:
    """The rows of the matrices of a model that can have adapters."""
    return [row for row in family.rows if _is_linear(row) and next(row.indices(shape), None) is not None]


def linear_modules(family: Family, shape: Shape) -> list[str]:
    """The last names of a model's Hugging Face modules that can have adapters: ``q_proj``, ``down_proj``, ..."""
    return last_names(targeted_modules(family, shape, [ALL_LINEAR]))


def module_names(family: Family, shape: Shape, targets: Collection[str]) -> list[str]:
    """The targets, each once, with names in the place of `ALL_LINEAR`."""
    names = [n for target in targets for n in (linear_modules(family, shape) if target == ALL_LINEAR else [target])]
    return list(dict.fromkeys(names))


def targeted_modules(family: Family, shape: Shape, targets: Collection[str]) -> list[str]:
    """The names in the family's table of all Hugging Face modules that the targets stand for."""
    modules = [_module(source) for row in linear_rows(family, shape) for source in row.hf]
    return [module for module in modules if _matches(module, targets)]


def last_names(modules: Collection[str]) -> list[str]:
    """Of modules, as engines call their layers, each once."""
    return list(dict.fromkeys(map(_last, modules)))


def peft_config(rank: int, alpha: float, base: str, modules: list[str]) -> dict[str, Any]:
    """What PEFT, and an engine, must know of adapters of the Hugging Face modules of these names."""
    return {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base},
        **{"r": rank, "lora_alpha": alpha, "target_modules": modules},
        **{"lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "inference_mode": True},
    }


def targeted_sources(row: Row, targets: Collection[str]) -> tuple[bool, ...]:
    """For each source of a row, whether it gets an adapter; ``targets`` are names as PEFT takes them, the last part or
    parts of a module's name, or `ALL_LINEAR`."""
    return tuple(_is_linear(row) and _matches(_module(source), targets) for source in row.hf)


def row_sources(row: Row, shape: Shape, extent: int, rank: int) -> list[int]:
    """For each row of tensor-parallel rank ``rank``'s shard of a matrix, the number of the source that it is of."""
    if row.dim != 0:
        return [0] * extent
    return [piece.source for piece in row.rule(shape, extent, rank) for _ in range(piece.start, piece.stop)]


def adapter_family(family: Family, targets: Collection[str]) -> Family:
    """The table of the adapters' weights under PEFT's names.

    ``lora.b`` has rows of sources that are not targeted too; they are nothing but 0, and `is_adapter_name` tells them.
    """
    rows = [row for base in family.rows if any(targeted_sources(base, targets)) for row in _adapter_rows(base, targets)]
    return Family(family.model_types, tuple(rows), family.megatron_args)


def completed(tensors: dict[str, Tensor], family: Family) -> dict[str, Tensor]:
    """Adapters under PEFT's names, with the first matrices that `adapter_family` leaves out.

    A row's source that is not targeted has a ``lora_B`` of nothing but 0: another source's ``lora_A`` does for it. So
    each row has adapters of all its sources or of none, as an engine wants it that has the row as one layer.
    """
    groups = [[_last(_module(source)) for source in row.hf] for row in family.rows if _is_linear(row)]
    added = dict(tensors)
    for name in tensors:
        module, is_second, _ = name.partition(_SECOND)
        parent, _, last = module.rpartition(".")
        if is_second and module + _FIRST not in tensors:
            others = [f"{parent}.{other}{_FIRST}" for group in groups if last in group for other in group]
            added[module + _FIRST] = next(tensors[other] for other in others if other in tensors)
    return added


def is_adapter_name(name: str, targets: Collection[str]) -> bool:
    """Whether a tensor that the table of `adapter_family` names belongs to a targeted module."""
    return _matches(name.rpartition(".lora_")[0], targets)


def _adapter_rows(row: Row, targets: Collection[str]) -> tuple[Row, Row]:
    megatron = row.megatron.removesuffix(".weight") + ADAPTER_MARK
    chosen = targeted_sources(row, targets)
    modules = [_PEFT + _module(source) for source in row.hf]
    first = tuple(module + _FIRST for module, is_targeted in zip(modules, chosen, strict=True) if is_targeted)
    second = tuple(module + _SECOND for module in modules)
    a, b = replace(row, megatron=megatron + "a", hf=first), replace(row, megatron=megatron + "b", hf=second)
    if row.dim == 0:
        return replace(a, rule=_stacked(len(first)), dim=None), b
    return a, replace(b, rule=whole, dim=None)


def _stacked(sources: int) -> Rule:
    def stacked(shape: Shape, extent: int, rank: int) -> list[Piece]:
        return [Piece(source, 0, extent // sources) for source in range(sources)]

    return stacked


def _is_linear(row: Row) -> bool:
    """Whether it is the matrix of a linear layer of attention, MLP or experts, as Megatron names these."""
    module, _, parameter = row.megatron.rpartition(".")
    return parameter == "weight" and _last(module).startswith("linear_")


def _matches(module: str, targets: Collection[str]) -> bool:
    return ALL_LINEAR in targets or any(f".{module}".endswith(f".{target}") for target in targets)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _module(source: str) -> str:
    return source.removesuffix(".weight")
