"""Where a run's weights go: exports, with the mark that tells whose and how far each is, and versions for engines."""

from __future__ import annotations

import hashlib
import json
import socket
from argparse import Namespace
from pathlib import Path
from typing import Any

EXPORT_MARK = "slime_export.json"
"""A file in every directory that ``--save-hf`` or ``--save-lora`` wrote, with the names of the others, which a later
export may replace."""
EXPORTS = ("save_hf", "save_lora")
"""The options that ask for exports."""


def exports_after(args: Namespace, rollout_id: int) -> dict[str, str]:
    """The exports that are asked for after a rollout: option -> directory."""
    places = {name: getattr(args, name) for name in EXPORTS}
    return {name: place.format(rollout_id=rollout_id) for name, place in places.items() if place}


def mark_export(directory: Path, args: Namespace, rollout_id: int) -> None:
    """Write the mark of a run's export after a rollout into its directory, when all else is there."""
    files = sorted(path.name for path in directory.iterdir())
    (directory / EXPORT_MARK).write_text(json.dumps(_origin(args, rollout_id) | {"files": files}, indent=1))


def is_export(directory: str | Path, args: Namespace, rollout_id: int) -> bool:
    """Whether a directory is a run's export after a rollout, and whole."""
    mark = read_mark(directory)
    files = map(str, mark.pop("files", [None]))
    return mark == _origin(args, rollout_id) and all(Path(directory, file).exists() for file in files)


def _origin(args: Namespace, rollout_id: int) -> dict[str, Any]:
    """Which weights an export is of. A run that writes no checkpoints goes on with those that it was resumed from."""
    return {"hf_checkpoint": args.hf_checkpoint, "checkpoints": args.save or args.load, "rollout_id": rollout_id}


def read_mark(directory: str | Path) -> dict[str, Any]:
    """The mark in a directory; empty where there is none."""
    try:
        mark = json.loads(Path(directory, EXPORT_MARK).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return mark if isinstance(mark, dict) and isinstance(mark.get("files"), list) else {}


def weights_directory(args: Namespace) -> Path:
    """Where this run writes versions: a directory of its own in ``--update-weight-disk-dir``.

    Its name is the same when the run is resumed, and another for runs of the same name elsewhere or on other hosts.
    Without that directory, which every run of transport disk has, it is ``RUN_DIR/weights``: what other transports
    bring is checked there (``--check-weight-update-equal``).
    """
    run_dir = Path(args.run_dir).absolute()
    if not args.update_weight_disk_dir:
        return run_dir / "weights"
    whose = hashlib.sha256(f"{socket.gethostname()}:{run_dir}".encode()).hexdigest()[:8]
    return Path(args.update_weight_disk_dir, f"{run_dir.name}-{whose}").absolute()
