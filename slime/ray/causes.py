"""Who is to blame for the death of a process: Ray's own daemons, a host, the memory, or the process itself."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from ray._private import worker
from ray.exceptions import OutOfMemoryError, RayError

_DAEMONS = {"raylet": "raylet", "gcs_server": "head (gcs_server)"}
"""Of a local Ray, those that it does not live without."""
_EXIT = re.compile(r"Worker exit detail: (.*?\.)(?: |$)")
_NODE_GONE = ("node has died", "node was terminated", "node is dead", "owner's node has crashed")
_KERNEL_COUNTS = Path("/proc/vmstat")


def ray_failure() -> str | None:
    """What has ended our own local Ray; None while it lives, and of a Ray that others started."""
    node = worker._global_node
    for kind, process in node.dead_processes() if node is not None else ():
        if kind in _DAEMONS:
            status = process.returncode
            how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
            return (
                f"Ray's {_DAEMONS[kind]} on this host, process {process.pid}, {how}, and the "
                f"run cannot go on without it{memory_hint()}; Ray's logs: {node.get_logs_dir_path()}"
            )
    return None


def why_it_died(error: RayError, who: str) -> str:
    """One line on an actor of which Ray says that it died."""
    text = " ".join(str(error).split())
    place = [found[1] for pattern in (r"\bpid: (\d+)", r"\bip: (\S+)") if (found := re.search(pattern, text))]
    where = f" ({' on '.join(place)})" if place else ""
    if any(words in text for words in _NODE_GONE):
        return (
            f"the host of {who}{where} has left Ray's cluster: its raylet was ended, or the host or its network failed"
        )
    if isinstance(error, OutOfMemoryError) or "memory monitor" in text or "running low on memory" in text:
        return f"Ray ended the process of {who}{where}, because its host was running out of memory: {text[:400]}"
    detail = found[1] if (found := _EXIT.search(text)) else text.split(" class_name:")[0]
    return f"the process of {who} died{where}: {detail}{memory_hint()}"


def memory_hint() -> str:
    """Words on what this host's kernel has ended for want of memory since the start; empty where it ended nothing."""
    killed = _killed_for_memory() - _BEFORE
    return f" (the kernel has ended {killed} processes of this host for want of memory meanwhile)" if killed > 0 else ""


def _killed_for_memory() -> int:
    with contextlib.suppress(OSError, ValueError):
        counts = dict(line.split() for line in _KERNEL_COUNTS.read_text().splitlines())
        return int(counts.get("oom_kill", 0))
    return 0


_BEFORE = _killed_for_memory()
