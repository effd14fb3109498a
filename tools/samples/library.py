"""Saved rollouts by their names, and what the page of them asks for."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slime.utils.errors import BadInputError
from tools.samples.rollouts import Query, Rollout, list_samples, read_rollout, show_sample

PAGE = Path(__file__).with_name("page.html")


class Library:
    """The files that a command line names; directories are looked through again at every list."""

    pages: Mapping[str, Path] = MappingProxyType({"/": PAGE})
    routes = frozenset({"/api/rollouts", "/api/samples", "/api/sample"})

    def __init__(self, paths: list[Path], train_paths: list[Path], tokenizer: Callable[[], Any]) -> None:
        """A path is a file, a directory, or, with ``*`` in its name, all files of a directory that are called so.
        ``tokenizer`` gives the model's, or None, and is called when a sample is first asked for."""
        self._paths = paths
        self._train_paths = [*train_paths, *(p for p in paths if (p / "train_data").is_dir())]
        self._tokenizer = functools.cache(tokenizer)
        self._lock = threading.Lock()
        # What a rollout was read from may be written again, so that it is told apart by its time, too.
        self._read = functools.lru_cache(maxsize=2)(self._read_file)

    def files(self) -> dict[str, Path]:
        """By the name that the page shows: the file's, or its path where two files have one name.

        Raises:
            BadInputError: there are none.
        """
        found = [file for path in self._paths for file in _files_of(path, "rollout_data")]
        if not found:
            raise BadInputError(f"no *.pt files of saved rollouts in {', '.join(map(str, self._paths))}")
        names = [file.name for file in found]
        return {str(f) if names.count(f.name) > 1 else f.name: f for f in found}

    def rollout(self, name: str) -> Rollout:
        """The rollout of one of the `files`."""
        file = self.files().get(name)
        if file is None:
            raise BadInputError(f"there is no rollout {name!r}")
        train_files = tuple(file for path in self._train_paths for file in _files_of(path, "train_data"))
        with self._lock:
            return self._read(file, file.stat().st_mtime_ns, train_files)

    def _read_file(self, file: Path, changed: int, train_files: tuple[Path, ...]) -> Rollout:
        return read_rollout(file, train_files)

    def answer(self, route: str, values: dict[str, str]) -> Any:
        """What the page asks for."""
        if route == "/api/rollouts":
            return {"names": list(self.files())}
        rollout = self.rollout(values.pop("rollout", ""))
        if route == "/api/samples":
            return list_samples(rollout, Query.parse(values))
        place = values.get("place", "")
        if not place.isdecimal():
            raise BadInputError(f"place={place!r} is not a number")
        return show_sample(rollout, int(place), self._tokenizer())


def _files_of(path: Path, inside: str) -> list[Path]:
    """A file itself; of a directory, or its subdirectory ``inside``, the ``*.pt`` in the order of their numbers."""
    if path.is_file():
        return [path]
    if "*" in path.name:
        return _in_order(path.parent, path.name)
    directory = path / inside if (path / inside).is_dir() else path
    if not directory.is_dir():
        raise BadInputError(f"{path}: no such file or directory")
    return _in_order(directory, "*.pt")


def _in_order(directory: Path, pattern: str) -> list[Path]:
    files = [file for file in directory.glob(pattern) if not file.name.startswith(".")]
    return sorted(files, key=lambda file: [int(s) if s.isdecimal() else s for s in re.split(r"(\d+)", file.name)])
