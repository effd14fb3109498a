"""Where a run, its local Ray and the libraries below it write: whether they can, and have room."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path

from slime.driver.schedule import times_due
from slime.files.exports import exports_after
from slime.files.hf_reader import read_headers
from slime.files.storage import amount, nearest_directory, why_no_directory
from slime.options.flags.schema import flag_named
from slime.ray.cluster import temporary_directory
from slime.utils.errors import BadInputError

_ROOM = 1 << 30
_SPILLS_BELOW = 0.05
"""Ray refuses objects that its memory has no room for when less than this share of the disk is free."""
_CACHES = ("XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "MPLCONFIGDIR")
"""Variables by which users send the caches of libraries elsewhere than to HOME. A run may do without: a hub's cache
that many share can often only be read, and other libraries then take a temporary directory."""

_STATE_BYTES = 4
"""Of one float32 number; the optimizer keeps its parameters and its moments in these."""


def place_warnings() -> list[str]:
    """What is short on this host and might end a run later, and what may cost it time or a library of the user's."""
    _, temporary = temporary_directory()
    directory = nearest_directory(Path(temporary).absolute())
    usage = shutil.disk_usage(directory)
    warnings = [
        f"{name}={own}: a library has its cache there, and {why}: what it would keep there is made again or missing"
        for name in _CACHES
        if (own := os.environ.get(name)) and (why := why_no_directory(own))
    ]
    if usage.free < _ROOM or usage.free < _SPILLS_BELOW * usage.total:
        warnings.append(
            f"{amount(usage.free)} of {amount(usage.total)} are free in {directory}, where Ray writes its logs, and, "
            "while more than 5 % of the disk are free, what its memory has no room for: set RAY_TMPDIR to another "
            "directory"
        )
    return warnings


def room_warnings(args: argparse.Namespace) -> list[str]:
    """One line for each directory that will not hold what the rest of the run saves, as far as sizes are known before:
    not of random weights, nor of adapters. ``args.num_rollout`` and what follows from the options are known."""
    found = []
    for flag, place, count, size in _saves(args):
        directory = nearest_directory(Path(place).absolute())
        free = shutil.disk_usage(directory).free
        if free < count * size:
            several = f"{count} of about {amount(size)} each" if count > 1 else f"one of about {amount(size)}"
            found.append(
                f"{flag} {place}: the run will save {several}, and {amount(free)} are free in {directory}: free some "
                "space there, name another directory, or save less often (--save-interval)"
            )
    return found


def checkpoint_bytes(args: argparse.Namespace, parameters: int) -> int:
    """About what a checkpoint takes: weights, and the optimizer's own copy of them with its moments, in float32."""
    return parameters * (weight_bytes(args) + _STATE_BYTES + moment_bytes(args))


def moment_bytes(args: argparse.Namespace) -> int:
    """Of one parameter: what the optimizer keeps of it besides its value."""
    moments = 2 if args.optimizer != "sgd" else int(bool(args.sgd_momentum))
    return _STATE_BYTES * moments


def weight_bytes(args: argparse.Namespace) -> int:
    """Of one parameter, in the type that the model has it in."""
    return 4 if args.params_dtype == "float32" else 2


def expected_checkpoint_bytes(args: argparse.Namespace) -> int | None:
    """About what a checkpoint takes, a critic's as well; None where sizes are not known before."""
    parameters = _parameters(args)
    return None if parameters is None else checkpoint_bytes(args, parameters) * (1 + bool(args.use_critic))


def _parameters(args: argparse.Namespace) -> int | None:
    if args.placement == "rollout_only" or args.random_weights or args.lora_rank or args.num_rollout is None:
        return None
    try:
        return sum(prod(header.shape) for header in read_headers(Path(args.hf_checkpoint)).values())
    except (BadInputError, OSError):
        return None  # what is wrong with it, or that it is not on this host yet, is told elsewhere


def _saves(args: argparse.Namespace) -> Iterator[tuple[str, str, int, int]]:
    if (parameters := _parameters(args)) is None:
        return
    count = times_due(args.start_rollout_id or 0, args.save_interval, last=args.num_rollout)
    if not count:
        return
    for name in ("save", "critic_save") if args.use_critic else ("save",):
        if place := getattr(args, name):
            yield flag_named(name), place, count, checkpoint_bytes(args, parameters)
    if args.save_hf:
        replaces = exports_after(args, 0)["save_hf"] == exports_after(args, 1)["save_hf"]
        yield "--save-hf", args.save_hf, 1 if replaces else count, parameters * weight_bytes(args)
