"""Spans: what their lines say, in threads, tasks and forked processes, and on a disk that is full."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.observability import trace
from slime.observability.logs import LineFile
from slime.observability.trace import span

NUM_GPUS = 0


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """Of a run in which this process is the driver."""
    trace.begin(str(tmp_path), "driver")
    yield tmp_path
    trace._forget()


def written(run_dir: Path) -> list[dict[str, Any]]:
    trace.flush()
    path = run_dir / "trace" / "driver.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_line_says_when_how_long_and_what_about(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.5)
    with span("a", rollout=3) as timed:
        timed.fields["version"] = 7
    assert timed.seconds >= 0
    seconds = timed.seconds
    (line,) = written(run_dir)
    assert isinstance(line.pop("id"), int)
    assert line == {"name": "a", "start": 1000.5, "seconds": seconds, "role": "driver", "rollout": 3, "version": 7}


def test_seconds_are_those_of_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    with span("a") as timed:
        pass
    assert timed.seconds == 2.5


def test_spans_within_have_the_fields_of_those_around(run_dir: Path) -> None:
    with span("outer", rollout=1, version=1), span("inner", version=2):
        pass
    with span("later"):
        pass
    fields = {line["name"]: (line.get("rollout"), line.get("version")) for line in written(run_dir)}
    assert fields == {"inner": (1, 2), "outer": (1, 1), "later": (None, None)}


def test_a_line_names_the_one_around_it_and_lies_within_it_by_any_clock(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with span("outer"):
        monkeypatch.setattr(time, "time", lambda: 1000.5)  # the host's clock is set
        with span("inner"):
            trace.instant("moment", sample=3)
    with span("later"):
        pass
    lines = {line["name"]: line for line in written(run_dir)}
    outer, inner, moment = lines["outer"], lines["inner"], lines["moment"]
    assert (inner["parent"], moment["parent"], outer.get("parent")) == (outer["id"], inner["id"], None)
    assert len({line["id"] for line in lines.values()}) == 4
    assert (moment["seconds"], moment["instant"], moment["sample"]) == (0.0, True, 3)
    assert outer["start"] <= inner["start"] <= moment["start"] <= inner["start"] + inner["seconds"]
    assert inner["start"] + inner["seconds"] <= outer["start"] + outer["seconds"] + 1e-6
    assert lines["later"]["start"] == 1000.5


def test_a_span_of_another_task_may_be_the_one_around(run_dir: Path) -> None:
    with span("outer", sample=3):
        found = trace.around()
    with span("inner", within=found):
        trace.note(tokens=5)
    outer, inner = written(run_dir)
    assert (inner["parent"], inner["sample"], inner["tokens"]) == (outer["id"], 3, 5)
    assert "tokens" not in outer
    trace.note(tokens=6)  # of no span


def test_a_field_does_not_take_the_place_of_what_a_line_says(run_dir: Path) -> None:
    with span("a", role="judge", seconds=-1, parent="x"):
        pass
    (line,) = written(run_dir)
    assert (line["name"], line["role"], "parent" in line) == ("a", "driver", False)
    assert (line["field_role"], line["field_seconds"], line["field_parent"]) == ("judge", -1, "x")


def test_a_span_within_one_without_fields_is_not_written_at_once(run_dir: Path) -> None:
    with span("outer"):
        with span("inner"):
            pass
        assert not (run_dir / "trace" / "driver.jsonl").exists()
    assert len((run_dir / "trace" / "driver.jsonl").read_text().splitlines()) == 2


def test_an_error_is_named_and_passes(run_dir: Path) -> None:
    with pytest.raises(KeyError), span("a"):
        raise KeyError("x")
    (line,) = written(run_dir)
    assert line["error"] == "KeyError"


def test_tasks_do_not_mix_their_fields(run_dir: Path) -> None:
    async def one(sample: int, entered: asyncio.Event, waits: asyncio.Event) -> None:
        with span("outer", sample=sample):
            entered.set()
            await waits.wait()
            with span("inner"):
                await asyncio.sleep(0)

    async def both() -> None:
        first, second = asyncio.Event(), asyncio.Event()
        await asyncio.gather(one(1, first, second), one(2, second, first))

    asyncio.run(both())
    assert sorted((line["name"], line["sample"]) for line in written(run_dir)) == [
        *(("inner", 1), ("inner", 2)),
        *(("outer", 1), ("outer", 2)),
    ]


def test_a_generator_that_another_task_ends_is_no_error(run_dir: Path) -> None:
    async def parts() -> Any:
        with span("a", rollout=1):
            yield 1

    async def begin_and_end() -> None:
        generator = parts()
        await asyncio.create_task(anext(generator))
        await asyncio.create_task(generator.aclose())

    asyncio.run(begin_and_end())
    assert [line["name"] for line in written(run_dir)] == ["a"]


def test_no_line_of_many_threads_is_lost(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_EVERY_S", 0.0)  # every span is written at once, if no other thread does it

    def work(thread: int) -> None:
        for i in range(200):
            with span("a", thread=thread, i=i):
                pass

    threads = [threading.Thread(target=work, args=[i]) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted((line["thread"], line["i"]) for line in written(run_dir)) == [
        (thread, i) for thread in range(4) for i in range(200)
    ]


def test_lines_are_written_every_second_and_when_all_ends(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, now = run_dir / "trace" / "driver.jsonl", time.monotonic()
    with span("all", rollout=1):
        with span("a"):
            pass
        assert not path.exists()
        monkeypatch.setattr(time, "monotonic", lambda: now + 1.5)
        with span("b"):
            pass
        assert [json.loads(line)["name"] for line in path.read_text().splitlines()] == ["a", "b"]
        with span("c"):
            pass
    assert [json.loads(line)["name"] for line in path.read_text().splitlines()] == ["a", "b", "c", "all"]


def test_a_full_disk_warns_once_and_is_left_when_it_has_room(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: LineFile, lines: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(LineFile, "append", full)
        for name in ("a", "b"):
            with span(name):
                pass
            trace.flush()
    with span("c"):
        pass
    assert [line["name"] for line in written(run_dir)] == ["c"]
    (record,) = caplog.records
    assert f"--run-dir {run_dir}/trace/driver.jsonl: the disk is full" in record.getMessage()


def test_a_resumed_run_appends_after_half_a_line(run_dir: Path) -> None:
    path = run_dir / "trace" / "driver.jsonl"
    path.parent.mkdir()
    path.write_text('{"name": "earlier"}\n{"name": "ha')
    with span("a"):
        pass
    trace.flush()
    first, half, last = path.read_text().splitlines()
    assert (first, half, json.loads(last)["name"]) == ('{"name": "earlier"}', '{"name": "ha', "a")


def test_without_a_trace_a_span_only_measures() -> None:
    with span("a") as timed:
        pass
    assert timed.seconds > 0
    trace.flush()


def test_a_process_writes_its_own_spans_at_its_end_and_a_fork_none_of_them(tmp_path: Path) -> None:
    program = f"""
import os
from slime.observability import trace
trace.begin({str(tmp_path)!r}, "driver")
with trace.span("parent"):
    pass
if (child := os.fork()) == 0:
    with trace.span("child"):
        pass
    raise SystemExit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert [line["name"] for line in written(tmp_path)] == ["parent"]
