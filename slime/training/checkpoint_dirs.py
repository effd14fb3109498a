"""Directories of checkpoints and of exported models: complete or absent, written by all ranks together.

``SAVE/iter_0000012/`` is the state after rollout 12 and ``SAVE/latest_checkpointed_iteration.txt`` names the last one.
A checkpoint is written in ``SAVE/.iter_0000012.tmp`` and renamed when it is whole, so that a run that dies while it
saves leaves the one before in place. With ``torch.distributed`` all ranks, of one file system, call each function;
those that commit, after their last write.
"""

from __future__ import annotations

import contextlib
import socket
import time
import uuid
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from slime.files import atomic_io
from slime.files.checkpoints import LATEST, checkpoint_directory
from slime.files.exports import mark_export
from slime.utils.errors import BadInputError

_SEEN_WITHIN_S, _POLL_S = 90.0, 0.1
"""A host may know for a minute what was in a directory of another, as NFS's clients do."""


def check_shared(save_dir: str | Path, flag: str) -> None:
    """Raise BadInputError, on every rank, where one does not see what the first writes in ``save_dir``: each writes a
    part of a checkpoint, and the first commits it. OSError, on every rank too, where the first cannot write there."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    mark = Path(save_dir, f".{uuid.uuid4().hex}.seen")
    told: list[Any] = [mark.name, socket.gethostname(), None]
    if _is_first_rank():
        try:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
        except OSError as error:
            told[2] = error.errno, error.strerror, str(save_dir)
    dist.broadcast_object_list(told)
    name, first_host, problem = told
    if problem is not None:
        raise OSError(*problem)
    deadline = time.monotonic() + _SEEN_WITHIN_S
    while not (seen := _exists(Path(save_dir, name))) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, None if seen else socket.gethostname())
    if _is_first_rank():
        with contextlib.suppress(OSError):
            mark.unlink()
    if blind := sorted({host for host in found if host is not None}):
        raise BadInputError(
            f"{flag} {save_dir}: training ranks on {', '.join(blind)} do not see what the first one, on {first_host}, "
            "writes there: name a directory of a file system that all hosts with trainers have, such as NFS"
        )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a rank that may not look does not see it
        return False


def begin_save(save_dir: str | Path, rollout_id: int) -> str:
    """An empty directory to write the checkpoint of ``rollout_id`` in; what an earlier try left there is removed."""
    return str(staging_directory(checkpoint_directory(save_dir, rollout_id)))


def commit_save(save_dir: str | Path, rollout_id: int) -> None:
    """Give the directory of `begin_save` its name and make it the latest, each in one step."""
    commit_directory(checkpoint_directory(save_dir, rollout_id))
    if _is_first_rank():
        atomic_io.write_file(Path(save_dir, LATEST), lambda path: path.write_text(str(rollout_id)))
    _barrier()


def staging_directory(final: Path) -> Path:
    """`atomic_io.staging_directory`, by all ranks."""
    if _is_first_rank():
        atomic_io.staging_directory(final)
    _barrier()
    return atomic_io.unfinished(final)


def commit_directory(final: Path) -> None:
    """`atomic_io.commit_directory`, by all ranks."""
    _barrier()
    if _is_first_rank():
        atomic_io.commit_directory(final)
    _barrier()


def commit_export(final: Path, args: Namespace, rollout_id: int) -> None:
    """`commit_directory` of what the first rank wrote for others to load, with the mark of an export."""
    if _is_first_rank():
        mark_export(atomic_io.unfinished(final), args, rollout_id)
    commit_directory(final)


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
