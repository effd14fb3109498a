"""What is changed, from outside, of megatron-core and torch as they are released, in training ranks: a record each.

`install` is the first thing that such a process calls, before anything else imports ``megatron.core``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from argparse import Namespace
from dataclasses import dataclass, field

from slime.backends.megatron import cpu_shim, fixes
from slime.utils import device, patching
from slime.utils.patching import Patch

_MEGATRON = "megatron-core"
_SEEN = "==0.16.1"
_RANK = "every training rank"
_CPU = _RANK + ", on hosts without CUDA"


def _has_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


@dataclass(frozen=True)
class RankFacts:
    """What decides which patches a training rank needs."""

    cuda: bool = field(default_factory=lambda: device.is_cuda())
    transformer_engine: bool = field(default_factory=_has_transformer_engine)
    """Whether it is installed."""
    saves: bool = True
    """Whether it writes checkpoints."""

    @classmethod
    def of_run(cls, args: Namespace) -> RankFacts:
        """Those of a run's ranks, were they on this host."""
        return cls(saves=args.save is not None)


def _without_cuda(rank: RankFacts) -> bool:
    return not rank.cuda


def _always(rank: RankFacts) -> bool:
    return True


TORCHS_OPTIMIZERS: Patch[RankFacts] = Patch(
    "torchs_optimizers", _MEGATRON, _SEEN, _RANK,
    "Hides the optimizers of Transformer Engine and Apex while Megatron is imported: they make their state late, and "
    "name it otherwise in checkpoints.",
    "Megatron lets one choose.",
    wanted=_always,
    apply=fixes.only_torchs_optimizers,
)  # fmt: skip
"""In force while the others of `CPU_SHIM` are carried out, and Megatron's optimizers imported."""

CPU_SHIM: tuple[Patch[RankFacts], ...] = (
    Patch(
        "cuda_calls", _MEGATRON, _SEEN, _CPU,
        "Has the device, stream and RNG functions of `torch.cuda` do what those of `torch.cpu` do.",
        "Megatron asks torch for the accelerator.",
        wanted=_without_cuda,
        apply=cpu_shim.answer_cuda_calls_with_cpu,
    ),
    Patch(
        "cuda_factories", _MEGATRON, _SEEN, _CPU,
        'Has torch\'s factories take `device="cuda"`, which Megatron writes out, for the CPU.',
        "Megatron asks torch for the accelerator.",
        wanted=_without_cuda,
        apply=cpu_shim.put_cuda_factories_on_cpu,
    ),
    Patch(
        "cuda_tensor_methods", _MEGATRON, _SEEN, _CPU,
        "Has `Tensor.cuda` return the tensor, and `Tensor.type` name a type of CUDA's, with which Megatron's "
        "optimizers compare it.",
        "Megatron asks torch for the accelerator.",
        wanted=_without_cuda,
        apply=cpu_shim.make_cuda_tensor_methods_work,
    ),
    Patch(
        "no_compilation", _MEGATRON, _SEEN, _CPU,
        "Has `torch.compile` return functions as they are while Megatron is imported: seconds, and a C++ compiler, for "
        "nothing.",
        "Megatron does not compile at import.",
        wanted=_without_cuda,
        apply=cpu_shim.import_without_compiling,
    ),
    Patch(
        "cpu_generator", _MEGATRON, _SEEN, _CPU,
        "Has the RNG tracker set the state of torch's generator, not of CUDA's.",
        "Megatron asks torch for the accelerator.",
        wanted=_without_cuda,
        apply=cpu_shim.use_cpu_generator,
    ),
    Patch(
        "split_sizes", _MEGATRON, _SEEN, _CPU,
        "Has the all-to-all dispatcher of tokens make plain numbers of its split sizes, which are on no GPU.",
        "Megatron does that wherever they are.",
        wanted=_without_cuda,
        apply=cpu_shim.take_split_sizes_as_they_are,
    ),
    Patch(
        "uneven_parts", "torch", ">=2.11.0,<=2.13.0", _CPU,
        "Gathers and scatters parts of several sizes by broadcasts and reductions, as NCCL does.",
        "gloo takes uneven parts.",
        wanted=_without_cuda,
        apply=cpu_shim.exchange_uneven_parts,
    ),
)  # fmt: skip

FIXES: tuple[Patch[RankFacts], ...] = (
    Patch(
        "router_product", _MEGATRON, _SEEN, _RANK,
        "Has MoE routers multiply by torch, with Transformer Engine installed or not; without, they read a name that "
        "was never bound.",
        "Megatron's routers have one product, and bind the name.",
        wanted=_always,
        apply=fixes.use_torchs_product_in_routers,
    ),
    Patch(
        "latent_attention_alone", _MEGATRON, _SEEN, _RANK + ", without Transformer Engine",
        "Has multi-latent attention not ask for instances of Transformer Engine's classes where a mock stands for it: "
        "a TypeError.",
        "`HAVE_TE` of `multi_latent_attention` is false without.",
        wanted=lambda rank: not rank.transformer_engine,
        apply=fixes.fix_latent_attention_without_transformer_engine,
    ),
    Patch(
        "optimizer_load", _MEGATRON, _SEEN, _RANK,
        "Has the distributed optimizer load AdamW's state, with a step of its own for each parameter.",
        "Megatron's loads torch's AdamW.",
        wanted=_always,
        apply=fixes.fix_distributed_optimizer_load,
    ),
    Patch(
        "padded_buckets", _MEGATRON, _SEEN, _RANK,
        "Stores optimizer state behind a padded bucket where it belongs, not shifted by the padding.",
        "Megatron cuts the state up at offsets that do not count padding.",
        wanted=_always,
        apply=fixes.fix_checkpoints_of_padded_buckets,
    ),
    Patch(
        "order_of_experts", _MEGATRON, _SEEN, _RANK,
        "Adds up a token's experts in one order each time.",
        "Megatron's permutation has one order.",
        wanted=_always,
        apply=fixes.fix_order_of_experts,
    ),
)  # fmt: skip

EACH_SAVE: tuple[Patch[RankFacts], ...] = (
    Patch(
        "save_results", _MEGATRON, _SEEN, "every training rank that saves",
        "Collects what a save's writers did in the rank itself, not in a server process, which takes seconds to start "
        "and outlives a killed trainer.",
        "Megatron makes that process for saves in the background only.",
        wanted=lambda rank: rank.saves,
        apply=fixes.collect_results_in_this_process,
    ),
)  # fmt: skip


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
