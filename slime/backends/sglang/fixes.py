"""What servers need of SGLang on every host: functions that the records of `patches` carry out, each for one defect.

SGLang is imported when they are called.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from operator import length_hint
from typing import Any

import torch
from torch.nn.functional import linear

from slime.backends.sglang import sampling
from slime.processes.kernel import with_id
from slime.processes.server_process import server_secrets
from slime.utils import patching
from slime.utils.http_client import CARRIED
from slime.utils.http_utils import redact

FLOAT32_ROUTERS = {"glm4_moe": "Glm4MoeGate", "glm4_moe_lite": "Glm4MoeLiteGate"}
"""By ``model_type``, which is their module's name too."""
_NEAR = 16
"""Items of a list that are sooner passed than the list is turned."""
_CHILD_POLL_S = 0.2
_OFTEN_ASKED = ("/generate", "/health")
_COPY = "serve a copy in bfloat16, which tools/convert_fp8_to_bf16.py makes"


def is_worth_a_line(record: logging.LogRecord) -> bool:
    """Whether uvicorn's log is to have a request: not those of which there are thousands a rollout, and that were
    answered as they should be."""
    match record.args:
        case (_, _, str(path), _, int(status)):
            return status != HTTPStatus.OK or path.partition("?")[0] not in _OFTEN_ASKED
    return True


def strike_keys_from_answers() -> None:
    """Strikes keys from what a server tells of itself, as by `/server_info`.

    The key for generation opens that, and it would give the other one away.
    """
    http_server: Any = importlib.import_module("sglang.srt.entrypoints.http_server")
    secrets, plain = server_secrets(), http_server.msgspec_to_builtins

    def struck(value: Any) -> Any:
        if isinstance(value, str):
            return redact(value, secrets)
        if isinstance(value, dict):
            return {name: struck(each) for name, each in value.items()}
        return [struck(each) for each in value] if isinstance(value, list | tuple) else value

    http_server.msgspec_to_builtins = lambda value: struck(plain(value))


def end_with_any_scheduler() -> None:
    """Ends the server with any of its schedulers, for which it would wait one after the other.

    When one is killed, the others hang in collectives for minutes. After that the server of a further node goes on,
    without what it needs, to serve HTTP.
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
    while not (ended := [pid for pid in pids if with_id(pid) is None]):
        time.sleep(_CHILD_POLL_S)
    who = ", ".join(map(str, ended))
    print(f"a scheduler has ended (process {who}), and so does this server", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGQUIT)


def unload_adapters_at_once() -> None:
    """Has `/unload_lora_adapter` return though a request that was aborted is still counted as using the adapter.

    One that is aborted, or refused, after it was counted and before it was sent stays counted: the call would never
    return, nor any later one. An adapter is only unloaded while generation is paused and the scheduler is idle.
    """
    registry: Any = importlib.import_module("sglang.srt.lora.lora_registry").LoRARegistry

    async def forget(self: Any, lora_id: str) -> None:
        self._counters.pop(lora_id, None)

    registry.wait_for_unload = forget


def take_out_carried_fields() -> None:
    """Has requests take what asks for routes out of `session_params`, the field that the router passes on."""
    request: Any = importlib.import_module("sglang.srt.managers.io_struct").GenerateReqInput
    normalize = request.normalize_batch_and_arguments

    def normalize_all(self: Any) -> None:
        carrier = dict(self.session_params or {})
        for name in CARRIED:
            if name in carrier:
                setattr(self, name, carrier.pop(name))
        self.session_params = carrier or None
        normalize(self)

    request.normalize_batch_and_arguments = normalize_all


def keep_cache_scales() -> None:
    """Has the scales of cached keys and values outlive sleep, of which only buffers do.

    SGLang makes them parameters, and sets those that no checkpoint has to 1 after the first load. Zeros in their place
    fail the next load from disk, and latent attention divides by them.
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


def sleep_when_all_do() -> None:
    """Has an engine say that its memory is given back when that of all its tensor-parallel ranks is.

    The first one answers, and SGLang waits for the others before the weights go, not after. slime's engines have no
    ranks but those.
    """
    module: Any = importlib.import_module("sglang.srt.managers.scheduler_components.weight_updater")
    release = module.SchedulerWeightUpdaterManager.release_memory_occupation

    def release_together(updater: Any, request: Any) -> Any:
        answer = release(updater, request)
        torch.distributed.barrier(updater.tp_cpu_group)
        return answer

    module.SchedulerWeightUpdaterManager.release_memory_occupation = release_together


def route_by_present_weights(model_type: str) -> None:
    """Has routers compute with the weights that they have now, not with a copy of those of the first pass, which no
    push reaches.

    On GPUs the float32 copy is of the capture of CUDA graphs, and ``/weights_checker`` leaves it out.
    """
    module: Any = importlib.import_module(f"sglang.srt.models.{model_type}")
    router: Any = getattr(module, FLOAT32_ROUTERS[model_type])
    router.forward = lambda self, hidden_states: linear(hidden_states.float(), self.weight.float())


def find_experts_in_turn() -> None:
    """Begins to look for an expert's weight where the last one was found, not at the first expert.

    For each weight, SGLang goes through three entries for each of a layer's experts, to the one whose words are in the
    weight's name: a quarter of the host time that loading what is pushed takes. Weights come in the order of experts.
    """
    layer: Any = importlib.import_module("sglang.srt.layers.moe.fused_moe_triton.layer")
    make = layer.FusedMoE.make_expert_params_mapping
    layer.FusedMoE.make_expert_params_mapping = staticmethod(lambda *args, **kwargs: RecentFirst(make(*args, **kwargs)))


def leave_out_megatron() -> None:
    """Has SGLang's dumper of tensors, which every scheduler imports, not import Megatron, which is here for trainers: a
    second or more of each start, and 150 MB of a process that has nothing of Megatron's to dump."""
    with patching.hidden("megatron"):
        importlib.import_module("sglang.srt.debug_utils.dumper")


def sample_in_one_pass() -> None:
    """Draws tokens, and takes their log-probs, in one pass over the logits, in the place of ten: a seventh of what a
    token of 256 requests of a small model takes. By SGLang's registry of samplers."""
    from slime.backends.sglang.sampling_kernel import sample  # it needs Triton

    sampling.register(sample)


class RecentFirst(list[Any]):
    """A list that turns, before a loop, so that the item at which the last loop was left comes first."""

    _loop: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        passed = len(self) - length_hint(self._loop) - 1
        if _NEAR < passed < len(self) - 1:  # a loop that was not left passes all
            self[:] = self[passed:] + self[:passed]
        self._loop = super().__iter__()
        return self._loop


def refuse_other_layouts(server_args: Any) -> None:
    """End with one line where pushed float8 weights would not be what the server of SGLang's args computes with.

    On a Hopper or Ada GPU a layer keeps values and scales as they were loaded, and its own loaders take them again at
    any time. Elsewhere SGLang 0.5.17 makes another layout of them, once, after the first load; a push would then not
    fit, or land in the wrong places. Goes when SGLang loads into such layers again.
    """
    problem = _problem(server_args)
    if problem is not None:
        raise SystemExit(f"--hf-checkpoint is in float8, and its weights are pushed: {problem}")


def _problem(server_args: Any) -> str | None:
    from sglang.srt.layers.deep_gemm_wrapper.configurer import DEEPGEMM_SCALE_UE8M0
    from sglang.srt.layers.quantization.fp8_utils import can_auto_enable_marlin_fp8
    from sglang.srt.utils import get_bool_env_var

    if server_args.device == "cpu":
        return f"SGLang on a CPU packs them for AMX as it loads them; {_COPY}"
    if get_bool_env_var("SGLANG_FORCE_FP8_MARLIN") or can_auto_enable_marlin_fp8():
        return f"SGLang packs them for Marlin on GPUs before Ada, and with SGLANG_FORCE_FP8_MARLIN; {_COPY}"
    backend, experts = server_args.moe_runner_backend, server_args.moe_a2a_backend
    if backend == "hpc_ops" or experts == "megamoe":
        return "SGLang's experts of hpc_ops and megamoe have scales of their own: drop these flags"
    if not DEEPGEMM_SCALE_UE8M0:
        return None
    why = "DeepGEMM on Blackwell makes powers of two of their scales, once:"
    if server_args.fp8_gemm_runner_backend in ("auto", "deep_gemm"):
        return f"{why} add --sglang-fp8-gemm-backend triton"
    if backend == "deep_gemm" or (backend == "auto" and experts in ("deepep", "mooncake", "nixl")):
        return f"{why} add --sglang-moe-runner-backend triton"
    return None


def register_configs() -> None:
    """Has `AutoConfig` read the config of `mimo`, of which SGLang has the model's class."""
    from transformers import CONFIG_MAPPING, AutoConfig

    from slime.files.hf_configs import MiMoConfig

    if MiMoConfig.model_type not in CONFIG_MAPPING:
        AutoConfig.register(MiMoConfig.model_type, MiMoConfig)
