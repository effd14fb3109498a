"""The newest weights that a run has written (``--update-weight-transport disk``), as files for who shares no disk with
it: `tools/pull_versions.py` fetches them."""

from __future__ import annotations

import hashlib
import re
import threading
from argparse import Namespace
from dataclasses import asdict, dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from slime.files.exports import weights_directory

_NAME = re.compile(r"weight_v(\d{6,})")
_RANGE = re.compile(r"bytes=(\d+)-")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class VersionFile:
    """One file of a version."""

    name: str
    size: int
    sha256: str


class VersionFiles:
    """Those of the newest complete version. The run removes a version when engines have the next one."""

    def __init__(self, args: Namespace) -> None:
        self._directory = weights_directory(args) if args.update_weight_transport == "disk" else None
        self._known: dict[tuple[int, int], list[VersionFile]] = {}
        """By version and directory: a push that is made again replaces that."""
        self._changing = threading.Lock()

    def answer(self, handler: BaseHTTPRequestHandler, path: str) -> tuple[int, Any] | None:
        """Of ``newest``, or the bytes of a file, ``<version>/<name>``: status and answer; None where they are sent."""
        if path == "newest":
            return self._newest()
        return self._send(handler, *path.partition("/")[::2])

    def _newest(self) -> tuple[int, Any]:
        if self._directory is None:
            return HTTPStatus.NOT_FOUND, {"error": "the run writes no versions: --update-weight-transport is not disk"}
        found = sorted((int(m[1]), path) for path in self._directory.glob("*") if (m := _NAME.fullmatch(path.name)))
        if not found:
            return HTTPStatus.NOT_FOUND, {"error": "no version is written yet"}
        version, directory = found[-1]
        try:
            files = self._files(version, directory)
        except FileNotFoundError:
            return HTTPStatus.NOT_FOUND, {"error": f"version {version} was removed meanwhile"}
        return HTTPStatus.OK, {"version": version, "files": [asdict(file) for file in files]}

    def _send(self, handler: BaseHTTPRequestHandler, version: str, name: str) -> tuple[int, Any] | None:
        known = next((files for (number, _), files in list(self._known.items()) if str(number) == version), [])
        if self._directory is None or name not in (file.name for file in known):
            return HTTPStatus.NOT_FOUND, {"error": f"there is no file {name} of version {version}"}
        begin = int(found[1]) if (found := _RANGE.fullmatch(handler.headers["Range"] or "")) else 0
        try:
            file = (self._directory / f"weight_v{int(version):06d}" / name).open("rb")
        except FileNotFoundError:
            return HTTPStatus.NOT_FOUND, {"error": f"version {version} was removed meanwhile"}
        with file:
            size = file.seek(0, 2)
            if begin > size:
                return HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, {"error": f"{name} has {size} bytes"}
            file.seek(begin)
            handler.send_response(HTTPStatus.PARTIAL_CONTENT if found else HTTPStatus.OK)
            handler.send_header("Content-Length", str(size - begin))
            handler.end_headers()
            while chunk := file.read(_CHUNK):
                handler.wfile.write(chunk)
        return None

    def _files(self, version: int, directory: Path) -> list[VersionFile]:
        with self._changing:  # several that ask at once wait for one that reads
            key = version, directory.stat().st_ino
            if key not in self._known:
                found = [_described(path) for path in sorted(directory.iterdir()) if path.is_file()]
                self._known = {key: found}
            return self._known[key]


def _described(path: Path) -> VersionFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return VersionFile(path.name, file.tell(), digest.hexdigest())
