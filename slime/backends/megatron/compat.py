"""What megatron-core 0.16.1 needs from outside: a CPU shim where there is no CUDA, and fixes of four of its defects.

`install` is the first thing a worker process calls, before anything else imports ``megatron.core``. No patch
re-implements Megatron: those of the shim answer "which device" with "cpu".
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _device

from slime.options.training import import_transformer_engine

_OTHER_OPTIMIZERS = ("transformer_engine.pytorch.optimizers", "apex.optimizers", "amp_C")
_FACTORIES = (
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "rand",
    "randn",
    "empty_like",
    "zeros_like",
    "ones_like",
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
    with _only_torchs_optimizers():
        if not torch.cuda.is_available():
            _answer_cuda_calls_with_cpu()
            _put_cuda_factories_on_cpu()
            _make_cuda_tensor_methods_work()
            _import_without_compiling()
            _use_cpu_generator()
            _take_split_sizes_as_they_are()
            _exchange_uneven_parts()
        importlib.import_module("megatron.core.optimizer")
    _use_torchs_product_in_routers()
    _fix_latent_attention_without_transformer_engine()
    _fix_distributed_optimizer_load()
    _fix_checkpoints_of_padded_buckets()
    _fix_order_of_experts()


def _answer_cuda_calls_with_cpu() -> None:
    """Device, stream and RNG functions: torch.cpu has them as no-ops. Goes when Megatron asks for the accelerator.

    Each is a function object of its own: Dynamo refuses one function under two names.
    """
    cuda, cpu = torch.cuda, torch.cpu
    patches: dict[str, Any] = {
        "current_device": lambda: "cpu",
        "synchronize": lambda *_: None,
        "set_device": lambda *_: None,
        "current_stream": lambda *_: cpu.current_stream(),
        "default_stream": lambda *_: cpu.current_stream(),
        "stream": lambda stream: cpu.stream(stream),
        "Stream": type(
            "Stream",
            (cpu.Stream,),
            {
                "__init__": lambda self, *_, **__: cpu.Stream.__init__(self),
                "record_event": lambda self, event=None: cpu.Event(),
            },
        ),
        "manual_seed": lambda seed: torch.manual_seed(seed),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    }
    for name, value in patches.items():
        setattr(cuda, name, value)
    cuda.random.get_rng_state = patches["get_rng_state"]
    cuda.random.set_rng_state = patches["set_rng_state"]


def _put_cuda_factories_on_cpu() -> None:
    """A literal ``device="cuda"`` (schedules, gradient clipping, loss scale, MoE metrics). Goes with the shim."""

    def wrap(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(factory)
        def call(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            if device is not None:
                kwargs["device"] = "cpu" if str(device).startswith("cuda") else device
            return factory(*args, **kwargs)

        return call

    # `with torch.device(...)` recognises factories by a list that torch makes on first use: it must hold the real ones.
    _device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, wrap(getattr(torch, name)))


def _make_cuda_tensor_methods_work() -> None:
    """``.cuda()``, and ``.type()`` that optimizers compare with ``'torch.cuda.FloatTensor'``. Goes with the shim."""
    real_type = torch.Tensor.type

    def type_(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return real_type(self, dtype, *args, **kwargs)
        return real_type(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_  # type: ignore[method-assign,assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]


def _import_without_compiling() -> None:
    """Megatron wraps helpers in ``torch.compile``: on a CPU seconds of Dynamo and a C++ compiler, for nothing."""
    compiler = torch.compile
    torch.compile = lambda fn, *_, **__: fn  # type: ignore[assignment]
    try:
        importlib.import_module("megatron.core")
    finally:
        torch.compile = compiler


def _use_cpu_generator() -> None:
    """The RNG tracker takes its setter from torch.cuda's internals. Goes with the shim."""
    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    # fork() reports this every time, now by construction.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _take_split_sizes_as_they_are() -> None:
    """The all-to-all dispatcher makes its split sizes plain numbers only if they were on a GPU. Goes with the shim."""
    from megatron.core.transformer.moe import token_dispatcher

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_cpu


def _exchange_uneven_parts() -> None:
    """gloo gathers and scatters only parts of one size; experts under tensor parallelism have as many rows as tokens.

    NCCL does this by broadcasts and reductions too. Goes when gloo takes uneven parts.
    """
    gather, scatter = dist.all_gather, dist.reduce_scatter

    def all_gather(parts: list[Tensor], own: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({part.shape for part in parts}) == 1:
            return gather(parts, own, group=group, async_op=async_op)
        for source, part in enumerate(parts):
            if source == dist.get_rank(group):
                part.copy_(own)
            if part.numel():
                dist.broadcast(part, group_src=source, group=group)
        return None

    def reduce_scatter(
        own: Tensor, parts: list[Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if len({part.shape for part in parts}) == 1:
            return scatter(own, parts, op, group, async_op)
        for target, part in enumerate(parts):
            total = part.clone()
            if total.numel():
                dist.reduce(total, op=op, group_dst=target, group=group)
            if target == dist.get_rank(group):
                own.copy_(total)
        return None

    for patched in (all_gather, reduce_scatter):
        setattr(dist, patched.__name__, patched)


@contextlib.contextmanager
def _only_torchs_optimizers() -> Iterator[None]:
    """Within, Megatron finds no optimizers of Transformer Engine and Apex, which it otherwise takes where they are.

    Theirs make their state in the first step only, after memory for it was planned, and name it otherwise in
    checkpoints: whether a package is there must not decide how a run trains, or who can resume it.
    """
    if importlib.util.find_spec("transformer_engine") is not None:
        try:
            import_transformer_engine()  # needs its own optimizers for that
        except ImportError as error:
            raise ImportError(
                f"transformer_engine is installed, but cannot be imported ({error}): "
                "complete it as docs/install.md says, or uninstall it"
            ) from error
    hidden = {name: sys.modules.get(name) for name in _OTHER_OPTIMIZERS}
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: importing it fails
    try:
        yield
    finally:
        for name, module in hidden.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def _use_torchs_product_in_routers() -> None:
    """The MoE router multiplies by Transformer Engine where that is installed; where it is not, megatron-core 0.16.1
    reads a name that the failed import never bound."""
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None


def _fix_latent_attention_without_transformer_engine() -> None:
    """Multi-latent attention takes a mock for Transformer Engine and asks for instances of its classes: a TypeError.

    Not with Transformer Engine. Goes when ``HAVE_TE`` of that module is false without.
    """
    from megatron.core.transformer import multi_latent_attention

    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False


def _fix_order_of_experts() -> None:
    """A token's experts are added up in another order each time. Not by Transformer Engine's --moe-permute-fusion."""
    from megatron.core.transformer.moe import token_dispatcher

    from slime.backends.megatron import permutation

    token_dispatcher.permute, token_dispatcher.unpermute = permutation.permute, permutation.unpermute


def _fix_distributed_optimizer_load() -> None:
    """Loading the distributed optimizer of torch's AdamW: ``KeyError: 'step'``, and one step tensor for all parameters.

    AdamW advances ``step`` in place once per parameter, so a shared one makes a resumed run silently wrong.
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


def _fix_checkpoints_of_padded_buckets() -> None:
    """Optimizer state is put together without the padding at the end of buckets, and cut up at offsets that count it:
    what follows a padded bucket is stored shifted. megatron-core 0.16.1; a tied embedding has a bucket of its own.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    inner = DistributedOptimizer.sharded_param_state_fully_reshardable

    def sharded(self: Any, *args: Any, **kwargs: Any) -> Any:
        padded = [buffer.param_index_map for buffer in self.buffers]
        for buffer in self.buffers:
            buffer.param_index_map = offsets_without_padding(buffer)
        try:
            return inner(self, *args, **kwargs)
        finally:
            for buffer, offsets in zip(self.buffers, padded, strict=True):
                buffer.param_index_map = offsets

    DistributedOptimizer.sharded_param_state_fully_reshardable = sharded


def offsets_without_padding(buffer: Any) -> dict[Any, tuple[int, int, int]]:
    """A gradient buffer's parameters, each with start, end and bucket, as if no bucket ended in padding."""
    shifts, data = [], 0
    for bucket in buffer.buckets:
        shifts.append(bucket.offset - data)
        data += bucket.numel_unpadded
    return {
        parameter: (start - shifts[bucket], end - shifts[bucket], bucket)
        for parameter, (start, end, bucket) in buffer.param_index_map.items()
    }
