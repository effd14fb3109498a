"""Pipes to a program in a sandbox: what it prints, up to a bound, and what it is to read."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from slime.agent.sandbox.protocol import FileContent, as_written

_CHUNK = 1 << 16


class Reader:
    """One output of a program; ``theirs`` is the end that the program gets."""

    def __init__(self, loop: asyncio.AbstractEventLoop, most: int) -> None:
        self._loop = loop
        self._most = most
        self._seen = 0
        self._kept = bytearray()
        self._ours: int | None
        self._ours, self.theirs = os.pipe()
        os.set_blocking(self._ours, False)

    def start(self) -> None:
        """Read from now on; the program has its end."""
        self._close_theirs()
        assert self._ours is not None
        self._loop.add_reader(self._ours, self._read)

    def text(self) -> str:
        """What was printed until now, though processes in the background may hold the pipe open."""
        while self._ours is not None and self._read():
            pass
        return self._kept.decode(errors="replace")

    @property
    def cut(self) -> bool:
        """Whether it was more than is kept."""
        return self._seen > self._most

    def close(self) -> None:
        self._close_theirs()
        if self._ours is not None:
            self._loop.remove_reader(self._ours)
            os.close(self._ours)
            self._ours = None

    def _close_theirs(self) -> None:
        if self.theirs >= 0:
            os.close(self.theirs)
            self.theirs = -1

    def _read(self) -> bool:
        """Whether there was something."""
        assert self._ours is not None
        try:
            data = os.read(self._ours, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        self._seen += len(data)
        self._kept += data[: max(0, self._most - len(self._kept))]
        return True


@contextlib.asynccontextmanager
async def feed(content: FileContent | None) -> AsyncIterator[int]:
    """The end of a pipe that the content comes out of, written as it is read; no content is an empty one.

    Raises:
        OSError: a file of the host cannot be read.
    """
    if content is None:
        descriptor = os.open("/dev/null", os.O_RDONLY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
        return
    source = as_written(content)
    opened = source.open("rb") if isinstance(source, Path) else source
    theirs, ours = os.pipe()
    writing = asyncio.ensure_future(asyncio.to_thread(_write, ours, opened))
    try:
        yield theirs
    finally:
        os.close(theirs)  # a writer that is not read any more ends by that
        await writing


def _write(descriptor: int, source: BinaryIO | bytes) -> None:
    with contextlib.suppress(BrokenPipeError), open(descriptor, "wb", buffering=0) as pipe:
        if isinstance(source, bytes):
            left = memoryview(source)
            while left:
                left = left[pipe.write(left) :]
            return
        with source:
            while data := source.read(_CHUNK):
                pipe.write(data)
