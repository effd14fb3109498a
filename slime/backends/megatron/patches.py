"""What is changed, from outside, of megatron-core and torch as they are released, in training ranks: a record each.

`install` is the first thing that such a process calls, before anything else imports ``megatron.core``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slime.backends.megatron import cpu_shim, fixes
from slime.utils import device, patching
from slime.utils.patching import Patch

_RANK = "every training rank"
_CPU = _RANK + ", on hosts without CUDA"


@dataclass(frozen=True)
class RankFacts:
    """What decides which patches a training rank needs."""

    cuda: bool = field(default_factory=lambda: device.is_cuda())
    transformer_engine: bool = field(default_factory=lambda: importlib.util.find_spec("transformer_engine") is not None)
    """Whether it is installed."""
    saves: bool = True
    """Whether it writes checkpoints."""

    @classmethod
    def of_run(cls, args: Namespace) -> RankFacts:
        """Those of a run's ranks, were they on this host."""
        return cls(saves=args.save is not None)


def _megatron(
    name: str,
    goes: str,
    apply: Callable[..., Any],
    where: str = _RANK,
    wanted: Callable[[RankFacts], bool] = lambda _: True,
) -> Patch[RankFacts]:
    return Patch(name, "megatron-core", "==0.16.1", where, goes, apply, wanted)


def _on_cpu(name: str, goes: str, apply: Callable[..., Any]) -> Patch[RankFacts]:
    return _megatron(name, goes, apply, _CPU, lambda rank: not rank.cuda)


TORCHS_OPTIMIZERS = _megatron("torchs_optimizers", "Megatron lets one choose.", fixes.only_torchs_optimizers)
"""In force while the others of `CPU_SHIM` are carried out, and Megatron's optimizers imported."""

_ASKS = "Megatron asks torch for the accelerator."
CPU_SHIM: tuple[Patch[RankFacts], ...] = (
    _on_cpu("cuda_calls", _ASKS, cpu_shim.answer_cuda_calls_with_cpu),
    _on_cpu("cuda_factories", _ASKS, cpu_shim.put_cuda_factories_on_cpu),
    _on_cpu("cuda_tensor_methods", _ASKS, cpu_shim.make_cuda_tensor_methods_work),
    _on_cpu("no_compilation", "Megatron does not compile at import.", cpu_shim.import_without_compiling),
    _on_cpu("cpu_generator", _ASKS, cpu_shim.use_cpu_generator),
    _on_cpu("split_sizes", "Megatron does that wherever they are.", cpu_shim.take_split_sizes_as_they_are),
    Patch(
        "uneven_parts",
        "torch",
        ">=2.11.0,<=2.13.0",
        _CPU,
        "gloo takes uneven parts.",
        cpu_shim.exchange_uneven_parts,
        lambda rank: not rank.cuda,
    ),
)

FIXES: tuple[Patch[RankFacts], ...] = (
    _megatron(
        "router_product",
        "Megatron's routers have one product, and bind the name.",
        fixes.use_torchs_product_in_routers,
    ),
    _megatron(
        "latent_attention_alone",
        "`HAVE_TE` of `multi_latent_attention` is false without.",
        fixes.fix_latent_attention_without_transformer_engine,
        _RANK + ", without Transformer Engine",
        lambda rank: not rank.transformer_engine,
    ),
    _megatron("optimizer_load", "Megatron's loads torch's AdamW.", fixes.fix_distributed_optimizer_load),
    _megatron(
        "padded_buckets",
        "Megatron cuts the state up at offsets that do not count padding.",
        fixes.fix_checkpoints_of_padded_buckets,
    ),
    _megatron("order_of_experts", "Megatron's permutation has one order.", fixes.fix_order_of_experts),
)

EACH_SAVE: tuple[Patch[RankFacts], ...] = (
    _megatron(
        "save_results",
        "Megatron makes that process for saves in the background only.",
        fixes.collect_results_in_this_process,
        "every training rank that saves",
        lambda rank: rank.saves,
    ),
)


@functools.cache
def install() -> None:
    """Patch torch and megatron-core for this host; a second call does nothing.

    With CUDA the defects are fixed, and torch's optimizers taken. Without, ``torch.cuda`` as Megatron uses it means the
    CPU from here on, for the whole process: call this in Megatron's own workers only.
    """
    warnings.filterwarnings("ignore", message=r".*Apex (is|are) not installed")
    warnings.filterwarnings("ignore", message="The legacy GroupedMLP")  # which the layer specification replaces
    warnings.filterwarnings("ignore", message="full scope is deprecated")  # which is its own default
    rank = RankFacts()
    with patching.within(TORCHS_OPTIMIZERS, rank):
        patching.apply(CPU_SHIM, rank)
        importlib.import_module("megatron.core.optimizer")
    patching.apply(FIXES, rank)


def prepare_save() -> None:
    """To be called before each save of a checkpoint, on every rank."""
    patching.apply(EACH_SAVE, RankFacts())
