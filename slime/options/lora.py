"""Low-rank adapters in place of all weights."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slime.options.checkpoint import same_place
from slime.options.errors import OptionError
from slime.options.rules import Rule
from slime.options.schema import flag_named, option

_OURS = "slime.rollout."
_OWN_GENERATION = ("custom_generate_function_path", "rollout_function_path", "eval_function_path")
_OTHER_WAYS = (
    *("update_weight_transport", "update_weight_disk_dir", "update_weight_disk_keep_files"),
    "custom_update_weight_post_write_path",
)
_OTHER_BASE = ("sglang_load_format", "sglang_custom_weight_loader", "sglang_torchao_config")
_SET_BY_SLIME = {
    *("sglang_enable_lora", "sglang_max_lora_rank", "sglang_lora_target_modules", "sglang_lora_paths"),
    *("sglang_max_loras_per_batch", "sglang_max_loaded_loras"),
}
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
    """Compare the adapters of a checkpoint with those of the run; None is none.

    Raises:
        OptionError: they are not the same; names the flags that differ.
    """
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
    """Compare the base of a checkpoint's adapters with the run's; None where there are no adapters.

    Args:
        saved: ``sha256`` of the base's values, and the ``source`` that it was read from.
        own: the same.

    Raises:
        OptionError: they have other values.
    """
    if saved is not None and own is not None and saved["sha256"] != own["sha256"]:
        raise OptionError(
            f"{directory} holds adapters of {saved['source']}, and the base of this run, {own['source']}, has other "
            "weights: name the adapters' own by --hf-checkpoint or --ref-load, or start new adapters without --load "
            "(what --save-hf wrote has the adapters in it already)"
        )


def settle_lora_sync(args: Namespace, given: Set[str], warnings: list[str]) -> None:
    """Refuse what an engine that is given adapters alone would not do, or do by other weights than the trainer's; with
    ``--lora-sync auto`` push merged weights then. Where all weights are pushed, refuse an engine with adapters of its
    own.

    Args:
        args: complete, with the model's shape. ``lora_sync`` becomes ``merged`` or ``adapter``.
        given: the attributes that flags or YAML set.
        warnings: where the reason for merged weights goes.

    Raises:
        OptionError: naming both flags.
    """
    obstacle = next(_against_adapter_sync(args, given), None) if args.lora_sync != "merged" else None
    if obstacle is not None:
        what, why = obstacle
        if args.lora_sync == "adapter":
            raise OptionError(f"{what} cannot be used with --lora-sync adapter: {why}; or use --lora-sync merged")
        warnings.append(f"--lora-sync auto pushes merged weights: {what} cannot be used with adapters alone: {why}")
        args.lora_sync = "merged"
    if args.lora_sync == "merged":
        for name in ("sglang_enable_lora", "sglang_lora_paths"):
            if getattr(args, name, None) and args.placement in ("colocate", "disaggregate"):
                raise OptionError(
                    f"{flag_named(name)}: SGLang does not find weights that are pushed to layers with adapters: drop "
                    "it (--lora-rank with --lora-sync adapter sets it by itself)"
                )
    else:
        args.lora_sync = "adapter"


def _against_adapter_sync(args: Namespace, given: Set[str]) -> Iterator[tuple[str, str]]:
    """(what the user has chosen, why it does not go together), the first way out included."""
    if args.placement == "rollout_only":
        yield "--debug-rollout-only", "there is no trainer whose adapters engines could have"
    if args.ref_load is not None and not same_place(args.ref_load, args.hf_checkpoint):
        yield (
            f"{args.ref_load_flag} {args.ref_load}",
            ("adapters would be added to engines' own weights, those of --hf-checkpoint: name these weights there"),
        )
    if args.random_weights:
        yield "--random-weights", "engines have other random weights than the trainer"
    for name in _OTHER_WAYS:
        if name in given and getattr(args, name) not in (None, False):
            yield flag_named(name), "adapters go to every engine by HTTP: drop it"
    for name in sorted(given & _SET_BY_SLIME):
        yield flag_named(name), "slime sets it from --lora-rank and --lora-target-modules: drop it"
    for name in _OTHER_BASE:
        value = getattr(args, name, None)
        if value and value not in ("auto", "safetensors"):
            yield (
                f"{flag_named(name)} {value}",
                "engines would add adapters to other weights than the trainer's: drop it",
            )
    yield from _own_requests(args)
    if args.num_experts and not _MLP.isdisjoint(args.lora_modules):
        yield (
            f"--lora-target-modules {' '.join(args.lora_target_modules)}",
            "of a model with experts, only attention's adapters were seen to be right in SGLang: name layers of it",
        )
    if args.multi_latent_attention:
        yield from _latent_layers(set(args.lora_modules), args.q_lora_rank)
    if args.pushes_float8:
        yield f"the float8 of --hf-checkpoint {args.hf_checkpoint}", "it is not known to be right there"
    speculative = getattr(args, "sglang_speculative_algorithm", None)
    if speculative not in (None, "NGRAM"):
        yield f"--sglang-speculative-algorithm {speculative}", "SGLang has no adapters with it: drop it"
    workers = getattr(args, "sglang_tokenizer_worker_num", None) or 1
    if workers > 1:
        yield f"--sglang-tokenizer-worker-num {workers}", "only one of them would know the adapters: drop it"


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


def _own_requests(args: Namespace) -> Iterator[tuple[str, str]]:
    """A user's own requests name no adapter, and SGLang answers such ones by the model without it."""
    why = "its own requests would be answered without adapters"
    for name in _OWN_GENERATION:
        path = getattr(args, name)
        if path is not None and not path.startswith(_OURS):
            yield f"{flag_named(name)} {path}", why
    for dataset in args.eval_datasets:
        path = dataset.custom_generate_function_path
        if path is not None and not path.startswith(_OURS):
            yield f"{dataset}: custom_generate_function_path {path}", why
