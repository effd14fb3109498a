"""Where the releases of megatron-core differ for slime: 0.16.1 and 0.19.2, the columns of docs/install.md.

What the installed one has is asked, not its number. Defects that one of them has, and what puts them right, are records
of `patches`.

| what | 0.16.1 | 0.19.2 |
|---|---|---|
| a layer's specification of its MLP | `ModuleSpec` | `functools.partial` of the class, or of a function |
| what `permute` returns | rows, probabilities, order | those and two that only padding for float8 makes |
| marks of weights that tensor parallelism cuts | with random initialisation alone | always |
| what layers are built with besides | | `name` |
| what ranks have in common, of a checkpoint | `common.pt` | an object in it; `checkpoint.py` writes that file, too |
| what the schedules call the layer of an MTP head | | `mtp_model_layer` |
| the queue of a save's results | `_get_write_results_queue`, of processes | `get_write_results_queue`, of threads |
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from megatron.core.transformer.moe import moe_utils

_OF_PADDING = [n for n in ("tokens_per_expert", "align_size") if n in inspect.signature(moe_utils.permute).parameters]
"""What the installed `permute` returns of padding, if it does."""


def of_module(spec: Any) -> tuple[Any, Any]:
    """What a specification of an MLP, or of shared experts, builds, and its submodules, which may be written to."""
    if isinstance(spec, functools.partial):
        return spec.func, spec.keywords["submodules"]
    return spec.module, spec.submodules


def permuted(*rows: Any) -> tuple[Any, ...]:
    """Rows, their probabilities, and of which token each is, as Megatron's callers of `permute` take them."""
    return (*rows, *(None for _ in _OF_PADDING))
