"""What is changed, from outside, of megatron-core and torch as they are released, in training ranks: a record each.

`install` is the first thing that such a process calls, before anything else imports ``megatron.core``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import queue
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron import cpu_shim
from slime.options.training import import_transformer_engine
from slime.utils import device, patching
from slime.utils.patching import OR, Patch

_OTHER_OPTIMIZERS = ("transformer_engine.pytorch.optimizers", "apex.optimizers", "amp_C")
_RANK = "every training rank"
_CPU = _RANK + ", on hosts without CUDA"


# ---- defects that are put right on every host


@contextlib.contextmanager
def only_torchs_optimizers() -> Iterator[None]:
    """Hides the optimizers of Transformer Engine and Apex while Megatron is imported: they make their state late, and
    name it otherwise in checkpoints.

    Late is after memory for it was planned. Whether a package is there must not decide how a run trains, or who can
    resume it.
    """
    if importlib.util.find_spec("transformer_engine") is not None:
        try:
            import_transformer_engine()  # needs its own optimizers for that
        except ImportError as error:
            raise ImportError(
                f"transformer_engine is installed, but cannot be imported ({error}): "
                "complete it as docs/install.md says, or uninstall it"
            ) from error
    with patching.hidden(*_OTHER_OPTIMIZERS):
        yield


def without_wandb() -> contextlib.AbstractContextManager[None]:
    """Hides wandb while Megatron is imported, which imports it to log with: a tenth of the seconds that a rank imports,
    for what ranks leave to the driver."""
    return patching.hidden("wandb")


def use_torchs_product_in_routers() -> None:
    """Has MoE routers multiply by torch, with Transformer Engine installed or not; without, they read a name that was
    never bound."""
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None


def fix_latent_attention_without_transformer_engine() -> None:
    """Has multi-latent attention not ask for instances of Transformer Engine's classes where a mock stands for it: a
    TypeError."""
    from megatron.core.transformer import multi_latent_attention

    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False


def fix_order_of_experts() -> None:
    """Adds up a token's experts in one order each time."""
    from megatron.core.transformer.moe import token_dispatcher

    from slime.backends.megatron.layers import permutation

    token_dispatcher.permute, token_dispatcher.unpermute = permutation.permute, permutation.unpermute


def fix_distributed_optimizer_load() -> None:
    """Has the distributed optimizer load AdamW's state, with a step of its own for each parameter.

    It is a ``KeyError: 'step'`` else. AdamW advances ``step`` in place once per parameter, so a shared one makes a
    resumed run silently wrong.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    inner = DistributedOptimizer._set_main_param_and_optimizer_states

    @torch.no_grad()
    def load(self: Any, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state:
            state["step"] = state["step"].clone()
            tensors = {**tensors, "step": state["step"]}
        inner(self, model_param, tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = load


def store_optimizer_by_shares() -> None:
    """Has each rank store and load about its share of the distributed optimizer's state, and what is behind a padded
    bucket where it belongs.

    Megatron gathers all of it on each rank, twelve bytes a parameter, and the first rank writes it, shifted by the
    padding of buckets: a tied embedding has one of its own.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from slime.backends.megatron.weights import optimizer_shares

    DistributedOptimizer.sharded_param_state_fully_reshardable = optimizer_shares.sharded_by_storers
    DistributedOptimizer.load_parameter_state_from_fully_reshardable = optimizer_shares.load_from_storers


def add_gradients_by_torch() -> None:
    """Has linear layers with ``gradient_accumulation_fusion`` add a weight's gradient to ``main_grad`` by torch's
    product, which adds in float32, where Megatron knows Apex's alone.

    Transformer Engine, where it is installed, would keep what stands for such gradients, asleep too.
    """
    from megatron.core.tensor_parallel import layers

    from slime.training.loss.weight_gradient import add_product

    def add(rows: Tensor, gradient: Tensor, main_grad: Tensor) -> None:
        add_product(main_grad, gradient.t(), rows)

    def stand_in(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
        return (torch.zeros if zero else torch.empty)(shape, dtype=dtype, device=device.current_device())

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=add, wgrad_gemm_accum_fp16=add)
    layers.get_dummy_wgrad = stand_in


def make_swiglu_gradients_by_torch() -> None:
    """Has the gradient of SwiGLU made by torch's of SiLU: half the time of Megatron's formula, which nothing compiles
    there."""
    from megatron.core.fusions import fused_bias_swiglu

    fused_bias_swiglu.swiglu_back = swiglu_grad


def swiglu_grad(grad: Tensor, y: Tensor) -> Tensor:
    """The gradient of ``silu(gate) * up`` with ``gate, up = y.chunk(2, -1)``, like ``y`` [..., 2 channels]."""
    gate, up = y.chunk(2, -1)
    y_grad = torch.empty_like(y)
    of_gate, of_up = y_grad.chunk(2, -1)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=of_gate)
    torch.mul(grad, torch.nn.functional.silu(gate), out=of_up)
    return y_grad


def make_swiglu_gradients_by_a_kernel() -> None:
    """Has the gradient of SwiGLU, weighted or not, made by a kernel that reads and writes everything once; torch's
    compiler reads it twice."""
    from megatron.core.fusions import fused_bias_swiglu as fusions

    from slime.backends.megatron.layers.gpu_kernels import swiglu_grad

    def saved(ctx: Any) -> list[Tensor]:
        y, *weights = ctx.saved_tensors
        return [y.to(ctx.ori_input_dtype) if ctx.fp8_input_store else y, *weights]

    def plain(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return swiglu_grad(grad, *saved(ctx))[0], None, None

    def weighted(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *swiglu_grad(grad, *saved(ctx)), None

    fusions.SwiGLUFunction.backward = staticmethod(plain)
    fusions.WeightedSwiGLUFunction.backward = staticmethod(weighted)


def write_by_threads() -> None:
    """Has a save's files written by threads of the rank, not by processes forked from it: one that outlives a killed
    rank keeps its connections open, so that others learn minutes later that it is gone, and one that is killed is
    waited for without end."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    def write(
        transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], results: queue.Queue[object]
    ) -> None:
        written: queue.Queue[tuple[int, object]] = queue.Queue()
        running: queue.Queue[int] = queue.Queue()

        def write_file(index: int) -> None:
            running.put(index)
            FileSystemWriterAsync.write_preloaded_data(
                transforms, index, buckets[index], written, running, True, use_msc=use_msc
            )

        with ThreadPoolExecutor(len(buckets)) as threads:
            list(threads.map(write_file, range(len(buckets))))
        of_file = dict(written.get_nowait() for _ in buckets)
        failures = [result for result in of_file.values() if isinstance(result, Exception)]
        # Without the traceback, whose frames hold all tensors of a file.
        results.put(failures[0].with_traceback(None) if failures else of_file)

    FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(write)


def collect_results_in_this_process() -> None:
    """Collects what a save's writers did in the rank itself, not in a server process, which takes seconds to start and
    outlives a killed trainer.

    To be called before each save: what one that failed left in the queue is not the next one's.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()


# ---- the records


@dataclass(frozen=True)
class RankFacts:
    """What decides which patches a training rank needs."""

    cuda: bool = field(default_factory=lambda: device.is_cuda())
    transformer_engine: bool = field(default_factory=lambda: importlib.util.find_spec("transformer_engine") is not None)
    """Whether it is installed."""
    saves: bool = True
    """Whether it writes checkpoints, or snapshots."""

    @classmethod
    def of_run(cls, args: Namespace) -> RankFacts:
        """Those of a run's ranks, were they on this host."""
        return cls(saves=args.save is not None or args.trainer_snapshot_interval is not None)


PROVEN, NEW = "==0.16.1", "==0.19.2"
"""The releases of the two columns (docs/install.md)."""
BOTH = f"{PROVEN}{OR}{NEW}"


def _megatron(
    name: str,
    goes: str,
    apply: Callable[..., Any],
    where: str = _RANK,
    wanted: Callable[[RankFacts], bool] = lambda _: True,
    versions: str = BOTH,
    gone: str = "",
) -> Patch[RankFacts]:
    return Patch(name, "megatron-core", versions, where, goes, apply, wanted, gone)


def _on_cpu(name: str, goes: str, apply: Callable[..., Any]) -> Patch[RankFacts]:
    return _megatron(name, goes, apply, _CPU, lambda rank: not rank.cuda)


TORCHS_OPTIMIZERS = _megatron("torchs_optimizers", "Megatron lets one choose.", only_torchs_optimizers)
NO_WANDB = _megatron("no_wandb", "Megatron imports it where it logs with it.", without_wandb)
"""Both in force while those of `CPU_SHIM` are carried out, and Megatron's optimizers imported."""

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
        use_torchs_product_in_routers,
    ),
    _megatron(
        "latent_attention_alone",
        "`HAVE_TE` of `multi_latent_attention` is false without.",
        fix_latent_attention_without_transformer_engine,
        _RANK + ", without Transformer Engine",
        lambda rank: not rank.transformer_engine,
        PROVEN,
        NEW,
    ),
    _megatron("optimizer_load", "Megatron's loads torch's AdamW.", fix_distributed_optimizer_load),
    _megatron(
        "optimizer_shares",
        "Megatron gathers no more of its state than a rank stores, and what is behind padding is not shifted.",
        store_optimizer_by_shares,
    ),
    _megatron("order_of_experts", "Megatron's permutation has one order.", fix_order_of_experts),
    _megatron("gradient_products", "Megatron adds them by torch.", add_gradients_by_torch),
    _on_cpu("swiglu_gradient_on_cpus", "Megatron's is torch's.", make_swiglu_gradients_by_torch),
    _megatron(
        "swiglu_gradient",
        "Megatron's takes as long.",
        make_swiglu_gradients_by_a_kernel,
        _RANK + ", on hosts with CUDA",
        lambda rank: rank.cuda,
    ),
)

EACH_SAVE: tuple[Patch[RankFacts], ...] = (
    _megatron(
        "write_by_threads",
        "Megatron writes by threads.",
        write_by_threads,
        "every training rank that saves",
        lambda rank: rank.saves,
        PROVEN,
        NEW,
    ),
    _megatron(
        "save_results",
        "Megatron makes that process for saves in the background only.",
        collect_results_in_this_process,
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
    logging.getLogger("megatron.core.models.gpt.gpt_model").addFilter(_is_no_farewell)
    rank = RankFacts()
    with patching.within(TORCHS_OPTIMIZERS, rank), patching.within(NO_WANDB, rank):
        patching.apply(CPU_SHIM, rank)
        importlib.import_module("megatron.core.optimizer")
    patching.apply(FIXES, rank)


def _is_no_farewell(record: logging.LogRecord) -> bool:
    """Of 0.19, at each model that is built: there is nothing that a user could do."""
    return "GPTModel IS DEPRECATED" not in record.getMessage()


def prepare_save() -> None:
    """To be called before each save of a checkpoint, on every rank."""
    patching.apply(EACH_SAVE, RankFacts())
