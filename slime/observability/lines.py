"""A file of lines that others read while it is written, on a disk that may be full."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from slime.files.storage import why_not_written, writing

logger = logging.getLogger(__name__)

_MOST_BYTES = 256 << 20


class LineFile:
    """Lines are appended whole or not at all; what follows the last line feed is on its way, or lost with its host."""

    def __init__(self, path: Path, *, turns: bool = False) -> None:
        """``turns``: of 256 MiB and more it becomes ``<path>.1``, in the place of that one, and another is begun."""
        self._path, self._turns, self._opened, self._warned = path, turns, False, False
        self.place = "--run-dir", str(path)

    def open(self) -> LineFile:
        """Open or make it, which otherwise the first line does; StorageError where it cannot be."""
        with writing(*self.place):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Without a buffer: what a full disk does not take must not be kept for the file's end.
            self._file, self._opened = self._path.open("ab+", buffering=0), True
            # A host that went down may have left half a line; the next one must not be appended to it.
            if self._file.seek(0, os.SEEK_END) > 0:
                self._file.seek(-1, os.SEEK_END)
                if self._file.read(1) != b"\n":
                    self._file.write(b"\n")
        return self

    def append(self, lines: bytes) -> None:
        """Write one or more lines, each with its line feed; after an OSError or StorageError none of them is there."""
        if not self._opened:
            self.open()
        end = self._file.seek(0, os.SEEK_END)
        if self._turns and end > _MOST_BYTES:
            self.close()
            self._path.replace(f"{self._path}.1")
            return self.open().append(lines)
        try:
            written = self._file.write(lines)
            if written != len(lines):  # the disk is full now; a further try gets the error
                self._file.write(lines[written:])
        except OSError:
            self._file.truncate(end)
            raise

    def try_to_append(self, lines: Callable[[], str]) -> None:
        """The same of what ``lines`` gives; where that fails they are lost, with one warning."""
        try:
            self.append(lines().encode(errors="replace"))
        except Exception as error:
            if not self._warned:
                self._warned = True
                why = why_not_written(error, *self.place) or f"{self._path}: {error!r}"
                logger.warning("%s; the run goes on, and lines are lost there until that is mended", why)

    def close(self) -> None:
        """Close it."""
        if self._opened:
            self._file.close()
