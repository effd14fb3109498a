"""Keep a server that shares no disk with a run at the newest weights that the run has written.

python3 tools/pull_versions.py http://RUN_HOST:PORT http://127.0.0.1:30000 --to DIR

It runs beside the server. The run is one with --update-weight-transport disk, whose engines.json says its address and
key: give the key by SLIME_CONTROL_KEY, and the server's keys, where it asks for any, by SLIME_API_KEY and
SLIME_ADMIN_API_KEY. A version is fetched into DIR file by file, going on where an earlier try ended, checked by size
and SHA-256, renamed into place, and loaded when the requests that the server has are done. Status 1 where the run or
the server does not answer, or refuses, for --timeout seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.entry.installation import check_installation

check_installation()

import requests  # noqa: E402

from slime.backends.sglang.client import EngineControl, EngineError  # noqa: E402
from slime.files import atomic_io  # noqa: E402
from slime.options.errors import OptionError  # noqa: E402
from slime.options.serving.external import normalize_external_engine_addr  # noqa: E402

_ANSWER_S = 60.0
_CHUNK = 1 << 20
_CONTROL_KEY, _SERVER_KEYS = "SLIME_CONTROL_KEY", ("SLIME_API_KEY", "SLIME_ADMIN_API_KEY")


class PullError(Exception):
    """A version could not be fetched; another try may do."""


class Versions:
    """Those that a run serves."""

    def __init__(self, url: str, key: str, directory: Path) -> None:
        self._url, self._directory = url, directory
        self._headers = {"Authorization": f"Bearer {key}"}

    def newest(self) -> tuple[int, list[dict[str, Any]]] | None:
        """Its number and files; None where the run has written none yet."""
        with self._ask("/weights/newest", {}) as reply:
            if reply.status_code == 404 and "yet" in reply.text:
                return None
            if not reply.ok:
                raise PullError(f"the run at {self._url}: status {reply.status_code}: {reply.text[:300]}")
            found = reply.json()
            return int(found["version"]), list(found["files"])

    def fetch(self, version: int, files: Sequence[dict[str, Any]]) -> Path:
        """The directory of a version, complete."""
        final = self._directory / f"weight_v{version:06d}"
        if final.exists():
            return final
        staging = atomic_io.unfinished(final)
        staging.mkdir(parents=True, exist_ok=True)
        for other in {path.name for path in staging.iterdir()} - {file["name"] for file in files}:
            (staging / other).unlink()
        for file in files:
            self._fetch_file(version, file, staging)
        atomic_io.commit_directory(final)
        return final

    def _fetch_file(self, version: int, file: dict[str, Any], staging: Path) -> None:
        name, size = str(file["name"]), int(file["size"])
        if Path(name).name != name:
            raise PullError(f"version {version}: {name!r} is not the name of a file")
        path = staging / name
        begin = path.stat().st_size if path.exists() else 0
        if begin < size or not path.exists():
            with self._ask(f"/weights/{version}/{name}", {"Range": f"bytes={begin}-"} if begin else {}) as reply:
                if not reply.ok:
                    raise PullError(f"the run at {self._url}: {name}: status {reply.status_code}: {reply.text[:300]}")
                with path.open("ab" if begin else "wb") as target:
                    _copy(reply, target, f"the run at {self._url}: {name}")
        with path.open("rb") as written:
            digest = hashlib.file_digest(written, "sha256").hexdigest()
            found = written.tell()
        if (found, digest) != (size, file["sha256"]):
            path.unlink()
            raise PullError(f"version {version}: {name} has {found} bytes of {size}, or another SHA-256: fetched anew")

    def _ask(self, path: str, headers: dict[str, str]) -> requests.Response:
        session = requests.Session()
        session.trust_env = False  # no proxy of the host stands between
        try:
            return session.get(self._url + path, headers=self._headers | headers, timeout=_ANSWER_S, stream=True)
        except requests.RequestException as error:
            raise PullError(f"the run at {self._url} does not answer: {error}") from None


def _copy(reply: requests.Response, target: Any, what: str) -> None:
    try:
        for chunk in reply.iter_content(_CHUNK):
            target.write(chunk)
    except requests.RequestException as error:  # the next try goes on from here
        raise PullError(f"{what}: {error}") from None


def pull(versions: Versions, server: EngineControl, directory: Path) -> str | None:
    """Bring the server to the newest version: a line on it, None where it has that already, or there is none."""
    found = versions.newest()
    if found is None or server.weight_version() == str(found[0]):
        return None
    began, (version, files) = time.monotonic(), found
    path = versions.fetch(version, files)
    fetched = time.monotonic()
    server.load_version(str(path), str(version))
    if (told := server.weight_version()) != str(version):
        raise PullError(f"the server says that it has version {told} instead of {version}")
    for other in directory.glob("weight_v*"):
        if other != path:
            shutil.rmtree(other)
    size = sum(int(file["size"]) for file in files)
    return (
        f"version {version}: {len(files)} files, {size / 2**20:.1f} MiB, fetched in {fetched - began:.1f} s, loaded in "
        f"{time.monotonic() - fetched:.1f} s"
    )


def main(words: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN_URL")
    parser.add_argument("server", metavar="SERVER_URL")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="directory that the server reads")
    parser.add_argument("--once", action="store_true", help="end when the server has the newest version")
    parser.add_argument("--poll", type=float, default=10.0, help="seconds between two looks (default 10)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds without success to end after (600)")
    args = parser.parse_args(words)
    key, keys = os.environ.get(_CONTROL_KEY), [os.environ.get(name) for name in _SERVER_KEYS]
    if not key:
        parser.error(f"{_CONTROL_KEY} is not set: it is the key in engines.json of the run's directory")
    try:
        run, url = (normalize_external_engine_addr(addr) for addr in (args.run, args.server))
    except OptionError as error:
        parser.error(str(error))
    args.to.mkdir(parents=True, exist_ok=True)
    versions, server = Versions(run, key, args.to.absolute()), EngineControl(url, keys[1], keys[0], args.timeout)
    succeeded = time.monotonic()
    while time.monotonic() - succeeded < args.timeout:
        try:
            line = pull(versions, server, args.to.absolute())
            if line is not None:
                print(line, flush=True)
            if args.once and server.weight_version().isdecimal():
                return 0
            if not args.once:
                succeeded = time.monotonic()
        except (PullError, EngineError, OSError) as error:
            print(f"{parser.prog}: {error}", file=sys.stderr, flush=True)
        time.sleep(args.poll)
    return 1


if __name__ == "__main__":
    sys.exit(main())
