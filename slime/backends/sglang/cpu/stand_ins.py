"""What a server needs on a host without CUDA: stand-ins for packages of GPUs, and calls of torch that a CPU lacks.

`patches` says when each is used: in every process of such a server before ``import sglang``, and in no other process.
These stand-ins must not reach a trainer.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from multiprocessing.util import register_after_fork
from pathlib import Path
from typing import Any

import torch

from slime.processes import heartbeat
from slime.utils.device import open_bytes

_STAND_INS = ("triton", "torchvision", "sgl_kernel")
"""Packages that SGLang imports at its top but calls on GPUs only."""
_LOW_32_BITS = 0xFFFFFFFF
_torchvision_library: torch.library.Library | None = None


def stand_in_for_absent_packages() -> None:
    """Stands in for `triton`, `torchvision` and `sgl_kernel`, which SGLang imports at its top and calls on GPUs only.

    A second call does nothing.
    """
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    if not any(isinstance(finder, _StandInFinder) for finder in sys.meta_path):
        absent = frozenset(name for name in _STAND_INS if importlib.util.find_spec(name) is None)
        sys.meta_path.append(_StandInFinder(absent))


class _StandInType(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _StandIn(types.ModuleType):
    """A module whose capitalised names are empty classes, whose others are modules, and which decorates by identity."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any
        if name[0].isupper():
            value = _StandInType(
                name, (), {"__module__": self.__name__, "__init__": lambda self, *args, **kwargs: None}
            )
        else:
            value = importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())


_CONTENTS: dict[str, dict[str, Any]] = {
    "torchvision": {"__version__": "0.28.0"},
    "triton": {
        "__version__": "3.0.0",
        "cdiv": lambda a, b: -(a // -b),
        "next_power_of_2": lambda n: 1 << (n - 1).bit_length() if n > 0 else 1,
    },
}
"""What SGLang and transformers read of the stand-ins while they are imported."""


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(_CONTENTS.get(module.__name__, {}))


def has_torchvision() -> bool:
    """Whether torchvision is installed, which `stand_in_for_absent_packages` stands in for where it is not."""
    return _torchvision() is not None


def _torchvision() -> Path | None:
    place = importlib.util.find_spec("torchvision")
    return None if place is None or place.origin is None else Path(place.origin).parent  # a stand-in has no origin


def declare_torchvision_operators() -> None:
    """Declares operators that torchvision registers fakes for, where it is a wheel for CUDA beside a torch for CPUs and
    cannot load them.

    Where it can, it declares the operators itself, and twice would end the process.
    """
    package = _torchvision()
    assert package is not None
    try:
        for extension in package.glob("_C*.so"):
            torch.ops.load_library(str(extension))
            return
    except OSError:  # it wants libraries of CUDA
        pass
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    global _torchvision_library
    _torchvision_library = library  # the declarations last as long as this object


def synchronize_nothing() -> None:
    """Lets `/weights_checker` call `torch.cuda.synchronize`, which raises in a torch for CPUs."""
    torch.cuda.synchronize = _do_nothing


def pin_nothing() -> None:
    """Lets LoRA layers, and what keeps routes, ask torch for pinned memory, which raises in a torch for CPUs."""
    setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor)  # noqa: B010
    for name in ("tensor", "zeros"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))


def _without_pinning(make: Any) -> Any:
    @functools.wraps(make)
    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    return unpinned


def do_without_nccl() -> None:
    """Has engines of several ranks find no NCCL, though its library may be installed: they would ask for their GPUs."""
    communicator: Any = importlib.import_module("sglang.srt.distributed.device_communicators.pynccl")

    def absent(*_: Any) -> None:
        raise OSError("this host has no GPU")

    communicator.NCCLLibrary = absent


def keep_routes_of_each_step() -> None:
    """Copies a step's routes out of the buffer that the next step writes into, as copying them from a GPU does.

    What moves them to host memory leaves them where they are on a host without one, and looks at them a step later.
    """
    capturer: Any = importlib.import_module("sglang.srt.state_capturer.routed_experts").RoutedExpertsCapturer
    cut = capturer._get_local_slice
    capturer._get_local_slice = lambda self, *args, **kwargs: cut(self, *args, **kwargs).clone()


def allow_sampling_seeds() -> None:
    """Lets `--enable-deterministic-inference`, which `sampling_seed` needs, start with torch_native attention, and
    hashes seeds without Triton.

    The batch-invariant kernels that it would switch on are Triton too; torch_native attends one sequence at a time, or
    as `slime.backends.sglang.cpu.attention` has it: its results do not depend on the batch.
    """
    murmur: Any = importlib.import_module("sglang.kernels.ops.sampling.murmur_hash")
    batch_invariance: Any = importlib.import_module("sglang.srt.batch_invariant_ops")
    server_args: Any = importlib.import_module("sglang.srt.server_args")
    murmur.murmur_hash32 = murmur_hash32
    batch_invariance.enable_batch_invariant_mode = _do_nothing
    server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")


def attend_to_latents() -> None:
    """Lets torch_native attend to latent vectors, for whose keys and values it looks in a cache without them.

    So multi-latent attention does with the other deterministic backends; here it makes keys and values for prompts.
    """
    package = "sglang.srt.models.deepseek_common"
    registry: Any = importlib.import_module(f"{package}.attention_backend_handler").AttentionBackendRegistry
    methods: Any = importlib.import_module(f"{package}.attention_forward_methods.forward_methods").AttnForwardMethod
    server_args: Any = importlib.import_module("sglang.srt.server_args")
    registry.register("torch_native", lambda attention, batch: methods.MLA)
    server_args.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND.append("torch_native")


def leave_out_absent_experts() -> None:
    """Lets a rank compute with the experts that it has: -1 stands for the others among those chosen for a token."""
    native: Any = importlib.import_module("sglang.srt.layers.moe.fused_moe_native")
    forward = native.moe_forward_native

    def with_present(layer: Any, rows: torch.Tensor, chosen: Any, config: Any) -> torch.Tensor:
        row, place = (chosen.topk_ids >= 0).nonzero(as_tuple=True)
        if not len(row):
            return torch.zeros_like(rows)
        weights, ids = (values[row, place, None] for values in (chosen.topk_weights, chosen.topk_ids))
        outputs = forward(layer, rows[row], chosen._replace(topk_weights=weights, topk_ids=ids), config)
        return torch.zeros_like(rows).index_add_(0, row, outputs)

    native.moe_forward_native = with_present


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bit) of (seed low, seed high, position, column), as SGLang's Triton kernel computes it: of
    seeds (int64 or uint64) and positions [rows], and columns [columns], int64 [rows, columns] below 2**32."""
    # int64 products wrap modulo 2**64, so the low 32 bits that are kept after each step are exact.
    seed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.to(torch.int64)
    state = torch.zeros_like(seed)
    for block in (seed, seed >> 32, positions.to(torch.int64)):
        state = _mix(state, block & _LOW_32_BITS)
    state = _mix(state[:, None], col_indices.to(torch.int64)[None] & _LOW_32_BITS) ^ 16
    state = state ^ (state >> 16)
    state = (state * 0x85EBCA6B) & _LOW_32_BITS
    state = state ^ (state >> 13)
    state = (state * 0xC2B2AE35) & _LOW_32_BITS
    return state ^ (state >> 16)


def _mix(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = (block * 0xCC9E2D51) & _LOW_32_BITS
    block = ((block << 15) | (block >> 17)) & _LOW_32_BITS
    state = state ^ ((block * 0x1B873593) & _LOW_32_BITS)
    state = ((state << 13) | (state >> 19)) & _LOW_32_BITS
    return (state * 5 + 0xE6546B64) & _LOW_32_BITS


def open_memory_files() -> None:
    """Lets weights be pushed through memory that the trainer's process has open: what is read of a push may name the
    function that opens it."""
    unpickler: Any = importlib.import_module("sglang.srt.utils.common").SafeUnpickler
    find, ours = unpickler.find_class, (open_bytes.__module__, open_bytes.__name__)
    unpickler.find_class = lambda self, module, name: open_bytes if (module, name) == ours else find(self, module, name)


def fork_processes() -> None:
    """Forks a server's schedulers and its detokenizer from its first process, which has imported all that they need.

    Spawned, each imports SGLang again: eight seconds of a core. A fork takes one thread along: where the process has
    others than its heartbeat, which might hold locks, SGLang spawns as it does on GPUs, for CUDA cannot be forked.
    """
    engine: Any = importlib.import_module("sglang.srt.entrypoints.engine")
    configure = engine._set_envs_and_config

    def configure_and_fork(server_args: Any) -> None:
        configure(server_args)
        if _is_alone():
            multiprocessing.set_start_method("fork", force=True)
            register_after_fork(engine, _be_as_spawned)

    engine._set_envs_and_config = configure_and_fork


def _be_as_spawned(_: types.ModuleType) -> None:
    """In processes of `multiprocessing` alone: other forks become other programs."""
    if (heart := heartbeat.own()) is not None:
        heart.go_on_in_fork()
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # the handler is the first process's, which its children signal
    multiprocessing.set_start_method("spawn", force=True)  # this process will have threads


def _is_alone() -> bool:
    """Whether this process's threads, Python's and those of libraries, are the main one and its heartbeat."""
    beats = sum(thread.name == heartbeat.THREAD for thread in threading.enumerate())
    return len(os.listdir("/proc/self/task")) == 1 + beats
