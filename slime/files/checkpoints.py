"""Where a run's checkpoints are in their directory, and what one says of the model in it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RUN_KEY = "distributed_optimizer"
"""What the checkpoint of a run has in its ``common.pt``, and neither a conversion's nor one of Megatron-LM's own."""
COMMON = "common.pt"
"""The file of a checkpoint that has what is not cut up among ranks."""
ROLLOUT_STATE = "rollout_state.pt"
"""In a run's checkpoint, the data side's."""
LATEST = "latest_checkpointed_iteration.txt"
"""The file of a checkpoint directory that names the last checkpoint in it."""
RELEASE = "release"
"""What `LATEST` says, and the name of the checkpoint, where it is weights to start from and no state of a run."""


def same_place(one: str | Path | None, other: str | Path | None) -> bool:
    """Whether two paths lead to one place, by links and ``~`` too; it need not be there. None leads nowhere."""
    if one is None or other is None:
        return False
    return os.path.realpath(os.path.expanduser(one)) == os.path.realpath(os.path.expanduser(other))


def has_checkpoint(directory: str | Path) -> bool:
    """Whether a directory names a checkpoint."""
    return os.path.isfile(Path(directory, LATEST))


def latest_name(directory: str | Path) -> str:
    """What a directory that `has_checkpoint` calls its last one: a rollout's number, or `RELEASE`."""
    return Path(directory, LATEST).read_text().strip()


def checkpoint_directory(root: str | Path, rollout_id: int) -> Path:
    """Where the state after ``rollout_id`` is, or would be."""
    return Path(root, f"iter_{rollout_id:07d}")


def is_release(directory: str | Path) -> bool:
    """Whether the checkpoint that a directory names holds weights only."""
    return has_checkpoint(directory) and latest_name(directory) == RELEASE


def is_torch_dist(directory: str | Path) -> bool:
    """Whether a directory itself is a whole torch_dist checkpoint: it has the file that is written last."""
    return os.path.isfile(Path(directory, "metadata.json"))


def chosen_checkpoint(load_dir: str | Path, step: int) -> Path:
    """The checkpoint after rollout ``step`` in a directory of checkpoints; FileNotFoundError, which lists what there
    is, where that is not among them."""
    directory = checkpoint_directory(load_dir, step)
    if not directory.is_dir():
        raise FileNotFoundError(f"{load_dir} has no {directory.name}; it has {_present(load_dir)}")
    return directory


def _present(load_dir: str | Path) -> str:
    return ", ".join(sorted(p.name for p in Path(load_dir).glob("iter_*"))) or "no checkpoint"


def find_checkpoint(load_dir: str | Path, step: int | None = None) -> tuple[Path, int] | None:
    """The checkpoint after rollout ``step``, by default the latest, as (directory, rollout id); None where there is
    none. Of weights only, the id is -1.

    Raises:
        FileNotFoundError: it, or the one that the directory calls its latest, is not there.
        ValueError: a file of the latest that holds no number.
    """
    if step is not None:
        return chosen_checkpoint(load_dir, step), step
    if not has_checkpoint(load_dir):
        return None
    latest, text = Path(load_dir, LATEST), latest_name(load_dir)
    if not text.isdecimal() and text != RELEASE:
        raise ValueError(f"{latest} should hold the number of a checkpoint or {RELEASE}, not {text!r}")
    rollout_id = -1 if text == RELEASE else int(text)
    directory = Path(load_dir, RELEASE) if text == RELEASE else checkpoint_directory(load_dir, rollout_id)
    if not directory.is_dir():
        raise FileNotFoundError(f"{latest} names {directory.name}, but {load_dir} has {_present(load_dir)}")
    return directory, rollout_id


def rollouts_done(load_dir: str | None, step: int | None = None) -> int:
    """How many rollouts the checkpoint of ``--load`` was trained on, or 0; as `find_checkpoint`."""
    found = find_checkpoint(load_dir, step) if load_dir else None
    return found[1] + 1 if found else 0


@dataclass(frozen=True)
class SavedModel:
    """What a torch_dist checkpoint says of the model in it."""

    directory: Path
    """Where it is."""
    adapters: dict[str, Any] | None = None
    """That it holds; None of one that holds a whole model."""
    heads: bool = False
    """Whether it has trained MTP heads."""
    trained: dict[str, list[str]] = field(default_factory=dict)
    """Options, with their values, by which its run trained some parameters only."""
    of_a_run: bool = True
    """Whether a run of slime can go on from it, as far as its ``common.pt`` tells."""


def saved_model(directory: Path) -> SavedModel:
    """Read what a torch_dist checkpoint says of its model.

    Megatron-LM's own have types in ``common.pt`` that only Megatron can read, and neither adapters nor trained heads.
    """
    import torch

    try:
        common = torch.load(directory / COMMON, map_location="cpu", weights_only=True)
    except OSError:  # `slime.convert.weight_check` says what is missing
        return SavedModel(directory)
    except Exception:  # what torch did not write plainly fails in many ways
        return SavedModel(directory, of_a_run=False)
    heads, trained = bool(common.get("heads")), common.get("trained") or {}
    return SavedModel(directory, common.get("adapters"), heads, trained, RUN_KEY in common)
