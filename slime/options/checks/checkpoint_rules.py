"""What a run loads and saves, checked before anything starts: places, checkpoints, and whose adapters they hold."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from pathlib import Path

from slime.files.checkpoints import (
    LATEST,
    SavedModel,
    chosen_checkpoint,
    find_checkpoint,
    has_checkpoint,
    is_release,
    is_torch_dist,
    latest_name,
    same_place,
    saved_model,
)
from slime.files.model_directory import has_weights
from slime.files.storage import why_no_directory
from slime.options.checkpoint import where_loaded
from slime.options.errors import OptionError, naming
from slime.options.flags.schema import flag_named
from slime.options.learning.algorithm import PARAMETER_LISTS, trained_names
from slime.options.lora import Modules, check_adapters, described
from slime.options.mtp import check_saved_heads

_PLACES = {
    **dict.fromkeys(("save", "save_hf", "save_lora", "critic_save", "run_dir", "update_weight_disk_dir")),
    **dict.fromkeys(("dump_details", "save_debug_rollout_data", "save_debug_train_data")),
    "tb_project_name": "use_tensorboard",
    "wandb_dir": "use_wandb",
    "memory_snapshot_dir": "record_memory_history",
}
"""Options that name directories, or files in directories, that a run makes, and by which switch it does."""


def load_release(args: Namespace, warnings: list[str]) -> None:
    """A ``--load`` that a conversion wrote has weights to start from and no run to continue.

    Sets ``args.ref_load_flag``, by which the user gave them, or None.
    """
    args.ref_load_flag = None if args.ref_load is None else "--ref-load"
    chosen = args.ckpt_step is not None
    if args.load is None or args.debug_rollout_only or chosen or not is_release(os.path.expanduser(args.load)):
        return
    if args.ref_load is not None and not same_place(args.ref_load, args.load):
        raise OptionError(
            f"--load {args.load} holds weights to start from, and so does --ref-load {args.ref_load}: drop one"
        )
    _latest("--load", os.path.expanduser(args.load))
    warnings.append(f"--load {args.load} holds weights only, and no run to go on with: it is taken as --ref-load")
    args.ref_load_flag = args.ref_load_flag or "--load"
    args.load, args.ref_load = None, args.load


def derive_checkpoints(args: Namespace) -> SavedModel | None:
    """Settle where the run reads and writes; `load_release` comes before. OptionError: a place that is none, or lacks
    what the run would look for in it.

    Returns what the checkpoint that ``--load`` goes on from says of its model; None where there is none.
    """
    args.launch_dir = os.getcwd()
    args.run_dir = args.run_dir or args.save or os.path.join("outputs", time.strftime("%Y%m%d-%H%M%S"))
    for name in ("run_dir", "load", "save", "ref_load", "memory_snapshot_dir"):
        if getattr(args, name) is not None:
            setattr(args, name, os.path.abspath(os.path.expanduser(getattr(args, name))))
    if args.ref_load is not None and not os.path.isdir(args.ref_load):
        raise OptionError(f"--ref-load {args.ref_load}: there is no such directory")
    for name, switch in _PLACES.items():  # found out before it has trained for hours
        path = getattr(args, name)
        if path is not None and (switch is None or getattr(args, switch)) and (why := why_no_directory(path)):
            raise OptionError(f"{flag_named(name)} {path}: {why}")
    if args.placement == "rollout_only":
        return None
    if args.ref_load is not None and args.ref_ckpt_step is not None:
        with naming(f"--ref-ckpt-step {args.ref_ckpt_step}: --ref-load", FileNotFoundError):
            args.ref_load = str(chosen_checkpoint(args.ref_load, args.ref_ckpt_step))
    if args.save and not same_place(args.load, args.save) and has_checkpoint(args.save) and not is_release(args.save):
        # It would begin their numbers anew, overwrite some and call its own the latest.
        raise OptionError(
            f"--save {args.save} has checkpoints of another run, the latest of rollout {latest_name(args.save)}, "
            f"counted from 0: go on with that run by --load {args.save}, or save to another directory"
        )
    if args.ref_load is not None and not has_weights(args.ref_load):
        latest = _latest(args.ref_load_flag, args.ref_load)
        if saved_model(latest or Path(args.ref_load)).adapters is not None:
            raise OptionError(
                f"{args.ref_load_flag} {args.ref_load} holds adapters and no model: name the model they belong to"
            )
    return None if args.load is None else _resumed(args, Path(args.load))


def starting_point(args: Namespace) -> str:
    """The line that says which weights a run's trainers begin with; empty where there are none."""
    if args.placement == "rollout_only":
        return ""
    found = find_checkpoint(args.load, args.ckpt_step) if args.load else None
    if found is not None:
        return f"training goes on from {found[0]} (--load)"
    first = f"there is no checkpoint in --load {args.load} yet: " if args.load else ""
    if args.random_weights:
        return f"{first}training starts from random weights (--random-weights)"
    if args.ref_load:
        return f"{first}training starts from {args.ref_load} ({args.ref_load_flag})"
    return f"{first}training starts from {args.hf_checkpoint} (--hf-checkpoint)"


def _resumed(args: Namespace, directory: Path) -> SavedModel | None:
    latest = _chosen(args, directory) if args.ckpt_step is not None else _latest("--load", directory)
    if latest is None:
        _check_empty(args, directory)
        return None
    if not is_torch_dist(latest):
        raise OptionError(f"--load {directory}: {latest.name} is not a whole checkpoint (no metadata.json in it)")
    resumed = saved_model(latest)
    if not resumed.of_a_run:
        raise OptionError(
            f"--load {latest} is not a checkpoint of a run of slime (its common.pt is Megatron-LM's own, or damaged): "
            f"to start from its weights name it by --ref-load {directory}, not by --load, and save elsewhere"
        )
    check_saved_heads(f"--load {latest}", resumed.heads, args.enable_mtp_training)
    if (own := trained_names(args)) != resumed.trained:
        theirs, ours = (" ".join(_shown(names)) or "neither" for names in (resumed.trained, own))
        raise OptionError(
            f"--load {latest} has optimizer state of what its run trained, by {theirs}, and this run has {ours}: take "
            "the former, or start from its weights alone by --ref-load"
        )
    return resumed


def _shown(trained: dict[str, list[str]]) -> list[str]:
    return [" ".join([PARAMETER_LISTS[name], *patterns]) for name, patterns in trained.items()]


def _chosen(args: Namespace, directory: Path) -> Path:
    """The checkpoint of ``--ckpt-step``; OptionError where the run would write among later ones of its directory."""
    with naming(where_loaded(args), FileNotFoundError):
        chosen = chosen_checkpoint(directory, args.ckpt_step)
    latest = _latest("--load", directory) if same_place(directory, args.save) else None
    if latest is not None and latest.name != chosen.name:
        raise OptionError(
            f"--ckpt-step {args.ckpt_step}: --save {args.save} is --load, and its latest is {latest.name}, which the "
            "run would begin anew beside: save to another directory"
        )
    return chosen


def _check_empty(args: Namespace, directory: Path) -> None:
    if os.path.isfile(directory / "config.json"):
        raise OptionError(
            f"--load {directory} is a Hugging Face directory: --load is for resuming; name it by --hf-checkpoint, or "
            "by --ref-load"
        )
    if is_torch_dist(directory):
        or_start = "" if saved_model(directory).adapters else ", or start from its weights by --ref-load"
        raise OptionError(f"--load {directory} is one checkpoint: name the directory above it to resume{or_start}")
    if not same_place(directory, args.save):
        raise OptionError(
            f"--load {directory}: there is no checkpoint in it (no {LATEST}); drop it to start fresh, or let --save "
            "name the same directory"
        )


def check_saved_adapters(args: Namespace, resumed: SavedModel | None, modules: Modules) -> None:
    """Compare the run's adapters with those of ``resumed``, which `derive_checkpoints` returned; OptionError if they
    differ."""
    if resumed is not None:
        own = described(args.lora_rank, args.lora_alpha, args.lora_target_modules) if args.lora_rank else None
        check_adapters(f"--load {resumed.directory}", resumed.adapters, own, modules)


def _latest(flag: str, directory: str | Path) -> Path | None:
    with naming(f"{flag} {directory}:", FileNotFoundError):
        found = find_checkpoint(directory)
    return found[0] if found else None
