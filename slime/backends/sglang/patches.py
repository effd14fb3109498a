"""What is changed, from outside, of SGLang and its router as they are released: a record each, by moment.

`CPU_STAND_INS` and `EVERY_PROCESS` are carried out at import of `launch`, which every process of a server runs;
`SERVER_PROCESS` by the server's own process alone, before it starts the others.
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.backends.sglang import cpu_stand_ins, fixes
from slime.backends.sglang.process import FLOAT8_VARIABLE
from slime.options.sglang import ROUTER_POLICY
from slime.utils import device, patching
from slime.utils.patching import Patch
from slime.utils.stores import RENDEZVOUS

_SGLANG = "sglang"
_SEEN = "==0.5.17"
_CPU = "every process of a server, on hosts without CUDA"
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
    torchvision: bool = field(default_factory=cpu_stand_ins.has_torchvision)
    """Whether it is installed."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """The model's config.json."""
    lora: bool = False
    """Whether its layers have adapters."""
    changes_adapters: bool = False
    """Whether adapters come and go while it runs."""
    splits_experts: bool = False
    sleeps: bool = False
    float8: bool = False
    """Whether it is pushed weights in float8."""
    further_node: bool = False
    """Whether it is not the first server of an engine on several nodes."""

    @classmethod
    def of_command(cls, flags: Sequence[str], environment: Mapping[str, str] = os.environ) -> ServerFacts:
        """Those of the server that runs on this host with these flags."""
        return cls(
            model=_config(_last(flags, "--model-path")),
            lora=not _LORA_FLAGS.isdisjoint(flags),
            changes_adapters="--enable-lora" in flags,
            splits_experts=not _EXPERT_FLAGS.isdisjoint(flags),
            sleeps="--enable-memory-saver" in flags,
            float8=FLOAT8_VARIABLE in environment,
            further_node=int(_last(flags, "--node-rank") or 0) > 0,
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
            sleeps=cuda and bool(sleeps),
            float8=args.pushes_float8,
        )


def _last(flags: Sequence[str], name: str) -> str | None:
    """The word after the last flag of this name."""
    places = [place for place, flag in enumerate(flags) if flag == name]
    return flags[places[-1] + 1] if places else None


def _config(directory: str | None) -> dict[str, Any]:
    """A model's config.json; empty where there is none."""
    config = Path(directory, "config.json") if directory is not None else None
    return json.loads(config.read_text()) if config is not None and config.is_file() else {}


def _always(_: object) -> bool:
    return True


CPU_STAND_INS: tuple[Patch[ServerFacts], ...] = (
    Patch(
        "stand_ins", _SGLANG, _SEEN, _CPU,
        "Stands in for `triton`, `torchvision` and `sgl_kernel`, which SGLang imports at its top and calls on "
        "GPUs only.",
        "SGLang guards these imports.",
        wanted=lambda server: not server.cuda,
        apply=cpu_stand_ins.stand_in_for_absent_packages,
    ),
    Patch(
        "torchvision_operators", _SGLANG, _SEEN, _CPU + " that have torchvision",
        "Declares operators that torchvision registers fakes for, where it is a wheel for CUDA beside a torch for CPUs "
        "and cannot load them.",
        "torchvision is installed from the same index as torch.",
        wanted=lambda server: not server.cuda and server.torchvision,
        apply=cpu_stand_ins.declare_torchvision_operators,
    ),
    Patch(
        "nothing_to_synchronize", _SGLANG, _SEEN, _CPU,
        "Lets `/weights_checker` call `torch.cuda.synchronize`, which raises in a torch for CPUs.",
        "`/weights_checker` does not call it there.",
        wanted=lambda server: not server.cuda,
        apply=cpu_stand_ins.synchronize_nothing,
    ),
    Patch(
        "nothing_to_pin", _SGLANG, _SEEN, _CPU + ", with LoRA layers",
        "Lets LoRA layers ask torch for pinned memory, which raises in a torch for CPUs.",
        "LoRA layers ask whether there is any.",
        wanted=lambda server: not server.cuda and server.lora,
        apply=cpu_stand_ins.pin_nothing,
    ),
    Patch(
        "sampling_seeds", _SGLANG, _SEEN, _CPU,
        "Lets `--enable-deterministic-inference`, which `sampling_seed` needs, start with torch_native attention, and "
        "hashes seeds without Triton.",
        "SGLang allows torch_native there.",
        wanted=lambda server: not server.cuda,
        apply=cpu_stand_ins.allow_sampling_seeds,
    ),
    Patch(
        "latent_attention", _SGLANG, _SEEN, _CPU + ", with a model of multi-latent attention",
        "Lets torch_native attend to latent vectors, for whose keys and values it looks in a cache without them.",
        "SGLang's `AttentionBackendRegistry` knows torch_native.",
        wanted=lambda server: not server.cuda and "kv_lora_rank" in server.model,
        apply=cpu_stand_ins.attend_to_latents,
    ),
    Patch(
        "absent_experts", _SGLANG, _SEEN, _CPU + ", whose ranks have experts of their own",
        "Lets a rank compute with the experts that it has: -1 stands for the others among those chosen for a token.",
        "SGLang's `moe_forward_native` does not take -1 for a place in a list.",
        wanted=lambda server: not server.cuda and server.splits_experts,
        apply=cpu_stand_ins.leave_out_absent_experts,
    ),
)  # fmt: skip


def _register_configs() -> None:
    # transformers asks for packages that `CPU_STAND_INS` stand in for.
    from slime.backends.sglang import configs

    configs.register()


def _routers_of(model_type: str) -> Patch[ServerFacts]:
    return Patch(
        f"{model_type}_routers", _SGLANG, _SEEN, f"{_EVERY} of a {model_type} model",
        "Has routers compute with the weights that they have now, not with a copy of those of the first pass, which "
        "no push reaches.",
        "SGLang's routers follow their weights.",
        wanted=lambda server: server.model.get("model_type") == model_type,
        apply=lambda: fixes.route_by_present_weights(model_type),
    )  # fmt: skip


EVERY_PROCESS: tuple[Patch[ServerFacts], ...] = (
    *map(_routers_of, fixes.FLOAT32_ROUTERS),
    Patch(
        "experts_in_turn", _SGLANG, _SEEN, f"{_EVERY} of a model with experts",
        "Begins to look for an expert's weight where the last one was found, not at the first expert.",
        "SGLang looks names up.",
        wanted=lambda server: not _EXPERT_COUNTS.isdisjoint(server.model),
        apply=fixes.find_experts_in_turn,
    ),
    Patch(
        "sleep_together", _SGLANG, _SEEN, f"{_EVERY} that gives its GPU memory back while trainers train",
        "Has an engine say that its memory is given back when that of all its tensor-parallel ranks is.",
        "SGLang waits for the ranks after the weights are gone, not before.",
        wanted=lambda server: server.sleeps,
        apply=fixes.sleep_when_all_do,
    ),
    RENDEZVOUS,
    Patch(
        "model_configs", "transformers", "==5.12.1", f"{_EVERY} of a mimo model",
        "Has `AutoConfig` read the config of `mimo`, of which SGLang has the model's class.",
        "SGLang or transformers does.",
        wanted=lambda server: server.model.get("model_type") == "mimo",
        apply=_register_configs,
    ),
    Patch(
        "cache_scales", _SGLANG, _SEEN, f"{_EVERY} that is pushed weights in float8",
        "Has the scales of cached keys and values outlive sleep, of which only buffers do.",
        "SGLang brings back every parameter.",
        wanted=lambda server: server.float8,
        apply=fixes.keep_cache_scales,
    ),
)  # fmt: skip

SERVER_PROCESS: tuple[Patch[ServerFacts], ...] = (
    Patch(
        "keys_in_answers", _SGLANG, _SEEN, _OWN,
        "Strikes keys from what a server tells of itself, as by `/server_info`.",
        "SGLang does.",
        wanted=_always,
        apply=fixes.strike_keys_from_answers,
    ),
    Patch(
        "unloaded_adapters", _SGLANG, _SEEN, f"{_OWN} that is pushed adapters",
        "Has `/unload_lora_adapter` return though a request that was aborted is still counted as using the adapter.",
        "`TokenizerManager.generate_request` of SGLang releases the adapter of every request that it counts.",
        wanted=lambda server: server.changes_adapters,
        apply=fixes.unload_adapters_at_once,
    ),
    Patch(
        "schedulers_of_further_nodes", _SGLANG, _SEEN, f"{_OWN} on each node but the first of an engine",
        "Ends the server with any of its schedulers, for which it would wait one after the other.",
        "SGLang's `SubprocessWatchdog` runs on every node.",
        wanted=lambda server: server.further_node,
        apply=fixes.end_with_any_scheduler,
    ),
)  # fmt: skip


ROUTER = (ROUTER_POLICY,)


def install(server: ServerFacts | None = None) -> None:
    """Make ``import sglang`` work on a host without CUDA; does nothing on one with.

    Args:
        server: what is known of the server that this process is of, if it is of one.
    """
    patching.apply(CPU_STAND_INS, server or ServerFacts())
