"""NVIDIA's GPUs, as its own program shows them, and whether torch finds them."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.processes.kernel import RUN_MARK
from tools.doctoring.findings import Finding, Setting, fine, note, stops, warning

_ASK_TORCH = """
import json, torch
nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
print(json.dumps({"cuda": torch.version.cuda, "count": torch.cuda.device_count(),
                  "usable": torch.cuda.is_available(), "nccl": nccl, "release": torch.__version__}))
"""
_DRIVERS = {12: 525, 13: 580}
"""The oldest of NVIDIA's drivers for each CUDA of torch's."""
_TORCH_S = 120.0
_LITTLE_GIB = 1.0
_LINK_SPEED = re.compile(r"\bNV\d+\b")


def devices(setting: Setting) -> Iterator[Finding]:
    """GPUs, driver, and torch's CUDA and NCCL."""
    rows = _rows(setting, "--query-gpu=name,driver_version,memory.total")
    if not rows:
        yield note("no GPU: runs compute on the CPU (nvidia-smi lists none)")
        return
    names = {name for name, *_ in rows}
    memory = int(float(rows[0][2])) // 1024
    driver = rows[0][1]
    yield fine(f"{len(rows)} GPUs, {', '.join(sorted(names))} with {memory} GiB, driver {driver}")
    if len(names) > 1:
        yield warning("GPUs of several kinds: the slowest one sets the pace of a collective")
    if setting.version_of("torch") is None:
        return
    said = setting.printed_by([sys.executable, "-c", _ASK_TORCH], _TORCH_S)
    torch: dict[str, Any] = json.loads(said) if said else {}
    if not torch:
        yield stops("torch cannot be imported: python3 -c 'import torch' says why")
    elif torch["cuda"] is None:
        yield stops(f"torch {torch['release']} is built without CUDA, beside {len(rows)} GPUs")
    elif not torch["usable"]:
        needed = _DRIVERS.get(int(torch["cuda"].split(".")[0]), 0)
        old = int(driver.split(".")[0]) < needed
        why = f"it wants driver {needed} or later, and this is {driver}" if old else "see CUDA_VISIBLE_DEVICES"
        yield stops(f"torch (CUDA {torch['cuda']}) finds no GPU: {why}")
    else:
        nccl = ".".join(map(str, torch["nccl"]))
        yield fine(f"torch {torch['release']} with CUDA {torch['cuda']} and NCCL {nccl} finds {torch['count']} GPUs")


def links(setting: Setting) -> Iterator[Finding]:
    """How GPUs reach each other, and other hosts."""
    if not setting.has_gpus:
        return
    matrix = setting.printed_by(["nvidia-smi", "topo", "-m"]) or ""
    rows = [line.split() for line in matrix.splitlines() if re.match(r"GPU\d+\s", line)]
    between = {cell for i, row in enumerate(rows) for j, cell in enumerate(row[1 : len(rows) + 1]) if i != j}
    if between:
        by_nvlink = all(map(_LINK_SPEED.fullmatch, between))
        told = f"GPUs reach each other by {', '.join(sorted(between))}"
        yield fine(told) if by_nvlink else note(f"{told}: not all by NVLink, so keep tensor parallelism small")
    ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*/state"))
    states = {port.parts[-4]: port.read_text().strip() for port in ports}
    down = [name for name, state in states.items() if "ACTIVE" not in state]
    if down:
        yield warning(f"InfiniBand ports that are not active: {', '.join(down)}")
    elif states:
        yield fine(f"InfiniBand: {', '.join(states)} are active")
    if switches := [f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith("NCCL_")]:
        yield note(f"set for NCCL: {' '.join(switches)}")


def strangers(setting: Setting) -> Iterator[Finding]:
    """Who else has memory of the GPUs."""
    for index, used, total, uuid in _rows(setting, "--query-gpu=index,memory.used,memory.total,uuid"):
        taken, all_of_it = float(used) / 1024, float(total) / 1024
        if taken < _LITTLE_GIB:
            continue
        apps = _rows(setting, "--query-compute-apps=gpu_uuid,pid,process_name")
        owners = [f"{_whose(pid)} {pid} ({Path(name).name})" for gpu, pid, name in apps if gpu == uuid]
        by = ", ".join(owners) or "processes that nvidia-smi does not show, of another container for one"
        text = f"GPU {index}: {taken:.1f} of {all_of_it:.0f} GiB are taken by {by}"
        yield stops(text) if taken > all_of_it / 2 else warning(text)


def _whose(pid: str) -> str:
    try:
        marks = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return "process"
    return "a run of slime's, process" if RUN_MARK.encode() + b"=" in marks else "process"


def _rows(setting: Setting, query: str) -> list[list[str]]:
    said = setting.printed_by(["nvidia-smi", query, "--format=csv,noheader,nounits"]) or ""
    return [[cell.strip() for cell in line.split(",")] for line in said.splitlines() if line.strip()]
