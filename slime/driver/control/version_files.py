"""The weights that a run's engines have (``--update-weight-transport disk``), as files for who shares no disk with it:
`tools/pull_versions.py` fetches them.

Only what is final is offered: the version that the engines have confirmed, after a user's function has changed it and
the push was proved. The run removes a version for the next one; hard links keep the files of one that is being fetched.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from slime.files.exports import weights_directory

_RANGE = re.compile(r"bytes=(\d+)-")
_CHUNK = 1 << 20
_MOST_KEPT = 2
"""Versions at a time, however many fetch: that many there are on the disk beside what the run itself keeps."""
_PATIENCE_S = 120.0
"""With one that fetches and asks for nothing more: it may compute a digest, or be gone."""
PULLER = "Slime-Puller"
"""The header by which one that fetches says who it is. It has one version at a time."""


@dataclass(frozen=True)
class VersionFile:
    """One file of a version."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Offer:
    """A version that can be fetched."""

    confirmed: tuple[int, int]
    """As `Pushes.confirmed` gave it."""
    directory: Path
    """Where its files are."""
    files: tuple[VersionFile, ...]

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of all of it. A run that has gone back makes a version of the same number anew."""
        described = json.dumps([self.confirmed[0], [asdict(file) for file in self.files]])
        return hashlib.sha256(described.encode()).hexdigest()


class VersionFiles:
    """Those of the version that engines have, and of one more while somebody fetches it."""

    def __init__(self, args: Namespace, confirmed: Callable[[], tuple[int, int] | None]) -> None:
        """``confirmed`` is `Pushes.confirmed`; it is called by other threads."""
        self._directory = weights_directory(args) if args.update_weight_transport == "disk" else None
        self._confirmed = confirmed
        self._offers: list[Offer] = []
        self._fetching: dict[str, tuple[Offer, float]] = {}
        """What each puller fetches, and until when it is waited for."""
        self._closed = False
        self._taking, self._changing = threading.Lock(), threading.Lock()
        self._sweeper: threading.Timer | None = None
        for left in self._directory.glob(".offered_v*") if self._directory is not None else ():
            shutil.rmtree(left, ignore_errors=True)  # by a driver that was killed

    def close(self) -> None:
        """Offer nothing more, and remove the links."""
        with self._changing:
            self._closed = True
            if self._sweeper is not None:
                self._sweeper.cancel()
            self._fetching.clear()
            self._drop(None)

    def answer(self, handler: BaseHTTPRequestHandler, path: str) -> tuple[int, Any] | None:
        """Of ``newest``, or the bytes of a file, ``<digest>/<name>``: status and answer; None where they are sent."""
        puller = handler.headers[PULLER] or str(handler.client_address[0])
        if path == "newest":
            return self._newest(puller)
        return self._send(handler, puller, *path.partition("/")[::2])

    def _newest(self, puller: str) -> tuple[int, Any]:
        if self._directory is None:
            return HTTPStatus.NOT_FOUND, {"error": "the run writes no versions: --update-weight-transport is not disk"}
        with self._taking:  # several that ask at once wait for one that reads
            confirmed = self._confirmed()
            with self._changing:
                self._fetching.pop(puller, None)
                self._drop(confirmed)
            if confirmed is None:
                return HTTPStatus.OK, {"version": None}
            found = next((offer for offer in self._offers if offer.confirmed == confirmed), None)
            if found is None and len(self._offers) >= _MOST_KEPT:
                found = self._offers[-1]
            if found is None and (found := self._take(confirmed, self._directory)) is None:
                why = f"was removed meanwhile, or the driver's host does not see {self._directory}"
                return HTTPStatus.NOT_FOUND, {"error": f"version {confirmed[0]} {why}"}
            self._wait_for(puller, found)
        files = [asdict(file) for file in found.files]
        return HTTPStatus.OK, {"version": found.confirmed[0], "digest": found.digest, "files": files}

    def _take(self, confirmed: tuple[int, int], parent: Path) -> Offer | None:
        """Offer a version; None where the run has begun to remove or to replace it."""
        source = parent / f"weight_v{confirmed[0]:06d}"
        links = parent / f".offered_v{confirmed[0]:06d}_{confirmed[1]}"
        try:
            names = sorted(path.name for path in source.iterdir() if path.is_file())
            directory = links if _link(source, links, names) else source
            same = bool(names) and self._confirmed() == confirmed
            files = tuple(_described(directory / name) for name in names) if same else ()
        except FileNotFoundError:
            same = False
        # Without links the files are the run's own, which may have been replaced while they were read.
        if same and (directory == links or self._confirmed() == confirmed):
            offer = Offer(confirmed, directory, files)
            with self._changing:
                self._offers.append(offer)
                if self._closed:
                    self._drop(None)
                else:
                    self._sweep_later()
            return offer
        shutil.rmtree(links, ignore_errors=True)
        return None

    def _send(self, handler: BaseHTTPRequestHandler, puller: str, digest: str, name: str) -> tuple[int, Any] | None:
        offer = next((offer for offer in list(self._offers) if offer.digest == digest), None)
        if offer is None or name not in (file.name for file in offer.files):
            return HTTPStatus.NOT_FOUND, {"error": f"there is no file {name} of a version {digest}, or no longer"}
        begin = int(found[1]) if (found := _RANGE.fullmatch(handler.headers["Range"] or "")) else 0
        self._wait_for(puller, offer)
        try:
            file = (offer.directory / name).open("rb")
        except FileNotFoundError:
            return HTTPStatus.NOT_FOUND, {"error": f"version {offer.confirmed[0]} was removed meanwhile"}
        with file:
            size = file.seek(0, os.SEEK_END)
            if begin > size:
                return HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, {"error": f"{name} has {size} bytes"}
            file.seek(begin)
            handler.send_response(HTTPStatus.PARTIAL_CONTENT if found else HTTPStatus.OK)
            handler.send_header("Content-Length", str(size - begin))
            handler.end_headers()
            while chunk := file.read(_CHUNK):
                handler.wfile.write(chunk)
                self._wait_for(puller, offer)
        return None

    # ---- what is kept, and for whom

    def _wait_for(self, puller: str, offer: Offer) -> None:
        """Keep the files of what somebody fetches."""
        with self._changing:
            if offer in self._offers:
                self._fetching[puller] = offer, time.monotonic() + _PATIENCE_S

    def _drop(self, confirmed: tuple[int, int] | None) -> None:
        """Remove what nobody fetches, but for the newest, and what the run has gone back behind; within the lock."""
        now = time.monotonic()
        self._fetching = {name: (offer, until) for name, (offer, until) in self._fetching.items() if until > now}
        kept = [offer for offer, _ in self._fetching.values()]
        if confirmed is not None:
            kept = [offer for offer in kept if offer.confirmed[0] <= confirmed[0]]
        for offer in [offer for offer in self._offers if offer.confirmed != confirmed and offer not in kept]:
            self._offers.remove(offer)
            if offer.directory.name.startswith("."):
                shutil.rmtree(offer.directory, ignore_errors=True)

    def _sweep_later(self) -> None:
        if self._sweeper is not None:
            return
        self._sweeper = threading.Timer(_PATIENCE_S, self._sweep)
        self._sweeper.daemon = True
        self._sweeper.start()

    def _sweep(self) -> None:
        """Let go of what a puller has left that asks no more."""
        confirmed = self._confirmed()
        with self._changing:
            self._sweeper = None
            if not self._closed:
                self._drop(confirmed)
                if self._offers:
                    self._sweep_later()


def _link(source: Path, links: Path, names: list[str]) -> bool:
    """Give files a second name each; False on a file system that has none. FileNotFoundError where one is gone."""
    shutil.rmtree(links, ignore_errors=True)
    try:
        links.mkdir()
        for name in names:
            os.link(source / name, links / name)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.rmtree(links, ignore_errors=True)
        return False
    return True


def _described(path: Path) -> VersionFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return VersionFile(path.name, file.tell(), digest.hexdigest())
