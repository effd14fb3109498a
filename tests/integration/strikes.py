"""What integration tests do to the processes of a run, and how they see what came of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.integration.harness import RUN_S, TrainProcess
from tests.waiting import command_line

_SERVER = re.compile(r"Started server process \[(\d+)\]")

KILLED = r"ended with status 137 \(signal 9\)"
HANGS = r"hangs: process \d+( \(\S+\))? gives no sign of life, since 2\d\d\d-"

Strike = Callable[[Path, int], list[psutil.Process]]
"""Strikes the engine of a rank; the processes of its tree."""


def server_tree(run_dir: Path, rank: int) -> list[psutil.Process]:
    """Of an engine, whose server's id its log tells: its actor, supervisor and server, and those below."""
    server = psutil.Process(int(_SERVER.findall(log_of(run_dir, rank))[-1]))
    supervisor, actor, *_ = server.parents()
    assert "ray::EngineActor" in command_line(actor)
    return [actor, supervisor, server, *server.children(recursive=True)]


def kill_server(run_dir: Path, rank: int) -> list[psutil.Process]:
    """Kill the server of an engine; the processes of its tree."""
    tree = server_tree(run_dir, rank)
    tree[2].kill()
    return tree


def server_is_busy(run_dir: Path, rank: int, since: int) -> bool:
    """Whether the engine's log shows running requests after its first ``since`` bytes."""
    return bool(re.search(r"#running-req: [1-9]", log_of(run_dir, rank)[since:]))


def log_of(run_dir: Path, rank: int) -> str:
    return (run_dir / "logs" / f"engine_{rank}.log").read_text()


def stop_server(run_dir: Path, rank: int) -> list[psutil.Process]:
    """Stop the server of an engine, so that it answers no more; the processes as of `kill_server`."""
    tree = server_tree(run_dir, rank)
    tree[2].suspend()
    return tree


def stop_scheduler(run_dir: Path, rank: int) -> list[psutil.Process]:
    """Stop what generates, whose server goes on answering by itself."""
    tree = server_tree(run_dir, rank)
    (scheduler,) = [child for child in tree[3:] if "scheduler" in command_line(child)]
    scheduler.suspend()
    return tree


def mid_rollout(process: TrainProcess, run_dir: Path, rank: int, strike: Strike) -> list[psutil.Process]:
    """Strike an engine while it works on a rollout that begins after this call."""
    since = len(log_of(run_dir, rank))
    process.wait_until(lambda: server_is_busy(run_dir, rank, since), RUN_S, "a request on the engine", 0.05)
    return strike(run_dir, rank)


def stop_tree(run_dir: Path, rank: int) -> list[psutil.Process]:
    """Stop all of an engine's processes but its actor, as a host that is out of breath would."""
    tree = server_tree(run_dir, rank)
    for process in tree[1:]:
        process.suspend()
    return tree


def events_of(run_dir: Path, *kinds: str) -> list[dict[str, Any]]:
    """What events.jsonl has, of these kinds if some are named."""
    file = run_dir / "events.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line for line in lines if not kinds or line["kind"] in kinds]


def back(run_dir: Path, subject: str) -> bool:
    """Whether it was lost and serves again, as the latest of its events says."""
    kinds = ("engine_died", "engine_hangs", "engine_back", "router_died", "router_back")
    found = [line for line in events_of(run_dir, *kinds) if line["subject"] == subject]
    return bool(found) and found[-1]["kind"].endswith("_back")


def router_of(process: TrainProcess) -> psutil.Process:
    """The router, which calls itself something else: below its supervisor, beside the guard of that."""
    words = ("slime.processes.supervisor", "slime.backends.sglang.launch_router")
    owners = [p for p in process.descendants() if all(word in command_line(p) for word in words)]
    (router,) = [child for owner in owners for child in owner.children() if child not in owners]
    return router


def next_life(process: TrainProcess, rank: int, tree: list[psutil.Process]) -> psutil.Process | None:
    """The server of an engine that starts again, once it runs: its seed is the run's, 7, and its rank."""
    words = ("slime.backends.sglang.launch ", f"--random-seed {7 + rank} ")
    for found in process.descendants():
        line = command_line(found)
        if all(word in line for word in words) and "slime.processes.supervisor" not in line and found not in tree:
            return found
    return None
