"""Images, video and sound by reference: a content hash, and where the bytes are.

A reference is what samples hold, so that the members of a group share one, and copies, buffers, checkpoints and debug
data stay small. The bytes are read where they are needed: by a processor when a prompt is tokenised, and by a trainer
one micro-batch at a time.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MARK = "__media__"
"""What a reference's plain form has its hash under."""
_ATOMS = {type(None), bool, int, float, str}
_CHUNK = 1 << 20


class MediaError(ValueError):
    """Bytes are not there, or are others than referred to; one line that names the file."""


@dataclass(frozen=True)
class MediaRef:
    """One item; equal ones have the same bytes."""

    sha256: str
    """Of the bytes, in hexadecimal."""
    size: int
    """In bytes."""
    kind: str
    """What processors go by: image, video or audio."""
    where: str | Callable[[], bytes]
    """A file's absolute path, as it is on every host that loads it; or what gets the bytes, as from an object store."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MediaRef) and (self.sha256, self.kind) == (other.sha256, other.kind)

    def __hash__(self) -> int:
        return hash((self.sha256, self.kind))

    def load(self) -> bytes:
        """The bytes; MediaError where the file cannot be read, or has changed since it was referred to."""
        try:
            data = self.where() if callable(self.where) else Path(self.where).read_bytes()
        except OSError as error:
            raise MediaError(
                f"{self}: {error.strerror or error}; it must be readable on every host that trains or generates"
            ) from error
        except Exception as error:  # of whatever gets the bytes
            raise MediaError(f"{self}: getting its bytes raised {error!r}") from error
        if len(data) != self.size or hashlib.sha256(data).hexdigest() != self.sha256:
            raise MediaError(f"{self}: it has changed since the sample that refers to it was made")
        return data

    def __str__(self) -> str:
        return f"{self.kind} {self.sha256[:12] if callable(self.where) else self.where}"


def refer(path: str | Path, kind: str = "image") -> MediaRef:
    """A reference to a file, which is read once for its hash and stays where it is; MediaError where it cannot be
    read."""
    file, digest, size = Path(os.path.abspath(path)), hashlib.sha256(), 0
    try:
        with open(file, "rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
    except OSError as error:
        raise MediaError(f"{kind} {file}: {error.strerror or error}") from error
    return MediaRef(digest.hexdigest(), size, kind, str(file))


def keep(data: bytes, directory: str | Path, kind: str = "image") -> MediaRef:
    """A reference to bytes that are in no file yet, such as those of a URL: they are written once, under their hash, to
    ``directory`` (for example ``args.run_dir + "/media"``), which is made if need be; OSError where it cannot be
    written."""
    sha256 = hashlib.sha256(data).hexdigest()
    path = Path(os.path.abspath(directory), sha256[:2], sha256)
    if not path.exists() or path.stat().st_size != len(data):  # of a host that went down while it was written
        path.parent.mkdir(parents=True, exist_ok=True)
        # Renamed into place: several processes may keep the same bytes, and none may read half of them.
        unfinished = path.with_name(f".{sha256}.{os.getpid()}.{threading.get_ident()}")
        try:
            unfinished.write_bytes(data)
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
    return MediaRef(sha256, len(data), kind, str(path))


def are_references(value: Any) -> bool:
    """Whether it is a list or tuple of references alone."""
    return isinstance(value, (list, tuple)) and all(isinstance(item, MediaRef) for item in value)


def to_plain(value: Any) -> Any:
    """References within lists, tuples and dicts as dicts of text and numbers; other values as they are. MediaError
    where the bytes are not in a file, which alone outlives a run."""
    if isinstance(value, MediaRef):
        if callable(value.where):
            raise MediaError(f"{value}: its bytes are in no file, and would not outlive the run: `keep` them")
        return {_MARK: value.sha256, "size": value.size, "kind": value.kind, "where": value.where}
    return _with_items(value, to_plain)


def from_plain(value: Any) -> Any:
    """The inverse of `to_plain`."""
    if isinstance(value, dict) and _MARK in value:
        return MediaRef(value[_MARK], value["size"], value["kind"], value["where"])
    return _with_items(value, from_plain)


def _with_items(value: Any, changed: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: changed(item) for key, item in value.items()}
    if type(value) not in (list, tuple) or all(type(item) in _ATOMS for item in value):
        return value
    return type(value)(changed(item) for item in value)
