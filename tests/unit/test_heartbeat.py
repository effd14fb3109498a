"""Heartbeats of a server's processes: who stands still, who only works for long, and what is nobody's fault."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.backends.sglang.client import HangError
from slime.backends.sglang.scheduler_beats import mark_turns
from slime.backends.sglang.server import Server
from slime.processes import heartbeat, kernel
from slime.processes.heartbeat import Heart, Watcher
from slime.processes.server_process import ServerProcess
from tests.waiting import alive, wait_for

NUM_GPUS = 0

_BEATS = "import time; from slime.processes import heartbeat; heartbeat.begin(); time.sleep(600)"
_FORKS = _BEATS.replace(
    "; time", "; import os; pid = os.fork(); pid or heartbeat.own().go_on_in_fork(); print(pid, flush=True); time"
)


@pytest.fixture
def heart(tmp_path: Path) -> Heart:
    return Heart(str(tmp_path))


@pytest.fixture
def watcher(tmp_path: Path) -> Watcher:
    """Four looks without a beat are too many."""
    return Watcher(str(tmp_path), timeout=4.0)


def test_a_process_that_beats_no_more_is_found_and_named(heart: Heart, watcher: Watcher) -> None:
    for _ in range(9):
        heart.beat()
        assert watcher.look() is None
    assert [watcher.look() for _ in range(3)] == [None] * 3
    told = watcher.look()
    assert told is not None
    assert told.startswith(f"process {os.getpid()}")
    assert " gives no sign of life, since 2" in told


def test_a_beat_in_time_begins_the_count_again(heart: Heart, watcher: Watcher) -> None:
    for _ in range(3):
        heart.beat()
        assert [watcher.look() for _ in range(4)] == [None] * 4


def beat_and_look(heart: Heart, watcher: Watcher, times: int) -> list[str | None]:
    told = []
    for _ in range(times):
        heart.beat()
        told.append(watcher.look())
    return told


def test_a_loop_that_stands_still_with_nothing_to_do_is_found_and_one_at_work_is_not(
    heart: Heart, watcher: Watcher
) -> None:
    assert beat_and_look(heart, watcher, 9) == [None] * 9, "there is no loop"
    heart.turn(works=False)
    heart.work()
    assert beat_and_look(heart, watcher, 99) == [None] * 99, "a long prefill is no death"
    heart.turn(works=False)
    *first, told = beat_and_look(heart, watcher, 5)
    assert first == [None] * 4
    assert told is not None
    assert "has a scheduler that stands still with nothing to do, since 2" in told


def test_a_loop_may_wait_for_another_process_that_works(heart: Heart, watcher: Watcher, tmp_path: Path) -> None:
    """A stage of a pipeline takes its requests from the one before, when that has computed."""
    other = subprocess.Popen(["sleep", "600"])  # which writes nothing between the lines below
    try:
        process = kernel.with_id(other.pid)
        assert process is not None
        path = tmp_path / f"{other.pid}-{process.started}"
        heart.turn(works=False)
        numbers = memoryview(bytearray(24)).cast("Q")
        for beats in range(1, 30):
            numbers[:] = memoryview(bytearray(24)).cast("Q")
            numbers[0], numbers[2] = beats + 1000, 1
            path.write_bytes(bytes(numbers))
            heart.beat()
            assert watcher.look() is None
    finally:
        other.kill()
        other.wait(60)
    *_, told = beat_and_look(heart, watcher, 5)
    assert told is not None
    assert "scheduler" in told, "it has ended, and nobody works any more"


def test_a_process_that_has_ended_is_for_its_parent_to_tell(watcher: Watcher, tmp_path: Path) -> None:
    (tmp_path / "999999999-1").write_bytes(bytes(24))
    (tmp_path / f"{os.getpid()}-1").write_bytes(bytes(24))  # another that had this id before
    assert [watcher.look() for _ in range(9)] == [None] * 9


def test_who_did_not_look_saw_no_silence(heart: Heart, watcher: Watcher) -> None:
    """A host that was stopped for an hour has not looked either: the count goes by looks, not by a clock."""
    heart.beat()
    assert watcher.look() is None
    watcher._seen[next(iter(watcher._seen))].since = [0.0, 0.0]
    assert watcher.look() is None


def test_a_forked_process_beats_for_itself(tmp_path: Path) -> None:
    environment = os.environ | {heartbeat.DIRECTORY_VARIABLE: str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", _FORKS], env=environment, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    ids = {parent.pid, max(int(parent.stdout.readline()) for _ in range(2))}  # the child prints 0

    def beating() -> set[int]:
        beats = {path: int.from_bytes(path.read_bytes()[:8], sys.byteorder) for path in tmp_path.iterdir()}
        return {int(path.name.partition("-")[0]) for path, count in beats.items() if count > 2}

    try:
        wait_for(lambda: beating() == ids, "both beat")
    finally:
        for process in ids:
            os.kill(process, signal.SIGKILL)
        parent.wait(60)


class Ranks(Namespace):
    """Of a scheduler: the first unless told."""

    def __init__(self, pipeline: int = 0) -> None:
        super().__init__(pp_rank=pipeline, attn_tp_rank=0, attn_cp_rank=0)


def scheduler_class(seen: list[tuple[str, tuple[int, ...]]], heart: Heart) -> Any:
    class Scheduler:
        def __init__(self, ranks: Ranks) -> None:
            self.ps = ranks

        def process_input_requests(self, requests: list[str]) -> None:
            seen.append(("take", tuple(heart._numbers)))

        def run_batch(self, batch: str) -> str:
            seen.append((batch, tuple(heart._numbers)))
            return "result"

        def process_batch_result(self, batch: str, result: str) -> None:
            seen.append((result, tuple(heart._numbers)))

    return Scheduler


def test_a_scheduler_tells_its_turns_and_what_it_works_on(heart: Heart) -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []
    scheduler = scheduler_class(seen, heart)
    for _ in range(2):
        mark_turns(scheduler, heart)  # once
    first = scheduler(Ranks())
    first.process_input_requests([])
    assert tuple(heart._numbers) == (0, 1, 0)
    first.process_input_requests(["push"])
    assert tuple(heart._numbers) == (0, 2, 0)
    assert first.run_batch("batch") == "result"
    assert tuple(heart._numbers) == (0, 2, 1), "what it has begun is waited for later"
    first.process_batch_result("batch", "result")
    first.process_input_requests([])
    assert seen == [
        ("take", (0, 1, 0)),
        ("take", (0, 2, 1)),
        ("batch", (0, 2, 1)),
        ("result", (0, 2, 1)),
        ("take", (0, 3, 0)),
    ]
    scheduler(Ranks(pipeline=1)).process_input_requests([])
    assert tuple(heart._numbers) == (0, 3, 0), "another waits for the first"


class Stub(Server):
    """A server that is one process, which beats."""

    def __init__(self, tmp_path: Path) -> None:
        super().__init__("engine 1", Namespace(rollout_health_check_timeout=2.0), "127.0.0.1", tmp_path / "log")
        self.url = "http://e1"

    def _start(self) -> None:
        self._launch(ServerProcess([sys.executable, "-c", _BEATS], dict(os.environ), self._log_path, beats=True))

    def _ask(self, timeout: float) -> None:
        raise AssertionError("nobody asks")


def test_a_server_whose_process_is_stopped_hangs_and_its_files_go(tmp_path: Path) -> None:
    server = Stub(tmp_path)
    server.start()
    try:
        assert server._process is not None
        directory = Path(str(server._process.heartbeats))
        wait_for(lambda: list(directory.iterdir()), "its first beat")
        server.look()
        pid = int(next(directory.iterdir()).name.partition("-")[0])
        server.check()
        os.kill(pid, 19)  # SIGSTOP
        wait_for(server.hang, "it is found to stand still")
        with pytest.raises(HangError, match=rf"engine 1 at http://e1 hangs: process {pid} gives no sign of life, si"):
            server.check()
    finally:
        server.stop()
    assert not directory.exists()
    assert not alive(pid)


def test_nobody_beats_where_nobody_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(heartbeat, "_own", None)
    monkeypatch.delenv(heartbeat.DIRECTORY_VARIABLE, raising=False)
    heartbeat.begin()
    assert heartbeat.own() is None
    monkeypatch.setenv(heartbeat.DIRECTORY_VARIABLE, str(tmp_path / "gone"))
    heartbeat.begin()
    assert heartbeat.own() is None, "a lost directory is no reason to end"
