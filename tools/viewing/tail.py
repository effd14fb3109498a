"""Files of lines that others append to: what is new in them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_decode = json.JSONDecoder(parse_constant=str).decode  # JSON has no NaN


class Tail:
    """The lines of a file, each once; what follows the last line feed is on its way, and is held back.

    The file may not be there yet. It may be renamed, as one that became too long, with another begun in its place:
    what was left in the first is read before the second.
    """

    def __init__(self, path: Path, *, last: int | None = None, read: set[tuple[int, int]] | None = None) -> None:
        """``last``: of what is there already, only the lines within so many bytes before its end. ``read``: the files
        that any of several tails has read, also under other names; none is read twice."""
        self.path, self._last, self._read = path, last, read
        self._file: IO[bytes] | None = None
        self._at = 0

    def new(self) -> Iterator[tuple[IO[bytes], int, bytes]]:
        """Each line with the file and the place in it, from which it can be read again."""
        while self._file is not None or self._open():
            assert self._file is not None
            if os.fstat(self._file.fileno()).st_size < self._at:  # written anew
                self._at = 0
            self._file.seek(self._at)
            for line in self._file:
                if not line.endswith(b"\n"):
                    break
                at, self._at = self._at, self._at + len(line)
                yield self._file, at, line
            if not self._is_another():
                return
            self._file, self._at, self._last = None, 0, None

    def _open(self) -> bool:
        try:
            self._file = self.path.open("rb")
        except FileNotFoundError:
            return False
        self._identity = _identity(status := os.fstat(self._file.fileno()))
        if self._read is not None:
            if self._identity in self._read:
                self._file = None
                return False
            self._read.add(self._identity)
        size = status.st_size
        if self._last is not None and size > self._last:
            self._file.seek(size - self._last - 1)
            self._file.readline()  # of which the beginning is left out
            self._at = self._file.tell()
        return True

    def _is_another(self) -> bool:
        try:
            return _identity(self.path.stat()) != self._identity
        except FileNotFoundError:
            return False


def _identity(status: os.stat_result) -> tuple[int, int]:
    """Equal for one file under two names."""
    return status.st_dev, status.st_ino


def object_of(line: bytes) -> dict[str, Any] | None:
    """A line of JSON; None for one that is no object, as a host that went down leaves."""
    try:
        value = _decode(line.decode())
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
