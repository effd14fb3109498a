"""Models and data sets of a hub: fetched once, and taken for there only when they are whole."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slime.files import atomic_io
from slime.utils.errors import BadInputError, CommandError, SlimeError
from slime.utils.misc import exec_command


@dataclass(frozen=True)
class _Hub:
    programs: tuple[str, ...]
    """That download from it; the first that is installed is taken."""
    package: str
    words: dict[str, tuple[str, ...]]
    """Of its command line, by what is downloaded, before the name of that."""
    directory_flag: str


_HUBS = {
    "hf": _Hub(
        ("hf", "huggingface-cli"),
        "huggingface_hub",
        {"model": ("download",), "dataset": ("download", "--repo-type", "dataset")},
        "--local-dir",
    ),
    "modelscope": _Hub(
        ("modelscope",),
        "modelscope",
        {"model": ("download", "--model"), "dataset": ("download", "--dataset")},
        "--local_dir",
    ),
}
_BEGUN = (".cache/huggingface/**/*.incomplete", "._____temp/**/*")
"""Files that a download has while it runs, and leaves where it is killed."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")


def models_dir() -> str:
    """Where models are: SLIME_MODELS_DIR, or /root/models."""
    return os.environ.get("SLIME_MODELS_DIR") or "/root/models"


def datasets_dir() -> str:
    """Where data sets are: SLIME_DATASETS_DIR, or /root/datasets."""
    return os.environ.get("SLIME_DATASETS_DIR") or "/root/datasets"


def download(kind: str, name: str, below: str, source: str) -> str:
    """Have ``name`` (``Qwen/Qwen3-4B``), a ``model`` or ``dataset``, of a hub, ``hf`` or ``modelscope``, in a directory
    below ``below``, whole; the directory. One that is whole is kept, and an interrupted download goes on where it
    ended; until it is whole it is in ``.NAME.tmp`` beside the directory. BadInputError where there is no such hub or no
    program to download from it, SlimeError where it could not be downloaded, or is not whole."""
    own_name = name.rpartition("/")[2]
    if not own_name:
        raise BadInputError(f"{kind} {name!r}: a name on a hub is ORG/NAME")
    directory = Path(below, own_name).absolute()
    if source not in _HUBS:
        raise BadInputError(f"{kind} {name}: source must be one of {', '.join(_HUBS)}, not {source!r}")
    hub = _HUBS[source]
    if not missing_of(kind, directory):  # before the lock, for which a place that can only be read has no room
        print(f"{kind} {name}: {directory} is there", flush=True)
        return str(directory)
    with one_at_a_time(directory):
        if not (missing := missing_of(kind, directory)):
            return str(directory)
        # What somebody else began there goes on there; it may be a mount point, which cannot be replaced.
        began_there = directory.is_dir() and any(directory.iterdir())
        if began_there:
            print(f"{kind} {name}: {directory} is not whole ({missing}): it is completed", flush=True)
        target = directory if began_there else atomic_io.unfinished(directory)
        command = [_program(hub, kind, name, directory), *hub.words[kind], name, hub.directory_flag, str(target)]
        advice = f"put it at {directory} yourself, or try again where {source} is reached"
        try:
            exec_command(shlex.join(command))
        except CommandError as error:
            raise SlimeError(f"{kind} {name} was not downloaded from {source} ({error}): {advice}") from None
        if missing := missing_of(kind, target):
            raise SlimeError(f"{kind} {name}: {source} gave it to {target} without {missing}: {advice}")
        if not began_there:
            with contextlib.suppress(OSError):  # it is not there, or there is something in it
                directory.rmdir()
            target.rename(directory)
    return str(directory)


def missing_of(kind: str, directory: Path) -> str:
    """What a model or data set in ``directory`` lacks to be whole, as far as that can be seen; empty where it is."""
    if not directory.is_dir():
        return "the directory"
    begun = [path for pattern in _BEGUN for path in directory.glob(pattern) if path.is_file()]
    if begun:
        return f"the rest of {begun[0].relative_to(directory)}, which a download left"
    if kind == "dataset":
        return "" if any(not path.name.startswith(".") for path in directory.iterdir()) else "any file"
    if not (directory / "config.json").is_file():
        return "config.json"
    indices = list(directory.glob("*.index.json"))
    for index in indices:
        try:
            wanted = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, LookupError, AttributeError, TypeError):
            return f"a {index.name} that can be read"
        if absent := sorted(name for name in wanted if not (directory / name).is_file()):
            return f"{absent[0]}, which {index.name} names"
    return "" if indices or any(any(directory.glob(pattern)) for pattern in _WEIGHTS) else "weights"


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Within the block no other process of this user's runs is in such a block for ``path``, also on other hosts.

    The lock is the file ``.NAME.lock`` beside ``path``, which stays; a process that ends, however, lets go of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{path.name}.lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that makes {path}", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _program(hub: _Hub, kind: str, name: str, directory: Path) -> str:
    """The program of this python's environment, or else of PATH."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for program in hub.programs:
        if found := shutil.which(program, path=places):
            return found
    raise BadInputError(
        f"{kind} {name}: {' and '.join(hub.programs)} are not installed to download it: pip install {hub.package}, or "
        f"put it at {directory} yourself"
    )
