"""The flags of an installed package, read in a process of its own and kept in a small cache.

Importing SGLang or megatron-core takes seconds; an argument list is parsed in a fraction of one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from slime.processes.kernel import end_child
from slime.utils.errors import BadInputError
from slime.utils.patching import version_of

READ_TIMEOUT = 300.0
"""Seconds that importing a package may take."""
_END_S = 10.0

_ROOT = Path(__file__).resolve().parents[3]


class InstalledFlagsError(BadInputError):
    """The flags of an installed package could not be read."""


class PendingFlags:
    """A package's flags, read from the cache or by running ``code`` in a new Python process; `result` waits for them,
    and leaving the ``with`` block ends a reading in progress.

    ``code`` gets a path as ``sys.argv[1]`` and writes a JSON list there. Several packages are read at the same time
    when all are started before the first result is asked for. A package that is not installed has no flags.
    """

    def __init__(self, package: str, code: str) -> None:
        self._package = package
        self._version = version_of(package)
        self._file = _cache_file(package, self._version, code)
        self._records = _read_cache(self._file) if self._version else []
        self._process: subprocess.Popen[str] | None = None
        if self._records is None:
            handle, self._output = tempfile.mkstemp(suffix=".json", prefix="slime-flags-")
            os.close(handle)
            env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]))
            command = [sys.executable, "-c", code, self._output]
            self._process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )

    def __enter__(self) -> PendingFlags:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            end_child(self._process, _END_S)
            Path(self._output).unlink(missing_ok=True)
            self._process = None

    def result(self) -> list[dict[str, Any]]:
        """The flags, one dict each; InstalledFlagsError: the package does not import, or not in time."""
        if self._process is not None:
            name = f"{self._package} {self._version}"
            print(f"reading the flags of {name} (kept for next time) ...", file=sys.stderr)
            with self:
                try:
                    _, errors = self._process.communicate(timeout=READ_TIMEOUT)
                except subprocess.TimeoutExpired as error:
                    raise InstalledFlagsError(
                        f"reading the flags of {name} took more than {READ_TIMEOUT:.0f} s"
                    ) from error
                if self._process.returncode != 0:
                    last = (errors.strip().splitlines() or ["no message"])[-1]
                    told = re.sub(r"^slime(\.\w+)+: ", "", last)  # of our own errors the message is the whole story
                    raise InstalledFlagsError(f"reading the flags of {name} failed: {told}")
                self._records = json.loads(Path(self._output).read_text())
            _write_cache(self._file, self._records)
        assert self._records is not None
        return self._records


def _cache_file(package: str, version: str | None, code: str) -> Path:
    """One file for each package version, Python version, environment and version of the reading code."""
    readers = [
        Path(__file__).with_name(name) for name in ("installed.py", "megatron.py", "megatron_names.py", "sglang.py")
    ]
    own = b"".join(file.read_bytes() for file in readers)
    key = hashlib.sha1(own + f"{version} {code} {sys.version} {sys.prefix}".encode()).hexdigest()[:16]
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "slime" / f"{package}-{version}-{key}.json"


def _read_cache(file: Path) -> list[dict[str, Any]] | None:
    """The records of a cache file; None where it is missing, unreadable or not what `_write_cache` writes."""
    try:
        records = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    good = isinstance(records, list) and records and all(isinstance(r, dict) and "flags" in r for r in records)
    return records if good else None


def _write_cache(file: Path, records: list[dict[str, Any]]) -> None:
    """Parsing works without a cache, only slower."""
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(records))
        part.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
