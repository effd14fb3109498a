"""A rank on a host without CUDA: where megatron-core asks for "cuda", it is answered "cpu"; nothing is re-implemented.

``torch.cuda`` as Megatron uses it then means the CPU, for the whole process. `patches` has a record for each function,
which carries it out in Megatron's own workers only.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _device

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


def answer_cuda_calls_with_cpu() -> None:
    """Has the device, stream and RNG functions of `torch.cuda` do what those of `torch.cpu` do.

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


def put_cuda_factories_on_cpu() -> None:
    """Has torch's factories take `device="cuda"`, which Megatron writes out, for the CPU."""

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


def make_cuda_tensor_methods_work() -> None:
    """Has `Tensor.cuda` return the tensor, and `Tensor.type` name a type of CUDA's, with which Megatron's optimizers
    compare it."""
    real_type = torch.Tensor.type

    def type_(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return real_type(self, dtype, *args, **kwargs)
        return real_type(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_  # type: ignore[method-assign,assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]


def import_without_compiling() -> None:
    """Has `torch.compile` return functions as they are while Megatron is imported: seconds, and a C++ compiler, for
    nothing."""
    compiler = torch.compile
    torch.compile = lambda fn, *_, **__: fn  # type: ignore[assignment]
    try:
        importlib.import_module("megatron.core")
    finally:
        torch.compile = compiler


def use_cpu_generator() -> None:
    """Has the RNG tracker set the state of torch's generator, not of CUDA's."""
    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    # fork() reports this every time, now by construction.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def take_split_sizes_as_they_are() -> None:
    """Has the all-to-all dispatcher of tokens make plain numbers of its split sizes, which are on no GPU."""
    from megatron.core.transformer.moe import token_dispatcher

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_cpu


def exchange_uneven_parts() -> None:
    """Gathers and scatters parts of several sizes by broadcasts and reductions, as NCCL does.

    Experts under tensor parallelism have as many rows as tokens.
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
