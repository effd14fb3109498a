"""What a run loads and saves, checked before anything starts: places, checkpoints, and whose adapters they hold."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from pathlib import Path

from slime.options.checkpoint import (
    LATEST,
    SavedModel,
    find_checkpoint,
    has_checkpoint,
    is_release,
    is_torch_dist,
    latest_name,
    same_place,
    saved_model,
)
from slime.options.errors import OptionError
from slime.options.lora import Modules, check_adapters, described
from slime.options.model import has_weights
from slime.options.next_tokens import check_saved_heads
from slime.options.schema import flag_named
from slime.utils.storage import why_no_directory

_PLACES = (
    *("save", "save_hf", "save_lora", "critic_save", "run_dir", "update_weight_disk_dir"),
    *("tb_project_name", "wandb_dir", "dump_details", "save_debug_rollout_data", "save_debug_train_data"),
)
"""Options that name directories, or files in directories, that a run makes."""
_USED_WITH = {"tb_project_name": "use_tensorboard", "wandb_dir": "use_wandb"}


def load_release(args: Namespace, warnings: list[str]) -> None:
    """A ``--load`` that a conversion wrote has weights to start from and no run to continue.

    Sets ``args.ref_load_flag``, by which the user gave them, or None.
    """
    args.ref_load_flag = None if args.ref_load is None else flag_named("ref_load")
    if args.load is None or args.debug_rollout_only or not is_release(os.path.expanduser(args.load)):
        return
    if args.ref_load is not None and not same_place(args.ref_load, args.load):
        raise OptionError(
            f"--load {args.load} holds weights to start from, and so does --ref-load {args.ref_load}: drop one"
        )
    _found("--load", os.path.expanduser(args.load))
    warnings.append(f"--load {args.load} holds weights only, and no run to go on with: it is taken as --ref-load")
    if args.ref_load is None:
        args.ref_load_flag = "--load"
    args.load, args.ref_load = None, args.load


def derive_checkpoints(args: Namespace) -> SavedModel | None:
    """Where the run reads and writes; `load_release` comes before.

    Returns:
        What the checkpoint that ``--load`` goes on from says of its model; None where there is none.

    Raises:
        OptionError: a place is none, or does not hold what the run would look for in it.
    """
    _run_directory(args)
    _paths(args)
    _places(args)
    if args.placement == "rollout_only":
        return None
    _other_runs_checkpoints(args)
    return _saved_models(args, _load_directory(args))


def starting_point(args: Namespace) -> str:
    """The line that says which weights a run's trainers begin with; empty where there are none."""
    if args.placement == "rollout_only":
        return ""
    found = find_checkpoint(args.load) if args.load else None
    if found is not None:
        return f"training goes on from {found[0]} (--load)"
    first = f"there is no checkpoint in --load {args.load} yet: " if args.load else ""
    if args.random_weights:
        return f"{first}training starts from random weights (--random-weights)"
    if args.ref_load:
        return f"{first}training starts from {args.ref_load} ({args.ref_load_flag})"
    return f"{first}training starts from {args.hf_checkpoint} (--hf-checkpoint)"


def _run_directory(args: Namespace) -> None:
    args.launch_dir = os.getcwd()
    chosen = args.run_dir or args.save or Path("outputs") / time.strftime("%Y%m%d-%H%M%S")
    args.run_dir = os.path.abspath(os.path.expanduser(chosen))


def _paths(args: Namespace) -> None:
    for name in ("load", "save", "ref_load"):
        if getattr(args, name) is not None:
            setattr(args, name, os.path.abspath(os.path.expanduser(getattr(args, name))))
    if args.ref_load is not None and not os.path.isdir(args.ref_load):
        raise OptionError(f"--ref-load {args.ref_load}: there is no such directory")


def _places(args: Namespace) -> None:
    """Directories that a run makes; found out before it has trained for hours."""
    for name in _PLACES:
        path, uses = getattr(args, name), _USED_WITH.get(name)
        if path is None or (uses and not getattr(args, uses)):
            continue
        if why := why_no_directory(path):
            raise OptionError(f"{flag_named(name)} {path}: {why}")


def _other_runs_checkpoints(args: Namespace) -> None:
    """Refuse to save among the checkpoints of a run that this one does not continue: it would begin their numbers anew,
    overwrite some and call its own the latest."""
    if args.save is None or same_place(args.load, args.save) or not has_checkpoint(args.save) or is_release(args.save):
        return
    raise OptionError(
        f"--save {args.save} has checkpoints of another run, the latest of rollout {latest_name(args.save)}: go "
        f"on with that run by --load {args.save}, or save to another directory"
    )


def _load_directory(args: Namespace) -> Path | None:
    """What ``--load`` must hold: checkpoints of an earlier run, of which this is the latest, or nothing where this run
    saves there."""
    if args.load is None:
        return None
    directory = Path(args.load)
    found = _found("--load", args.load)
    if found is not None:
        if not is_torch_dist(found[0]):
            raise OptionError(f"--load {directory}: {found[0].name} is no whole checkpoint (no metadata.json in it)")
        return found[0]
    if os.path.isfile(directory / "config.json"):
        raise OptionError(
            f"--load {directory} is a Hugging Face directory: --load is for resuming; name it by --hf-checkpoint, or "
            "by --ref-load"
        )
    if is_torch_dist(directory):
        or_start = "" if saved_model(directory).adapters else ", or start from its weights by --ref-load"
        raise OptionError(f"--load {directory} is one checkpoint: name the directory above it to resume{or_start}")
    if not same_place(args.load, args.save):
        raise OptionError(
            f"--load {directory}: there is no checkpoint in it (no {LATEST}); drop it to start fresh, or let --save "
            "name the same directory"
        )
    return None


def _saved_models(args: Namespace, latest: Path | None) -> SavedModel | None:
    """Refuse checkpoints that no run wrote or of other heads than the run's, and adapters in the place of a model.

    Args:
        latest: the checkpoint that ``--load`` goes on from; what it says is returned.
    """
    resumed = saved_model(latest) if latest is not None else None
    if resumed is not None:
        if not resumed.of_a_run:
            raise OptionError(
                f"--load {latest} is no checkpoint of a run of slime (its common.pt is Megatron-LM's own, or damaged): "
                f"to start from its weights name it by --ref-load {args.load}, not by --load, and save elsewhere"
            )
        check_saved_heads(f"--load {latest}", resumed.heads, args.enable_mtp_training)
    if args.ref_load is not None and not has_weights(args.ref_load):
        found = _found(args.ref_load_flag, args.ref_load)
        if saved_model(found[0] if found else Path(args.ref_load)).adapters is not None:
            raise OptionError(
                f"{args.ref_load_flag} {args.ref_load} holds adapters and no model: name the model they belong to"
            )
    return resumed


def check_saved_adapters(args: Namespace, resumed: SavedModel | None, modules: Modules) -> None:
    """Refuse to go on from other adapters than the run's.

    Args:
        resumed: what `derive_checkpoints` returned.
        modules: of the model.

    Raises:
        OptionError: the latest checkpoint in ``--load`` holds other adapters.
    """
    if resumed is not None:
        own = described(args.lora_rank, args.lora_alpha, args.lora_target_modules) if args.lora_rank else None
        check_adapters(f"--load {resumed.directory}", resumed.adapters, own, modules)


def _found(flag: str, directory: str) -> tuple[Path, int] | None:
    try:
        return find_checkpoint(directory)
    except (FileNotFoundError, ValueError) as error:
        raise OptionError(f"{flag} {directory}: {error}") from error
