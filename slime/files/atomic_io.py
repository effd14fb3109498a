"""Files and directories that are complete or absent: staged, flushed to the disk, then renamed into place."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

_SUFFIXES = (".tmp", ".replaced")


def staging_directory(final: Path) -> Path:
    """An empty directory beside ``final``, to become it with `commit_directory`; an earlier try's is emptied."""
    discard_directory(final)
    directory = unfinished(final)
    directory.mkdir(parents=True)
    return directory


def commit_directory(final: Path) -> None:
    """Rename what `staging_directory` gave to ``final``, in place of what is there."""
    directory = unfinished(final)
    for path in (*directory.rglob("*"), directory):
        _flush(path)
    shutil.rmtree(replaced(final), ignore_errors=True)
    if final.exists():
        final.rename(replaced(final))
    directory.rename(final)
    _flush(final.parent)
    shutil.rmtree(replaced(final), ignore_errors=True)


def why_not_replaced(directory: Path) -> str:
    """Why a directory could not be renamed over, for an error; empty where it can."""
    if directory.resolve().is_mount():
        return f"{directory} is a mount point, which cannot be replaced as a whole: name a directory in it"
    if directory.resolve() in (here := Path.cwd(), *here.parents):
        return f"{directory} is where this was started, or above it: name a directory in it"
    return ""


def put_back(final: Path) -> None:
    """Undo half of `commit_directory`: what was at ``final`` is there again, if nothing has taken its place."""
    if replaced(final).exists() and not final.exists():
        replaced(final).rename(final)


def remove_directory(final: Path) -> None:
    """Remove a whole directory: who reads it meanwhile finds it gone, and never a part of it."""
    shutil.rmtree(replaced(final), ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        final.rename(replaced(final))
    shutil.rmtree(replaced(final), ignore_errors=True)


def discard_directory(final: Path) -> None:
    """Remove what `staging_directory` gave, if it is there; ``final`` stays."""
    shutil.rmtree(unfinished(final), ignore_errors=True)


@contextlib.contextmanager
def removed_on_failure(final: Path) -> Iterator[None]:
    """A block that stages ``final`` and commits it; a failure removes that, and directories made above it."""
    made = [directory for directory in final.parents if not directory.exists()]
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # of the disk that failed: the error that it came of says more
            put_back(final)
        discard_directory(final)
        for directory in made:
            with contextlib.suppress(OSError):  # not made yet, or somebody else has put something into it
                directory.rmdir()
        raise


@contextlib.contextmanager
def written_directory(final: Path) -> Iterator[Path]:
    """A directory to write to, which becomes ``final`` when the block ends; a failure leaves what was there before."""
    with removed_on_failure(final):
        yield staging_directory(final)
        commit_directory(final)


def write_file(final: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a file beside ``final``, and rename it in place of what is there."""
    path = unfinished(final)
    try:
        write(path)
        _flush(path)
        path.replace(final)
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)  # it would keep a full disk full
        raise
    _flush(final.parent)


def leftovers(directory: Path, pattern: str) -> list[Path]:
    """What of directories, by a pattern of their names, was being written or replaced when its writer was killed."""
    return [path for suffix in _SUFFIXES for path in directory.glob(f".{pattern}{suffix}")]


def unfinished(final: Path) -> Path:
    """Where ``final`` is written until it is whole."""
    return final.with_name(f".{final.name}{_SUFFIXES[0]}")


def replaced(final: Path) -> Path:
    """Where what was at ``final`` is until the new one is there."""
    return final.with_name(f".{final.name}{_SUFFIXES[1]}")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
