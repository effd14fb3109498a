"""The directories of a run: whether they can be written, how fast, and the caches of libraries."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from slime.files.storage import amount, nearest_directory, why_no_directory
from tools.doctoring.findings import Finding, Setting, fine, note, stops, warning

_OPTIONS = ("run_dir", "save", "save_hf", "update_weight_disk_dir", "dump_details")
_CACHES = ("HF_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "MPLCONFIGDIR")
_PROBE, _BLOCK = 64 << 20, 4 << 20
_SLOW = 50 << 20
"""Bytes a second: a checkpoint of a 7B model then takes half an hour."""
_ROOM = 1 << 30
SESSION_BYTES = 68
"""Bytes that Ray adds to its directory's path, of the 107 that the kernel takes of a socket."""


def directories(setting: Setting) -> Iterator[Finding]:
    """Those that were named, of the run, or the current one: 64 MiB are written there and read again. And Ray's."""
    named = {str(path): "--directory" for path in setting.directories}
    if not named and not setting.options:
        named = {str(Path.cwd()): "the current directory"}
    given = {setting.options.get(name, "").split("{")[0]: f"--{name.replace('_', '-')}" for name in _OPTIONS}
    for place, flag in (named | {place: flag for place, flag in given.items() if place}).items():
        if why := why_no_directory(place):
            yield stops(f"{flag} {place}: {why}")
            continue
        directory = nearest_directory(Path(place).absolute())
        free = shutil.disk_usage(directory).free
        told = f"{flag} {place}: {amount(free)} free"
        if free < _ROOM:
            yield warning(told)
            continue
        written, read = disk_speed(directory)
        told += f", writes {amount(written)}/s, reads {amount(read)}/s"
        yield warning(f"{told}: checkpoints will take long") if written < _SLOW else fine(told)
    yield from _of_ray()


def disk_speed(directory: Path) -> tuple[float, float]:
    """Bytes a second that a file is written with, until the disk has it, and read, most likely out of memory."""
    block = os.urandom(_BLOCK)
    with tempfile.NamedTemporaryFile(prefix=".slime-doctor-", dir=directory) as file:
        began = time.perf_counter()
        for _ in range(_PROBE // _BLOCK):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        while file.read(_BLOCK):
            pass
        return _PROBE / (written - began), _PROBE / (time.perf_counter() - written)


def _of_ray() -> Iterator[Finding]:
    name = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), "RAY_TMPDIR")
    place = os.environ.get(name, "/tmp")
    if why := why_no_directory(place):
        yield stops(f"{name}={place}, where Ray has its sessions: {why}")
    elif len(os.fsencode(os.path.abspath(place))) + SESSION_BYTES > 107:
        yield stops(f"{name}={place}: the paths of Ray's sockets there are longer than the kernel takes")
    elif (usage := shutil.disk_usage(place)).free < max(_ROOM, usage.total // 20):
        yield warning(f"{amount(usage.free)} of {amount(usage.total)} are free in {place}, where Ray has its sessions")


def caches(setting: Setting) -> Iterator[Finding]:
    """Where libraries keep what they download and compile."""
    places = {name: os.environ[name] for name in _CACHES if os.environ.get(name)}
    places.setdefault("HOME", os.path.expanduser("~"))
    for name, place in places.items():
        if why := why_no_directory(place):
            is_home = name == "HOME"
            yield (stops if is_home else warning)(f"{name}={place}: {why}")
            continue
        free = shutil.disk_usage(nearest_directory(Path(place).absolute())).free
        told = f"{name}={place}: {amount(free)} free"
        yield warning(told) if free < _ROOM else fine(told)
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        yield note("HF_HUB_OFFLINE=1: models and data come from directories and the cache alone")
