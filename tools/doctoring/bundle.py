"""One archive for a bug report: what the doctor found, versions, and a run's configuration and last lines, without
secrets, prompts and responses."""

from __future__ import annotations

import importlib.metadata
import io
import os
import platform
import tarfile
from collections.abc import Iterator
from pathlib import Path

from slime.utils.redaction import is_secret, redacted_line
from tools.doctoring.findings import Setting

_TAIL = 256 << 10
_SHORTEST = 8
"""Characters of a secret that is struck out wherever it stands."""
_WHOLE = ("config.yaml", "events.jsonl")
_SHOWN = ("NCCL_", "CUDA_", "SGLANG_", "SLIME_", "RAY_", "HF_", "TORCH", "GLOO_", "OMP_", "PYTHON")
"""Prefixes of variables whose values say how this host is to be used; of others, only the name is told."""


def write_bundle(path: Path, report: str, setting: Setting) -> list[str]:
    """Make a ``.tar.gz``; the names of what is in it."""
    secrets = [value for name, value in os.environ.items() if is_secret(name, value) and len(value) >= _SHORTEST]
    secrets.sort(key=len, reverse=True)
    staged = path.with_name(f"{path.name}.tmp")
    names = []
    try:
        with tarfile.open(staged, "w:gz") as archive:
            for name, text in _texts(report, setting):
                lines = (redacted_line(line, secrets) for line in text.splitlines())
                content = "".join(f"{line}\n" for line in lines).encode(errors="replace")
                member = tarfile.TarInfo(f"slime-doctor/{name}")
                member.size, member.mode = len(content), 0o644
                archive.addfile(member, io.BytesIO(content))
                names.append(name)
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)
    return names


def _texts(report: str, setting: Setting) -> Iterator[tuple[str, str]]:
    yield "report.txt", report
    yield "packages.txt", "\n".join(sorted({f"{d.name}=={d.version}" for d in importlib.metadata.distributions()}))
    yield "environment.txt", _environment()
    revision = setting.printed_by(["git", "-C", str(setting.root), "log", "-1", "--format=%H %cI %s"]) or "unknown\n"
    changed = setting.printed_by(["git", "-C", str(setting.root), "status", "--short"]) or ""
    yield "revision.txt", f"{revision}{changed}{platform.platform()}\n"
    if (gpus := setting.printed_by(["nvidia-smi"])) is not None:
        yield "nvidia-smi.txt", gpus
    if setting.run_dir is None:
        return
    for name in _WHOLE:
        if (file := setting.run_dir / name).is_file():
            yield f"run/{name}", _tail(file)
    for file in sorted([*setting.run_dir.glob("metrics.jsonl"), *setting.run_dir.glob("logs/*.log")]):
        yield f"run/{file.relative_to(setting.run_dir)}", _tail(file)


def _environment() -> str:
    """Names of all variables, and values of those that are about the host and no secret."""
    shown = []
    for name, value in sorted(os.environ.items()):
        told = name.startswith(_SHOWN) and not is_secret(name, value)
        shown.append(f"{name}={value}" if told else name)
    return "\n".join(shown)


def _tail(file: Path) -> str:
    with file.open("rb") as content:
        size = content.seek(0, os.SEEK_END)
        content.seek(max(0, size - _TAIL))
        text = content.read().decode(errors="replace")
    # The first line may be a part of one, in which a secret would not be seen for one.
    return text if size <= _TAIL else text.partition("\n")[2]
