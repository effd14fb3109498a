"""Keep a server that shares no disk with a run at the weights that the run's engines have.

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
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.entry.installation import check_installation

check_installation()

import requests  # noqa: E402

from slime.backends.sglang.client import EngineControl, EngineError  # noqa: E402
from slime.backends.sglang.external import KEY_VARIABLES  # noqa: E402
from slime.driver.control.version_files import PULLER, VersionFile  # noqa: E402
from slime.files import atomic_io  # noqa: E402
from slime.options.errors import OptionError  # noqa: E402
from slime.options.serving.external import normalize_external_engine_addr  # noqa: E402
from slime.utils.http_utils import ask_directly  # noqa: E402

_ANSWER_S = 60.0
_CHUNK = 1 << 20
_CONTROL_KEY = "SLIME_CONTROL_KEY"
_COPIES = "weight_v*"


class PullError(Exception):
    """A version could not be fetched; another try may do."""


@dataclass(frozen=True)
class Version:
    """What a run offers."""

    number: int
    digest: str
    """Of its number and files. A run that goes back makes other versions of the same numbers, and so do other runs."""
    files: tuple[VersionFile, ...]

    @classmethod
    def of(cls, told: dict[str, Any]) -> Version | None:
        """That of an answer; None where engines have confirmed none yet."""
        try:
            if told["version"] is None:
                return None
            number, digest = int(told["version"]), str(told["digest"])
            files = tuple(VersionFile(**file) for file in told["files"])
        except (KeyError, TypeError, ValueError) as error:
            raise PullError(f"the run does not answer as this release's runs do: {error!r}") from None
        for name in [digest, *(file.name for file in files)]:
            if "/" in name or not name.strip("."):
                raise PullError(f"version {number}: {name!r} is not the name of a file")
        return cls(number, digest, files)

    def __str__(self) -> str:
        return f"version {self.number}"

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(file.size for file in self.files)


class Versions:
    """Those of a run, and their copies in a directory."""

    def __init__(self, url: str, key: str, directory: Path, timeout: float) -> None:
        self._who, self._url, self._directory, self._timeout = f"the run at {url}", f"{url}/weights", directory, timeout
        who = hashlib.sha256(f"{socket.gethostname()}:{directory}".encode()).hexdigest()  # the same when started again
        self._headers = {"Authorization": f"Bearer {key}", PULLER: who}
        self._half: Version | None = None
        """What has been fetched in part."""

    def wanted(self) -> Version | None:
        """What the server is to have: the version that was begun, as long as the run keeps it, or the newest."""
        if self._half is not None:
            return self._half
        with self._ask("newest", {}, self._timeout) as reply:  # which has read all of it before it answers
            return Version.of(reply.json())

    def copy_of(self, version: Version) -> Path:
        """Where the copy is, or will be, once it is complete. Its name says of which version, of all that have the
        number: by that the server tells what it has loaded."""
        return self._directory / f"weight_v{version.number:06d}-{version.digest[:16]}"

    def fetch(self, version: Version) -> Path:
        """The copy, complete."""
        final, self._half = self.copy_of(version), version
        staging = atomic_io.unfinished(final)
        for other in atomic_io.leftovers(self._directory, _COPIES):
            if other != staging:  # of versions that were given up
                shutil.rmtree(other)
        if final.exists():  # which the server does not have, or no more: it is checked again
            shutil.rmtree(staging, ignore_errors=True)
            final.rename(staging)
        staging.mkdir(parents=True, exist_ok=True)
        for name in {path.name for path in staging.iterdir()} - {file.name for file in version.files}:
            (staging / name).unlink()
        for file in version.files:
            self._fetch_file(version, file, staging / file.name)
        atomic_io.commit_directory(final)
        self._half = None
        return final

    def keep_only(self, copy: Path) -> None:
        """Remove the other copies."""
        for other in self._directory.glob(_COPIES):
            if other != copy:
                shutil.rmtree(other)

    def _fetch_file(self, version: Version, file: VersionFile, path: Path) -> None:
        begin = path.stat().st_size if path.exists() else 0
        if begin < file.size or not path.exists():
            there, rest = f"{version.digest}/{file.name}", {"Range": f"bytes={begin}-"} if begin else {}
            with self._ask(there, rest, _ANSWER_S) as reply, path.open("ab" if begin else "wb") as target:
                _copy(reply, target, f"{self._who}: {file.name}")
        with path.open("rb") as written:
            digest = hashlib.file_digest(written, "sha256").hexdigest()
            found = written.tell()
        if (found, digest) != (file.size, file.sha256):
            path.unlink()
            what = f"{version}: {file.name} has {found} bytes of {file.size}"
            raise PullError(f"{what}, or another SHA-256: it is fetched anew")

    def _ask(self, path: str, headers: dict[str, str], timeout: float) -> requests.Response:
        limits, url = (min(_ANSWER_S, timeout), timeout), f"{self._url}/{path}"
        try:
            reply = ask_directly("GET", url, headers=self._headers | headers, timeout=limits, stream=True)
        except requests.RequestException as error:
            raise PullError(f"{self._who} does not answer: {error}") from None
        if not reply.ok:
            if reply.status_code == requests.codes.not_found:
                self._half = None
            raise PullError(f"{self._who}: {path}: status {reply.status_code}: {reply.text[:300]}")
        return reply


def _copy(reply: requests.Response, target: Any, what: str) -> None:
    try:
        for chunk in reply.iter_content(_CHUNK):
            target.write(chunk)
    except requests.RequestException as error:  # the next try goes on from here
        raise PullError(f"{what}: {error}") from None


def pull(versions: Versions, server: EngineControl) -> str | None:
    """Bring the server to the version that engines have: a line on it, empty where it has that already; None where
    there is none yet."""
    version = versions.wanted()
    if version is None:
        return None
    expected = str(version.number), str(versions.copy_of(version))
    if _loaded(server) == expected:
        return ""
    began = time.monotonic()
    copy = versions.fetch(version)
    fetched = time.monotonic()
    server.load_version(str(copy), str(version.number))
    if (told := _loaded(server)) != expected:
        raise PullError(f"the server says that it has version {told[0]} of {told[1]} instead of {version} of {copy}")
    versions.keep_only(copy)
    return (
        f"{version}: {len(version.files)} files, {version.size / 2**20:.1f} MiB, fetched in {fetched - began:.1f} s, "
        f"loaded in {time.monotonic() - fetched:.1f} s"
    )


def _loaded(server: EngineControl) -> tuple[str, str]:
    """The version that a server says it has, and from where it was loaded."""
    told = server.model_info()
    return str(told["weight_version"]), str(told.get("model_path"))


def main(words: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN_URL")
    parser.add_argument("server", metavar="SERVER_URL")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="directory that the server reads")
    parser.add_argument("--once", action="store_true", help="end when the server has a version of the run")
    parser.add_argument("--poll", type=float, default=10.0, help="seconds between two looks (default 10)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds without success to end after (600)")
    args = parser.parse_args(words)
    key, keys = os.environ.get(_CONTROL_KEY), [os.environ.get(name) for name in KEY_VARIABLES]
    if not key:
        parser.error(f"{_CONTROL_KEY} is not set: it is the key in engines.json of the run's directory")
    try:
        run, url = (normalize_external_engine_addr(addr) for addr in (args.run, args.server))
    except OptionError as error:
        parser.error(str(error))
    args.to.mkdir(parents=True, exist_ok=True)
    versions = Versions(run, key, args.to.absolute(), args.timeout)
    server = EngineControl(url, keys[1], keys[0], args.timeout)
    succeeded = time.monotonic()
    while time.monotonic() - succeeded < args.timeout:
        try:
            line = pull(versions, server)
            if line:
                print(line, flush=True)
            if args.once and line is not None:
                return 0
            if not args.once:
                succeeded = time.monotonic()
        except (PullError, EngineError, OSError) as error:
            print(f"{parser.prog}: {error}", file=sys.stderr, flush=True)
        time.sleep(args.poll)
    return 1


if __name__ == "__main__":
    sys.exit(main())
