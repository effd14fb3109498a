"""What is changed, from outside, of SGLang and its router as they are released: a record each, by moment.

`CPU_STAND_INS` and `EVERY_PROCESS` are carried out at import of `launch`, which every process of a server runs, unless
it is forked from one that has; `SERVER_PROCESS` by the server's own process alone, before it starts the others.
"""

from __future__ import annotations

import functools
import json
import os
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.backends.sglang import fixes, same_kernels, scheduler_beats
from slime.backends.sglang.cpu import attention, stand_ins
from slime.backends.sglang.loads import load_record
from slime.options.checks.determinism import engines_are_deterministic
from slime.options.flags.sglang import ROUTER_POLICY
from slime.processes.server_process import EQUAL_BITS_VARIABLE, FLOAT8_VARIABLE, SAME_KERNELS_VARIABLE, last_value
from slime.utils import device, patching
from slime.utils.patching import OR, Patch
from slime.utils.stores import RENDEZVOUS

_EVERY = "every process of a server"
_OWN = "the first process of a server"
_LORA_FLAGS = frozenset({"--enable-lora", "--lora-paths"})
_EXPERT_FLAGS = frozenset({"--ep-size", "--ep", "--expert-parallel-size"})
_EXPERT_COUNTS = frozenset({"num_experts", "num_local_experts", "n_routed_experts"})
"""What config.json calls the number of a layer's experts."""


@dataclass(frozen=True)
class ServerFacts:
    """What decides which patches a server needs."""

    cuda: bool = field(default_factory=lambda: device.is_cuda())
    torchvision: bool = field(default_factory=stand_ins.has_torchvision)
    """Whether it is installed."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """The model's config.json."""
    lora: bool = False
    """Whether its layers have adapters."""
    changes_adapters: bool = False
    """Whether adapters come and go while it runs."""
    splits_experts: bool = False
    returns_routes: bool = False
    sleeps: bool = False
    float8: bool = False
    """Whether it is pushed weights in float8."""
    same_kernels: bool = False
    """Whether trainers compute by its kernels."""
    equal_bits: bool = False
    """Whether the bits of a request may not depend on those beside it."""
    further_node: bool = False
    """Whether it is not the first server of an engine on several nodes."""

    @classmethod
    def of_command(cls, flags: Sequence[str], environment: Mapping[str, str] = os.environ) -> ServerFacts:
        """Those of the server that runs on this host with these flags."""
        return cls(
            model=_config(last_value(flags, "--model-path")),
            lora=not _LORA_FLAGS.isdisjoint(flags),
            changes_adapters="--enable-lora" in flags,
            splits_experts=not _EXPERT_FLAGS.isdisjoint(flags),
            returns_routes="--enable-return-routed-experts" in flags,
            sleeps="--enable-memory-saver" in flags,
            float8=FLOAT8_VARIABLE in environment,
            same_kernels=SAME_KERNELS_VARIABLE in environment,
            equal_bits=EQUAL_BITS_VARIABLE in environment,
            further_node=int(last_value(flags, "--node-rank") or 0) > 0,
        )

    @classmethod
    def of_run(cls, args: Namespace) -> ServerFacts:
        """Those of the first servers of a run's engines, were they on this host."""
        flags, cuda = args.sglang_cli, device.is_cuda()
        sleeps = args.colocate if args.offload_rollout is None else args.offload_rollout
        adapters = args.lora_sync == "adapter" or "--enable-lora" in flags
        return cls(
            cuda=cuda,
            model=_config(args.hf_checkpoint),
            lora=adapters or not _LORA_FLAGS.isdisjoint(flags),
            changes_adapters=adapters,
            splits_experts=not _EXPERT_FLAGS.isdisjoint(flags),
            returns_routes=args.use_rollout_routing_replay,
            sleeps=cuda and bool(sleeps),
            float8=args.pushes_float8,
            same_kernels=args.true_on_policy_mode,
            equal_bits=engines_are_deterministic(args),
        )


def _config(directory: str | None) -> dict[str, Any]:
    config = Path(directory, "config.json") if directory is not None else None
    return json.loads(config.read_text()) if config is not None and config.is_file() else {}


PROVEN, NEW = "==0.5.17", "==0.5.23"
"""The releases of the two columns (docs/install.md)."""
BOTH = f"{PROVEN}{OR}{NEW}"


def _sglang(
    name: str,
    where: str,
    goes: str,
    apply: Callable[..., Any],
    wanted: Callable[[ServerFacts], bool] = lambda _: True,
    versions: str = BOTH,
    gone: str = "",
) -> Patch[ServerFacts]:
    return Patch(name, "sglang", versions, where, goes, apply, wanted, gone)


def _on_cpu(
    name: str,
    goes: str,
    apply: Callable[..., Any],
    of: str = "",
    wanted: Callable[[ServerFacts], bool] = lambda _: True,
    versions: str = BOTH,
    gone: str = "",
) -> Patch[ServerFacts]:
    """Of the servers on hosts without CUDA, or those ``of`` them that it is wanted by."""
    return _sglang(
        name, f"{_EVERY}, on hosts without CUDA{of}", goes, apply, lambda s: not s.cuda and wanted(s), versions, gone
    )


CPU_STAND_INS: tuple[Patch[ServerFacts], ...] = (
    _on_cpu("stand_ins", "SGLang guards these imports.", stand_ins.stand_in_for_absent_packages),
    _on_cpu(
        "torchvision_operators",
        "torchvision is installed from the same index as torch.",
        stand_ins.declare_torchvision_operators,
        " that have torchvision",
        lambda server: server.torchvision,
    ),
    _on_cpu("nothing_to_synchronize", "`/weights_checker` does not call it there.", stand_ins.synchronize_nothing),
    _on_cpu(
        "nothing_to_pin",
        "LoRA layers, and what keeps routes, ask whether there is any.",
        stand_ins.pin_nothing,
        ", with LoRA layers or whose routes are replayed",
        lambda server: server.lora or server.returns_routes,
    ),
    _on_cpu(
        "routes_of_each_step",
        "SGLang copies what it captures of a step on CPUs, too.",
        stand_ins.keep_routes_of_each_step,
        ", whose routes are replayed",
        lambda server: server.returns_routes,
    ),
    _on_cpu(
        "one_query_at_a_time",
        "SGLang has a backend of attention for CPUs whose bits are the same for prompts and in decoding.",
        attention.attend_one_by_one,
        " of a run in true on-policy mode",
        lambda server: server.same_kernels,
    ),
    _on_cpu("memory_files", "SGLang opens them.", stand_ins.open_memory_files),
    _on_cpu("sampling_seeds", "SGLang allows torch_native there.", stand_ins.allow_sampling_seeds),
    _on_cpu(
        "latent_attention",
        "SGLang's `AttentionBackendRegistry` knows torch_native.",
        stand_ins.attend_to_latents,
        ", with a model of multi-latent attention",
        lambda server: "kv_lora_rank" in server.model,
    ),
    _on_cpu(
        "absent_experts",
        "SGLang's `moe_forward_native` does not take -1 for a place in a list.",
        stand_ins.leave_out_absent_experts,
        ", whose ranks have experts of their own",
        lambda server: server.splits_experts,
    ),
)


def _routers_of(model_type: str) -> Patch[ServerFacts]:
    route = functools.partial(fixes.route_by_present_weights, model_type)
    return _sglang(
        f"{model_type}_routers",
        f"{_EVERY} of a {model_type} model",
        "SGLang's routers follow their weights.",
        functools.update_wrapper(route, fixes.route_by_present_weights),
        lambda server: server.model.get("model_type") == model_type,
        PROVEN,
        NEW,
    )


EVERY_PROCESS: tuple[Patch[ServerFacts], ...] = (
    _sglang(
        "beating_schedulers", _EVERY, "SGLang tells whether an idle scheduler turns.", scheduler_beats.beat_in_loops
    ),
    _on_cpu("no_nccl", "SGLang does, whether its library is there or not.", stand_ins.do_without_nccl),
    _on_cpu(
        "requests_together",
        "SGLang's torch_native attention computes requests together.",
        attention.attend_together,
        " of a run that is not deterministic and a model without multi-latent attention",
        lambda server: not server.equal_bits and "kv_lora_rank" not in server.model,
    ),
    _sglang("no_megatron", _EVERY, "SGLang's dumper imports it when it dumps.", fixes.leave_out_megatron),
    _sglang("noted_loads", _EVERY, "SGLang tells which names and bytes a load has written.", load_record.record_loads),
    *map(_routers_of, fixes.FLOAT32_ROUTERS),
    _sglang(
        "experts_in_turn",
        f"{_EVERY} of a model with experts",
        "SGLang looks names up.",
        fixes.find_experts_in_turn,
        lambda server: not _EXPERT_COUNTS.isdisjoint(server.model),
    ),
    _sglang(
        "roundings_of_trainers",
        f"{_EVERY} of a run in true on-policy mode, on hosts with CUDA",
        "SGLang's `--rl-on-policy-target` has one for plain layers of torch.",
        same_kernels.round_as_trainers,
        lambda server: server.cuda and server.same_kernels,
        PROVEN,
    ),
    _sglang(
        "sleep_together",
        f"{_EVERY} that gives its GPU memory back while trainers train",
        "SGLang waits for the ranks after the weights are gone, not before.",
        fixes.sleep_when_all_do,
        lambda server: server.sleeps,
        PROVEN,
    ),
    _sglang(
        "one_pass_sampling",
        f"{_EVERY} of a run that is not deterministic, on hosts with CUDA",
        "SGLang's sampler takes about as long.",
        fixes.sample_in_one_pass,
        lambda server: server.cuda and not server.equal_bits and not server.same_kernels,
        PROVEN,
    ),
    RENDEZVOUS,
    Patch(
        "model_configs",
        "transformers",
        f"==5.12.1{OR}==5.19.0",
        f"{_EVERY} of a mimo model",
        "SGLang or transformers does.",
        fixes.register_configs,
        lambda server: server.model.get("model_type") == "mimo",
    ),
    _sglang(
        "cache_scales",
        f"{_EVERY} that is pushed weights in float8",
        "SGLang brings back every parameter.",
        fixes.keep_cache_scales,
        lambda server: server.float8,
        PROVEN,
    ),
)

SERVER_PROCESS: tuple[Patch[ServerFacts], ...] = (
    _sglang(
        "forked_processes",
        f"{_OWN}, on hosts without CUDA",
        "SGLang forks on hosts without CUDA.",
        stand_ins.fork_processes,
        lambda server: not server.cuda,
    ),
    _sglang("keys_in_answers", _OWN, "SGLang does.", fixes.strike_keys_from_answers),
    _sglang(
        "unloaded_adapters",
        f"{_OWN} that is pushed adapters",
        "`TokenizerManager.generate_request` of SGLang releases the adapter of every request that it counts.",
        fixes.unload_adapters_at_once,
        lambda server: server.changes_adapters,
    ),
    _sglang(
        "carried_fields",
        f"{_OWN} whose routes are replayed",
        "sglang-router passes `return_routed_experts` and `routed_experts_start_len` on.",
        fixes.take_out_carried_fields,
        lambda server: server.returns_routes,
    ),
    _sglang(
        "schedulers_of_further_nodes",
        f"{_OWN} on each node but the first of an engine",
        "SGLang's `SubprocessWatchdog` runs on every node.",
        fixes.end_with_any_scheduler,
        lambda server: server.further_node,
    ),
)

ROUTER = (ROUTER_POLICY,)


def install() -> None:
    """Make ``import sglang`` work on a host without CUDA, in a process that serves nothing; nothing on one with."""
    patching.apply(CPU_STAND_INS, ServerFacts())
