"""What unmodified SGLang lacks, put right from outside.

Written against sglang 0.5.17. `install` must run in every process of a server before ``import sglang``, and in no other
process: its stand-ins for absent packages must not reach a trainer.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import time
import types
from collections.abc import Iterator, Sequence
from operator import length_hint
from pathlib import Path
from typing import Any

import psutil
import torch

_STAND_INS = ("triton", "torchvision", "sgl_kernel")
"""Packages that SGLang imports at its top but calls on GPUs only. Goes when SGLang guards these imports."""

_LORA_FLAGS = frozenset({"--enable-lora", "--lora-paths"})
_EXPERT_FLAGS = frozenset({"--ep-size", "--ep", "--expert-parallel-size"})
_FLOAT32_ROUTERS = {"glm4_moe": "Glm4MoeGate", "glm4_moe_lite": "Glm4MoeLiteGate"}
"""By ``model_type``, which is their module's name too."""
_EXPERT_COUNTS = frozenset({"num_experts", "num_local_experts", "n_routed_experts"})
"""What config.json calls the number of a layer's experts."""
_NEAR = 16
"""Items of a list that are sooner passed than the list is turned."""
_LOW_32_BITS = 0xFFFFFFFF
_CHILD_POLL_S = 0.2
_installed = False
_torchvision_library: torch.library.Library | None = None


def install(flags: Sequence[str] = ()) -> None:
    """Make ``import sglang`` and a server on CPU work; a second call does nothing, nor does one on a CUDA host.

    Args:
        flags: of the server, which say which model it has, and whether LoRA layers.
    """
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    places = {name: importlib.util.find_spec(name) for name in _STAND_INS}
    sys.meta_path.append(_StandInFinder(frozenset(name for name, place in places.items() if place is None)))
    if (torchvision := places["torchvision"]) is not None:
        _declare_torchvision_operators(Path(str(torchvision.origin)).parent)
    _synchronize_nothing()
    if not _LORA_FLAGS.isdisjoint(flags):
        _pin_nothing()
    _allow_sampling_seeds()
    if "kv_lora_rank" in _model_config(flags):
        _attend_to_latents()
    if not _EXPERT_FLAGS.isdisjoint(flags):
        _leave_out_absent_experts()


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


def _ceil_div(a: int, b: int) -> int:
    return -(a // -b)


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 0 else 1


_CONTENTS: dict[str, dict[str, Any]] = {
    "torchvision": {"__version__": "0.28.0"},
    "triton": {"__version__": "3.0.0", "cdiv": _ceil_div, "next_power_of_2": _next_power_of_2},
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


def _declare_torchvision_operators(package: Path) -> None:
    """Declare what torchvision registers fakes for, where it cannot load it: a CUDA wheel beside a CPU build of torch.

    Where it can, it declares the operators itself, and twice would end the process. Goes when torchvision is installed
    from the same index as torch.
    """
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


def _synchronize_nothing() -> None:
    """``/weights_checker`` calls torch.cuda.synchronize, which raises in a CPU build. Goes when it does not."""
    torch.cuda.synchronize = _do_nothing


def _pin_nothing() -> None:
    """LoRA layers ask for pinned memory, which raises in a CPU build. Goes when they ask whether there is any."""
    setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor)  # noqa: B010
    for name in ("tensor", "zeros"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))


def _without_pinning(make: Any) -> Any:
    @functools.wraps(make)
    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    return unpinned


def _allow_sampling_seeds() -> None:
    """Let ``--enable-deterministic-inference`` (which ``sampling_seed`` needs) start on CPU.

    SGLang refuses it for the CPU attention backend and hashes the seed in a Triton kernel. The batch-invariant kernels
    that it would switch on are Triton too; torch_native attends one sequence at a time and its results do not depend
    on the batch. Goes when SGLang allows torch_native there.
    """
    murmur: Any = importlib.import_module("sglang.kernels.ops.sampling.murmur_hash")
    batch_invariance: Any = importlib.import_module("sglang.srt.batch_invariant_ops")
    server_args: Any = importlib.import_module("sglang.srt.server_args")
    murmur.murmur_hash32 = murmur_hash32
    batch_invariance.enable_batch_invariant_mode = _do_nothing
    server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")


def _model_config(flags: Sequence[str]) -> dict[str, Any]:
    """Of a server's model, config.json; empty where the flags name no directory with one."""
    places = [place for place, flag in enumerate(flags) if flag == "--model-path"]
    config = Path(flags[places[-1] + 1], "config.json") if places else None
    return json.loads(config.read_text()) if config is not None and config.is_file() else {}


def _attend_to_latents() -> None:
    """Let multi-latent attention attend to the latent vectors, as it does with the other deterministic backends.

    For prompts it would make keys and values of them, which torch_native then looks for in the cache, where the latents
    are. Goes when ``AttentionBackendRegistry`` knows torch_native.
    """
    package = "sglang.srt.models.deepseek_common"
    registry: Any = importlib.import_module(f"{package}.attention_backend_handler").AttentionBackendRegistry
    methods: Any = importlib.import_module(f"{package}.attention_forward_methods.forward_methods").AttnForwardMethod
    server_args: Any = importlib.import_module("sglang.srt.server_args")
    registry.register("torch_native", lambda attention, batch: methods.MLA)
    server_args.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND.append("torch_native")


def _leave_out_absent_experts() -> None:
    """Let a rank compute with the experts that it has: -1 stands for the others among those chosen for a token.

    Goes when ``moe_forward_native`` does not take -1 for a place in a list.
    """
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
    """MurmurHash3 (x86, 32 bit) of (seed low, seed high, position, column), as SGLang's Triton kernel computes it.

    Args:
        seed: int64 or uint64 [rows].
        positions: integers [rows].
        col_indices: integers [columns].

    Returns:
        int64 [rows, columns] with values below 2**32.
    """
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


def end_with_any_scheduler() -> None:
    """Have the server of an engine's further node end when any of its schedulers does; in the server's process.

    SGLang waits there for one after the other: when one is killed, the others hang in collectives for minutes. After
    that it goes on, without what it needs, to serve HTTP. Goes when its ``SubprocessWatchdog`` runs on every node.
    """
    engine: Any = importlib.import_module("sglang.srt.entrypoints.engine").Engine
    launch = engine._launch_scheduler_processes

    def launch_watched(*args: Any, **options: Any) -> Any:
        result, processes = launch(*args, **options)
        result.block_until_scheduler_exits = lambda: end_with_any_of(result.all_child_pids)
        return result, processes

    engine._launch_scheduler_processes = launch_watched


def end_with_any_of(pids: Sequence[int]) -> None:
    """Wait until one of these processes has ended, and end this one by the signal at which SGLang ends its tree."""
    processes = [psutil.Process(pid) for pid in pids]
    while all(map(_lives, processes)):
        time.sleep(_CHILD_POLL_S)
    ended = ", ".join(str(process.pid) for process in processes if not _lives(process))
    print(f"a scheduler has ended (process {ended}), and so does this server", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGQUIT)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def unload_adapters_at_once() -> None:
    """Let ``/unload_lora_adapter`` not wait until no request uses the adapter; on GPUs too, in the server's process.

    A request that is aborted, or refused, after it was counted and before it was sent stays counted: the call would
    never return, nor any later one. An adapter is only unloaded while generation is paused and the scheduler is idle.
    Goes when ``TokenizerManager.generate_request`` of SGLang releases the adapter of every request that it counts.
    """
    registry: Any = importlib.import_module("sglang.srt.lora.lora_registry").LoRARegistry

    async def forget(self: Any, lora_id: str) -> None:
        self._counters.pop(lora_id, None)

    registry.wait_for_unload = forget


def keep_cache_scales() -> None:
    """Let the scales of a float8 model's cached keys and values outlive sleep; in every process of a server.

    SGLang makes them parameters, sets those that no checkpoint has to 1 after the first load, and brings only buffers
    back after sleep. Zeros in their place fail the next load from disk, and latent attention divides by them. Goes when
    SGLang brings back every parameter.
    """
    updater: Any = importlib.import_module("sglang.srt.managers.scheduler_components.weight_updater")

    def kept(model: torch.nn.Module) -> list[torch.Tensor]:
        scales = (p for p in model.parameters() if getattr(p, "_skip_weight_check", False))
        return [*model.buffers(), *scales]

    def bring_back(model: torch.nn.Module, values: list[torch.Tensor]) -> None:
        with torch.inference_mode():
            for tensor, value in zip(kept(model), values, strict=True):
                tensor.copy_(value)

    updater._export_static_state = lambda model: [tensor.detach().clone() for tensor in kept(model)]
    updater._import_static_state = bring_back


def sleep_when_all_do(flags: Sequence[str]) -> None:
    """Let an engine say that it has given its memory back when its tensor-parallel ranks have; in all its processes.

    The first one answers, and SGLang waits for the others before the weights go, not after. Goes when it waits after.
    slime's engines have no ranks but those. Of the server's flags, one says whether it sleeps at all.
    """
    if "--enable-memory-saver" not in flags:
        return
    module: Any = importlib.import_module("sglang.srt.managers.scheduler_components.weight_updater")
    release = module.SchedulerWeightUpdaterManager.release_memory_occupation

    def release_together(updater: Any, request: Any) -> Any:
        answer = release(updater, request)
        torch.distributed.barrier(updater.tp_cpu_group)
        return answer

    module.SchedulerWeightUpdaterManager.release_memory_occupation = release_together


def route_by_present_weights(flags: Sequence[str]) -> None:
    """Let GLM's routers compute with the weights that they have now; in every process of a server.

    SGLang keeps a float32 copy from the first forward pass, on GPUs from the capture of CUDA graphs. An engine would
    route for ever by the weights that it started with, whatever is pushed, and ``/weights_checker`` leaves the copy
    out. Goes when SGLang's routers follow their weights.

    Args:
        flags: of the server, which say which model it has.
    """
    model_type = _model_config(flags).get("model_type")
    if model_type in _FLOAT32_ROUTERS:
        module: Any = importlib.import_module(f"sglang.srt.models.{model_type}")
        getattr(module, _FLOAT32_ROUTERS[model_type]).forward = _float32_logits


def _float32_logits(router: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """float32 [tokens, experts]."""
    return torch.nn.functional.linear(hidden_states.float(), router.weight.float())


def find_experts_in_turn(flags: Sequence[str]) -> None:
    """Let models soon find where an expert's weight belongs; in every process of a server.

    For each weight, SGLang goes through three entries for each of a layer's experts, to the one whose words are in the
    weight's name: a quarter of the host time that loading what is pushed takes. Weights come in the order of experts,
    so the entry is near the last one that was found. Goes when SGLang looks names up.

    Args:
        flags: of the server, which say which model it has.
    """
    if _EXPERT_COUNTS.isdisjoint(_model_config(flags)):
        return
    layer: Any = importlib.import_module("sglang.srt.layers.moe.fused_moe_triton.layer")
    make = layer.FusedMoE.make_expert_params_mapping
    layer.FusedMoE.make_expert_params_mapping = staticmethod(lambda *args, **kwargs: RecentFirst(make(*args, **kwargs)))


class RecentFirst(list[Any]):
    """A list that turns, before a loop, so that the item at which the last loop was left comes first."""

    _loop: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        passed = len(self) - length_hint(self._loop) - 1
        if _NEAR < passed < len(self) - 1:  # a loop that was not left passes all
            self[:] = self[passed:] + self[:passed]
        self._loop = super().__iter__()
        return self._loop
