"""Low-rank adapters in place of all weights."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slime.files.checkpoints import same_place
from slime.options.errors import OptionError
from slime.options.flags.schema import flag_named, option
from slime.options.rules import Rule, broken, check

_OURS = "slime.rollout."
_OWN_GENERATION = ("custom_generate_function_path", "rollout_function_path", "eval_function_path")
_MLP = frozenset({"gate_proj", "up_proj", "gate_up_proj", "down_proj"})


@dataclass
class LoraOptions:
    """Low-rank adapters (LoRA)."""

    lora_rank: int | None = option(
        None, "Train adapters of this rank and freeze the model, which then is the reference model too.", at_least=1
    )
    lora_alpha: float | None = option(
        None, "What adapters add is scaled by alpha / rank; default twice --lora-rank.", above=0
    )
    lora_target_modules: list[str] | None = option(
        None, "Layers with adapters, by the last parts of their Hugging Face names; default all-linear."
    )
    save_lora: str | None = option(
        None, "Directory for the adapters in PEFT's format, written when a checkpoint is; {rollout_id} is filled in."
    )
    lora_sync: Literal["merged", "adapter", "auto"] = option(
        "merged",
        "What a push carries. merged: all weights, with the adapters added. adapter: only the adapters, for "
        "SGLang's LoRA layers. auto: adapter if the engines can take them, else merged.",
    )


RULES = (
    Rule("lora_alpha lora_target_modules save_lora lora_sync!=merged", "needs", "lora_rank"),
    Rule("moe_shared_expert_overlap", "cannot be used with", "lora_rank", ": drop it", "placement!=rollout_only"),
    Rule("moe_router_bias_update_rate", "changes what", "lora_rank", " freezes: drop it", "placement!=rollout_only"),
)


def described(rank: int, alpha: float, targets: Sequence[str]) -> dict[str, Any]:
    """What a checkpoint says of its adapters."""
    return {"rank": rank, "alpha": alpha, "target_modules": sorted(targets)}


Modules = Callable[[Collection[str]], Collection[str]]
"""Target modules as a user names them -> every module of the model that they stand for."""


def check_adapters(
    directory: str | Path, saved: dict[str, Any] | None, own: dict[str, Any] | None, modules: Modules
) -> None:
    """Compare a checkpoint's adapters with the run's; None is none. OptionError names the flags that differ."""
    if saved == own:
        return
    if saved is None:
        raise OptionError(
            f"{directory} holds a whole model, and this run trains adapters: start them from it by --ref-load, without "
            "--load"
        )
    differing = {name: value for name, value in saved.items() if own is None or value != own[name]}
    targets = differing.get("target_modules")
    if own is not None and targets is not None and set(modules(targets)) == set(modules(own["target_modules"])):
        del differing["target_modules"]
    if not differing:
        return
    flags = " ".join(
        f"{flag_named(f'lora_{name}')} {' '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in differing.items()
    )
    raise OptionError(f"{directory} holds {'other ' if own else ''}adapters: go on with {flags}")


def check_base(directory: str | Path, saved: Mapping[str, str] | None, own: Mapping[str, str] | None) -> None:
    """Compare the bases of adapters, each the ``sha256`` of its values and its ``source``; OptionError if they differ.

    None where there are no adapters.
    """
    if saved is not None and own is not None and saved["sha256"] != own["sha256"]:
        raise OptionError(
            f"{directory} holds adapters of {saved['source']}, and the base of this run, {own['source']}, has other "
            "weights: name the adapters' own by --hf-checkpoint or --ref-load, or start new adapters without --load "
            "(what --save-hf wrote has the adapters in it already)"
        )


_NOT = "cannot be used with --lora-sync adapter"
ADAPTER_SYNC = (
    Rule("placement=rollout_only", _NOT, why=": there is no trainer whose adapters engines could have"),
    Rule("random_weights", _NOT, why=": engines have other random weights than the trainer"),
    Rule(
        "@update_weight_transport @update_weight_disk_dir update_weight_disk_keep_files "
        "custom_update_weight_post_write_path",
        _NOT,
        why=": adapters go to every engine by HTTP: drop it",
    ),
    Rule(
        "@sglang_enable_lora @sglang_max_lora_rank @sglang_lora_target_modules @sglang_lora_paths "
        "@sglang_max_loras_per_batch @sglang_max_loaded_loras",
        _NOT,
        why=": slime sets it from --lora-rank and --lora-target-modules: drop it",
    ),
    Rule(
        "sglang_load_format!=auto|safetensors|None sglang_custom_weight_loader sglang_torchao_config",
        _NOT,
        why=": engines would add adapters to other weights than the trainer's: drop it",
    ),
    Rule("sglang_speculative_algorithm!=None|NGRAM", _NOT, why=": SGLang has no adapters with it: drop it"),
    Rule("sglang_tokenizer_worker_num>1", _NOT, why=": only one of them would know the adapters: drop it"),
)
"""What an engine that is given adapters alone would not do, or do by other weights than the trainer's."""

MERGED_SYNC = (
    Rule(
        "sglang_enable_lora sglang_lora_paths",
        ": SGLang does not find weights that are pushed to layers with adapters: drop it (--lora-rank with --lora-sync "
        "adapter sets it by itself)",
        when="lora_sync=merged placement=colocate|disaggregate",
    ),
)


def settle_lora_sync(args: Namespace, warnings: list[str]) -> None:
    """Refuse engines that would not serve what a push carries: OptionError, or, of ``--lora-sync auto``, merged ones.

    ``args`` are complete, with the model's shape; ``lora_sync`` becomes ``merged`` or ``adapter``.
    """
    if args.lora_sync != "merged":
        computed = (f"{what} {_NOT}: {why}" for what, why in _against_adapter_sync(args))
        obstacle = next(broken(args, ADAPTER_SYNC), None) or next(computed, None)
        if obstacle is not None and args.lora_sync == "adapter":
            raise OptionError(f"{obstacle}; or use --lora-sync merged")
        if obstacle is not None:
            warnings.append(f"--lora-sync auto pushes merged weights: {obstacle}")
        args.lora_sync = "adapter" if obstacle is None else "merged"
    check(args, MERGED_SYNC)


def _against_adapter_sync(args: Namespace) -> Iterator[tuple[str, str]]:
    """(what the user has chosen, why it does not go together, the first way out included)."""
    if args.ref_load is not None and not same_place(args.ref_load, args.hf_checkpoint):
        yield (
            f"{args.ref_load_flag} {args.ref_load}",
            "adapters would be added to engines' own weights, those of --hf-checkpoint: name these weights there",
        )
    # A user's own requests name no adapter, and SGLang answers such ones by the model without it.
    own = {flag_named(name): getattr(args, name) for name in _OWN_GENERATION}
    own |= {f"{d}: custom_generate_function_path": d.custom_generate_function_path for d in args.eval_datasets}
    for where, path in own.items():
        if path is not None and not path.startswith(_OURS):
            yield f"{where} {path}", "its own requests would be answered without adapters"
    if args.num_experts and not _MLP.isdisjoint(args.lora_modules):
        yield (
            f"--lora-target-modules {' '.join(args.lora_target_modules)}",
            "of a model with experts, only attention's adapters were seen to be right in SGLang: name layers of it",
        )
    if args.multi_latent_attention:
        yield from _latent_layers(set(args.lora_modules), args.q_lora_rank)
    if args.pushes_float8:
        yield f"the float8 of --hf-checkpoint {args.hf_checkpoint}", "it is not known to be right there"


def _latent_layers(modules: Set[str], q_lora_rank: int | None) -> Iterator[tuple[str, str]]:
    """Of multi-latent attention, the layers whose adapters SGLang 0.5.17 has no place for, or the wrong one."""
    if "kv_b_proj" in modules:
        yield (
            "--lora-target-modules kv_b_proj",
            "SGLang adds it to the wrong tokens where it computes keys and values of cached ones: name other layers",
        )
    if q_lora_rank is None:
        for name in sorted({"q_proj", "kv_a_proj_with_mqa"} & modules):
            yield f"--lora-target-modules {name}", "SGLang looks for it in a fused layer that this model lacks: drop it"
    elif len({"q_a_proj", "kv_a_proj_with_mqa"} & modules) == 1:
        yield "--lora-target-modules q_a_proj or kv_a_proj_with_mqa alone", "SGLang has one layer of both: name both"
