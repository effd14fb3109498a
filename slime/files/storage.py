"""What is wrong with a place that cannot be written to, in one line: cause, flag, directory, free space, what to do.

Imports the standard library only: tools say these lines too, before there is an environment.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from slime.files import atomic_io
from slime.utils.errors import SlimeError

_CAUSES = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota of this user is used up",
    errno.EFBIG: "a file would be larger than may be (see `ulimit -f`, or the file system's limit)",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "it may not be written to by this user",
    errno.EPERM: "it may not be written to by this user",
    errno.ENOENT: "a directory was removed, or cannot be made there",
    errno.ENOTDIR: "something that is not a directory is in the place of one",
    errno.ESTALE: "the network file system has lost it (stale file handle)",
    errno.ENOTCONN: "the network file system is not connected",
    errno.EIO: "the disk, or the network that it is reached by, fails (input/output error)",
    errno.ENAMETOOLONG: "a path is too long",
}
_TO_DO = {
    errno.ENOSPC: "free some space there, or name another directory",
    errno.EDQUOT: "remove some files of this user, or name another directory",
}
_NAME_ANOTHER = "mend that, or name another directory"
_OF_SOCKETS_TOO = (errno.ENOTCONN,)
_OF_RUST = re.compile(r"\(os error (\d+)\)")
_OF_CPP = os.strerror(errno.ENOSPC)
"""The text is all that is left of an error in libraries of other languages."""
_TORCH_NO_PARENT = re.compile(r"^Parent directory (.+) does not exist\.$", re.MULTILINE)
_TORCH_WRITER = re.compile(r"inline_container\.cc|PytorchStreamWriter failed|basic_ios::clear|iostream error")
"""torch's own files of C++: what is wrong with the disk is not in their errors."""
_PROBE_BYTES, _LITTLE = 1 << 20, 1 << 28
_LONGEST_PATH, _LONGEST_NAME = 4096, 255
"""Bytes; Linux takes no more."""
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


class StorageError(SlimeError):
    """Something could not be written; the message says what, where, why, and what to do."""


@contextlib.contextmanager
def writing(flag: str, path: str | Path, *, note: str = "") -> Iterator[None]:
    """Within the block something is written below ``path``, which ``flag`` names. StorageError where it could not be;
    with ``note``, what is still whole. Errors that have other reasons pass."""
    try:
        yield
    except (StorageError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch's CheckpointException is not an Exception
        if (line := why_not_written(error, flag, path)) is None:
            raise
        raise StorageError(f"{line}{f'; {note}' if note else ''}") from error


def write_text(flag: str, path: Path, text: str) -> None:
    """Write a file that is whole or as it was before, and the directories above it; StorageError if that fails."""
    with writing(flag, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_io.write_file(path, lambda unfinished: unfinished.write_text(text))


@contextlib.contextmanager
def reported(program: str) -> Iterator[None]:
    """Within a program's block, what could not be written is a line and exit status 1."""
    try:
        yield
    except StorageError as error:
        sys.exit(f"{program}: error: {error}")


def why_not_written(error: BaseException, flag: str, path: str | Path) -> str | None:
    """The line for an error of writing below ``path``; None for one that has nothing to do with that."""
    place = Path(os.path.expanduser(path)).absolute()
    found = _of_storage(error)
    if found is None:
        return None
    number, where = found
    if where and not _belongs(where, place):
        return None  # of what is read, or written elsewhere, meanwhile
    if number is None:
        directory = nearest_directory(place)
        number = _probe(directory)
        if number is None:
            full = ", as the disk is most likely full" if shutil.disk_usage(directory).free < _LITTLE else ""
            first_line = (str(error).splitlines() or [type(error).__name__])[0][:200]
            what = f"torch could not write a file there{full} ({first_line})"
            return f"{flag} {path}: {what}; {free_space(place)}"
    cause, to_do = _CAUSES[number], _TO_DO.get(number, _NAME_ANOTHER)
    at = f" ({where})" if where and where != str(place) else ""
    return f"{flag} {path}: {cause}{at}; {free_space(place)}: {to_do}"


def nearest_directory(path: Path) -> Path:
    """``path``, or the directory above it that is there."""
    return next((each for each in (path, *path.parents) if os.path.isdir(each)), Path("/"))


def free_space(path: Path) -> str:
    """How much is free there, in words."""
    directory = nearest_directory(path)
    try:
        usage, inodes = shutil.disk_usage(directory), os.statvfs(directory)
    except OSError as error:
        return f"the free space in {directory} cannot be told ({error.strerror})"
    full = ", and no more files can be made there" if inodes.f_files and not inodes.f_favail else ""
    return f"{amount(usage.free)} of {amount(usage.total)} are free in {directory}{full}"


def amount(count: float) -> str:
    """Bytes, in the largest unit of which there is one at least."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.3g} {_UNITS[unit]}" if unit and count < 1000 else f"{count:.0f} {_UNITS[unit]}"


def why_no_directory(path: str | Path) -> str:
    """Why no file could be written in a directory at ``path``, which need not be there yet; empty where one could."""
    place = Path(os.path.expanduser(path)).absolute()
    # It may be staged in the same directory, under longer names.
    longest = atomic_io.replaced(place) if place.name else place
    names = (*place.parts, longest.name)
    if len(os.fsencode(longest)) >= _LONGEST_PATH or any(len(os.fsencode(name)) > _LONGEST_NAME for name in names):
        return "the path, or a name in it, is too long"
    nearest = next(each for each in (place, *place.parents) if os.path.lexists(each))
    what = "it" if nearest == place else str(nearest)
    if not nearest.is_dir():
        where = f"a link to {nearest.readlink()}, which is not there" if nearest.is_symlink() else "not a directory"
        return f"{what} is {where}"
    try:
        # Tried: permissions do not tell it of file systems like /proc, nor to root; and an empty file of a full disk.
        with tempfile.TemporaryDirectory(prefix=".slime-", dir=nearest) as directory:
            Path(directory, "file").write_bytes(b"0" * 4096)
    except OSError as error:
        return f"no directory can be made in {what}: {error.strerror}; {free_space(nearest)}"
    return ""


def _of_storage(error: BaseException | None) -> tuple[int | None, str] | None:
    """What an error, or what it came of, says of a file: the kernel's number, where that is known, and the file."""
    guess = None
    seen: set[int] = set()
    pending = [error]
    while pending:
        each = pending.pop(0)
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, OSError) and each.errno in _CAUSES:
            file = os.fsdecode(each.filename) if isinstance(each.filename, (str, bytes, os.PathLike)) else ""
            if file or each.errno not in _OF_SOCKETS_TOO:
                return each.errno, file
        elif (told := _told_by_text(each)) is not None:
            return told
        if isinstance(each, RuntimeError) and _TORCH_WRITER.search(str(each)):
            guess = (None, "")
        # torch.distributed.checkpoint has those of all ranks; each with its traceback.
        of_ranks = getattr(each, "failures", None)
        if isinstance(of_ranks, dict):
            pending += [one[0] if isinstance(one, tuple) else one for one in of_ranks.values()]
        pending += [each.__cause__, None if each.__suppress_context__ else each.__context__]
    return guess


def _belongs(file: str, place: Path) -> bool:
    """Whether a file is one that is written for ``place``, or a directory above it; links to either are followed."""
    real, its = Path(os.path.realpath(file)), Path(os.path.realpath(place))
    # A staging directory lies where the place itself does, also where that is a link.
    own_place = Path(os.path.realpath(place.parent), place.name) if place.name else place
    stages = (atomic_io.unfinished, atomic_io.replaced)
    own = [its, *(stage(each) for each in {its, own_place} if each.name for stage in stages)]
    return any(each in (real, *real.parents) for each in own) or real in (*its.parents, *own_place.parents)


def _told_by_text(error: BaseException) -> tuple[int, str] | None:
    text = str(error)
    if (found := _OF_RUST.search(text)) and int(found[1]) in _CAUSES:
        return int(found[1]), ""
    if isinstance(error, RuntimeError) and (found := _TORCH_NO_PARENT.search(text)):
        return errno.ENOENT, found[1]
    return (errno.ENOSPC, "") if _OF_CPP in text else None


def _probe(directory: Path) -> int | None:
    """The number of the error that a small file in a directory meets; None where there is none."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno if error.errno in _CAUSES else None
    return None
