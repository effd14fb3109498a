"""What a check finds, and what it may ask."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Level(Enum):
    """How bad it is; the value is the word that is printed."""

    FINE = "ok"
    NOTE = "note"
    WARNING = "warning"
    STOPS = "STOPS"
    """A run would end of it, or not begin."""


@dataclass(frozen=True)
class Finding:
    """One thing that a check has seen."""

    level: Level
    text: str


def fine(text: str) -> Finding:
    """As it should be."""
    return Finding(Level.FINE, text)


def note(text: str) -> Finding:
    """Good to know."""
    return Finding(Level.NOTE, text)


def warning(text: str) -> Finding:
    """May cost time, or end some runs."""
    return Finding(Level.WARNING, text)


def stops(text: str) -> Finding:
    """Ends a run."""
    return Finding(Level.STOPS, text)


def installed_version(package: str) -> str | None:
    """Of this Python's environment; None where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def printed_by(words: Sequence[str], timeout: float = 30.0) -> str | None:
    """What a program prints; None where it is not there, fails, or takes longer than ``timeout`` seconds."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


@dataclass
class Setting:
    """What to look at, and the ways to ask, which tests replace."""

    run_dir: Path | None = None
    directories: tuple[Path, ...] = ()
    ports: tuple[int, ...] = ()
    root: Path = ROOT
    shared_memory: Path = Path("/dev/shm")
    version_of: Callable[[str], str | None] = installed_version
    printed_by: Callable[..., str | None] = printed_by
    self_test_s: float = 300.0
    _options: dict[str, str] | None = field(default=None, repr=False)

    @property
    def options(self) -> dict[str, str]:
        """The values in ``config.yaml`` of the run's directory that are one word, as text; none without one."""
        if self._options is None:
            file = None if self.run_dir is None else self.run_dir / "config.yaml"
            text = file.read_text(errors="replace") if file is not None and file.is_file() else ""
            found = re.findall(r"^\s*([a-z_0-9]+): *['\"]?([^\s'\"]+)['\"]?$", text, re.MULTILINE)
            self._options = {name: value for name, value in found if value not in ("null", "~")}
        return self._options

    @property
    def has_gpus(self) -> bool:
        """Whether NVIDIA's driver lists any, as scripts/install.sh asks."""
        return bool((self.printed_by(["nvidia-smi", "-L"]) or "").strip())


@dataclass(frozen=True)
class Check:
    """A row of the table: its name, what looks, and what to do where it does not find what it should."""

    name: str
    look: Callable[[Setting], Iterable[Finding]]
    advice: str
