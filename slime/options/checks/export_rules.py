"""Exports replace the directory that they go to: it must be no other place of the run, and hold nothing else."""

from __future__ import annotations

import glob
import os
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

from slime.files.checkpoints import rollouts_done
from slime.files.exports import EXPORT_MARK, EXPORTS, is_export, read_mark
from slime.options.errors import OptionError
from slime.options.flags.schema import flag_named

_OTHERS = ("hf_checkpoint", "ref_load", "load", "save", "critic_load", "critic_save", "run_dir", "prompt_data")


def check_exports(args: Namespace) -> None:
    """Refuse, by an OptionError, exports into a directory that is, or holds, another place of the run or anything else.

    `derive_checkpoints` and `derive_templates` come before.
    """
    paths = {name: path for name in EXPORTS if (path := getattr(args, name)) is not None}
    if not paths or args.placement == "rollout_only":
        return
    first = rollouts_done(args.load, args.ckpt_step) if args.start_rollout_id is None else args.start_rollout_id
    for name, path in paths.items():
        flag, parts = flag_named(name), _parts(path)
        taken = re.compile("".join("[^/]*" if part is None else re.escape(part) for part in parts))
        for whose, place in _other_places(args, name):
            if any(taken.fullmatch(str(each)) for each in (place, *place.parents)):
                raise OptionError(f"{flag} {path} would replace {place} ({whose}): name a directory of its own")
        for found in map(Path, glob.glob("".join("*" if part is None else glob.escape(part) for part in parts))):
            if found.is_dir() and not _is_past(found, args, path, first) and (other := _other_than_an_export(found)):
                raise OptionError(
                    f"{flag} {path}: {found} has other things in it than an earlier export ({other}), which would be "
                    "lost: name another directory, or move that away"
                )


def _is_past(directory: Path, args: Namespace, path: str, first: int) -> bool:
    """Whether a directory is an export of a rollout before ``first``, which will not be written again: the last of
    these is, where it is not whole or another run's (`slime.driver.schedule.missing_exports`)."""
    mark, model = read_mark(directory), os.path.expanduser(args.hf_checkpoint)
    rollout_id = mark.get("rollout_id")
    # A hub id may not be on disk yet: it is taken for the mark's.
    model = os.path.realpath(model) if os.path.isdir(model) else mark.get("hf_checkpoint")
    own = Namespace(**vars(args) | {"hf_checkpoint": model})
    return (
        isinstance(rollout_id, int)
        and (rollout_id < first - 1 or (rollout_id == first - 1 and is_export(directory, own, rollout_id)))
        and directory == Path(os.path.realpath(path.format(rollout_id=rollout_id)))
        and path.format(rollout_id=first) != path.format(rollout_id=rollout_id)
    )


def _other_than_an_export(directory: Path) -> str:
    own = {EXPORT_MARK, *map(str, read_mark(directory).get("files", ()))}
    return min({path.name for path in directory.iterdir()} - own, default="")


def _parts(path: str) -> list[str | None]:
    """A path with links resolved, in pieces; None is what the rollout's number is filled in for."""
    pieces = Formatter().parse(os.path.realpath(path))
    return [part for literal, field, _, _ in pieces for part in ([literal] if field is None else [literal, None])]


def _other_places(args: Namespace, export: str) -> Iterator[tuple[str, Path]]:
    yield "the directory where this was started", Path(os.path.realpath(args.launch_dir))
    for name in (*_OTHERS, *EXPORTS):
        place = getattr(args, name)
        if place is not None and name != export:
            flag = args.ref_load_flag if name == "ref_load" else flag_named(name)
            yield flag, Path(os.path.realpath(os.path.expanduser(place)))
