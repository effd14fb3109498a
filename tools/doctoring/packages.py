"""The installed packages against requirements/, and what goes without one."""

from __future__ import annotations

import platform
import re
import shutil
import sys
from collections.abc import Iterator

from tools.doctoring.findings import Finding, Setting, fine, note, stops, warning

NEEDED = ("numpy", "torch", "transformers", "ray", "PyYAML", "sglang", "sglang-router", "megatron-core")
INSTEAD = {"sglang-router": "smg"}
"""What does as well."""
PATCHED = ("sglang", "sglang-router", "megatron-core", "ray", "torch", "transformers")
"""Packages whose other releases a run refuses, as the fixes from outside were made for these."""
OPTIONAL = {
    "wandb": "--use-wandb",
    "tensorboard": "--use-tensorboard",
    "mlflow": "--use-mlflow",
    "swanlab": "--use-swanlab",
    "trackio": "--use-trackio",
    "math-verify": "answers that are equal and written otherwise (--rm-type math and dapo)",
    "matplotlib": "the curves of quickstart.py and compare_algorithms.py",
    "torch_memory_saver": "GPU memory that engines give back (--offload-rollout, --colocate)",
    "flash-attn-4": "attention of trainers on GPUs of compute capability 9 and newer (--attention-backend fa4)",
    "transformer_engine": "--transformer-impl transformer_engine",
    "e2b": "agents' sandboxes at E2B",
    "daytona": "agents' sandboxes at Daytona",
    "modal": "agents' sandboxes at Modal",
}
"""By package, what it is for."""
_OLDEST_GLIBC = (2, 34)
_SHOWN = 5
_PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;#]+)", re.MULTILINE)


def python(setting: Setting) -> Iterator[Finding]:
    """The interpreter, the C library and a compiler, which kernels are built by as they are first used."""
    version = ".".join(map(str, sys.version_info[:3]))
    told = f"Python {version} ({sys.executable})"
    yield fine(told) if sys.version_info[:2] in ((3, 11), (3, 12)) else stops(f"{told}: 3.11 and 3.12 are supported")
    kind, glibc = platform.libc_ver()
    parts = tuple(int(part) for part in glibc.split(".")[:2] if part.isdigit())
    if kind == "glibc" and parts < _OLDEST_GLIBC:
        yield stops(f"glibc {glibc}: the wheels of sglang need 2.34 (Ubuntu 22.04, Debian 12)")
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        yield warning("no C compiler on PATH: kernels that are compiled when first used cannot be")


def versions(setting: Setting) -> Iterator[Finding]:
    """Every package of the set that was tested, which requirements/ has for a CPU and for CUDA."""
    missing = [name for name in NEEDED if not any(map(setting.version_of, (name, INSTEAD.get(name, name))))]
    if missing:
        yield stops(f"not installed for {sys.executable}: {', '.join(missing)}")
    kind = _set_of(setting)
    wanted, main = pins(setting, f"constraints-{kind}.txt"), _direct(setting, kind)
    if not wanted:
        yield warning(f"{setting.root / 'requirements'} has no constraints to compare with")
        return
    others = []
    for name, version in wanted.items():
        found = setting.version_of(name)
        if found is None or found.split("+")[0] == version.split("+")[0]:
            continue
        said = f"{name} {found}, tested is {version}"
        if name in PATCHED:
            yield stops(f"{said}: a run refuses it, or does without fixes by --allow-untested-versions")
        elif name in main:
            yield warning(said)
        else:
            others.append(said)
    if others:
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        yield note(f"other releases than the tested ones: {'; '.join(others[:_SHOWN])}{more}")
    agree = [name for name, version in wanted.items() if setting.version_of(name) == version]
    yield fine(f"{len(agree)} of {len(wanted)} packages of the {kind.upper()} set are the tested releases")


def optional(setting: Setting) -> Iterator[Finding]:
    """What goes without a package that is not there."""
    for name, what in OPTIONAL.items():
        if setting.version_of(name) is None:
            yield note(f"{name} is not installed: it is for {what}")
    if not shutil.which("git"):
        yield note("no git: a bug report cannot say which revision this is")


def pins(setting: Setting, file: str) -> dict[str, str]:
    """The exactly pinned packages of a file of requirements/, by their normalised names."""
    path = setting.root / "requirements" / file
    found = _PIN.findall(path.read_text()) if path.is_file() else []
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def _direct(setting: Setting, kind: str) -> set[str]:
    files = ["common.txt", f"{kind}.txt", *(["cpu-nodeps.txt"] if kind == "cpu" else [])]
    return {name for file in files for name in pins(setting, file)}


def _set_of(setting: Setting) -> str:
    """Which set is installed, by its torch; where that is of neither, which one this host should have."""
    torch = (setting.version_of("torch") or "").split("+")[0]
    for kind in ("cpu", "cuda"):
        if torch and torch == pins(setting, f"{kind}.txt").get("torch"):
            return kind
    return "cuda" if setting.has_gpus else "cpu"
