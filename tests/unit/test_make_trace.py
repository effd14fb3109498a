"""tools/make_trace.py on recorded runs: the file is what Perfetto reads, and shows every span once, where it was."""

from __future__ import annotations

import asyncio
import gzip
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.data import Sample
from slime.observability import events, trace
from slime.observability.trace import span
from slime.observability.trace_utils import trace_event, trace_span
from tests.chrome_trace import assert_shows, laid, read_chrome, roles, seconds_of_lanes
from tools import make_trace

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of two rollouts and an evaluation, as the processes of a run write them."""
    path = tmp_path_factory.mktemp("run")
    _as("driver", path)
    with span("driver/start"):
        time.sleep(0.01)
    for rollout in range(2):
        with span("driver/wait_for_rollout", rollout=rollout):
            _as("rollout_manager", path)
            asyncio.run(_rollout(rollout))
            _as("driver", path)
        events.add("engine_died", "engine 0", phase="rollout", cause="it ended", action="started again")
        with span("driver/train", rollout=rollout):
            _as("trainer_0", path)
            _train(rollout)
            _as("driver", path)
    _as("rollout_manager", path)
    with span("rollout/evaluate", version=2):
        asyncio.run(_samples())
    trace.flush()
    yield path
    trace._forget()


def _as(role: str, path: Path) -> None:
    """What follows is written as of another process."""
    trace.begin(str(path), role)
    events.begin(str(path), role)


async def _sample(sample: Sample) -> None:
    with trace_span(sample, "rollout/generating") as traced:
        await asyncio.gather(*(_request(turn) for turn in range(2)))
        trace_event(sample, "tool", attrs={"name": "python"})
        traced.update({"version": "1"})
    with trace_span(sample, "rollout/rewarding"):
        await asyncio.sleep(0)


async def _request(turn: int) -> None:
    with span("rollout/request"):
        await asyncio.sleep(0.002 * (turn + 1))


async def _samples() -> None:
    await asyncio.gather(*(_sample(Sample(index=index, group_index=index // 2)) for index in range(4)))


async def _rollout(rollout: int) -> None:
    with span("rollout/samples", rollout=rollout):
        await _samples()
        with span("rollout/filter", group=0):
            pass


def _train(rollout: int) -> None:
    with span("train/rollout", rollout=rollout):
        for phase in ("pack", "actor_train"):
            with span(f"train/{phase}") as timed:
                time.sleep(0.002)
                timed.fields["memory_gib"] = {"host": 1.5, "allocated": 2.25}


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in run_dir.glob("trace/*.jsonl") for line in file.read_text().splitlines()]


def made(run_dir: Path, tmp_path: Path, *words: str) -> list[dict[str, Any]]:
    output = tmp_path / "trace.json"
    assert make_trace.main([str(run_dir), "--output", str(output), *words]) == 0
    assert [file.name for file in tmp_path.iterdir() if "trace.json" in file.name] == ["trace.json"]
    return read_chrome(output)


def test_every_span_is_there_once_and_within_its_parent(run_dir: Path, tmp_path: Path) -> None:
    lines = lines_of(run_dir)
    assert len(lines) == 1 + 2 * 2 + 2 * (2 + 4 * 5) + 1 + 4 * 5 + 2 * 3
    found = made(run_dir, tmp_path)
    assert_shows(found, lines)
    assert list(roles(found).values()) == ["driver", "rollout_manager", "trainer_0"]


def test_perfettos_own_reader_finds_as_many(run_dir: Path, tmp_path: Path) -> None:
    reader = pytest.importorskip("perfetto.trace_processor")
    binary = shutil.which("trace_processor_shell")
    if binary is None:
        pytest.skip("needs trace_processor_shell on PATH")
    lines, events = lines_of(run_dir), made(run_dir, tmp_path)
    config = reader.TraceProcessorConfig(bin_path=binary)
    with reader.TraceProcessor(trace=str(tmp_path / "trace.json"), config=config) as processor:
        (errors,) = processor.query("select sum(value) as n from stats where severity = 'error'")
        (slices,) = processor.query("select count(*) as n from slice")
    tracks = sum(1 for where in laid(events) if where[0] == "track")
    faults = sum(event["name"].startswith("fault") for event in events)
    assert (errors.n or 0, slices.n) == (0, len(lines) + tracks + faults)


def test_a_sample_has_a_track_of_its_own_named_for_its_rollout(run_dir: Path, tmp_path: Path) -> None:
    tracks = [its for where, its in laid(made(run_dir, tmp_path)).items() if where[0] == "track"]
    outer = [min(its, key=lambda each: (each[0], -each[1]))[2] for its in tracks]
    first_lanes = [event for event in outer if event["id"].endswith(".0")]
    assert sorted((event["name"], event["args"]["sample"]) for event in first_lanes) == [
        *(("samples of rollout 0", index) for index in range(4)),
        *(("samples of rollout 1", index) for index in range(4)),
        *(("samples of the evaluation at version 2", index) for index in range(4)),
    ]
    names = {event["name"] for its in tracks for _, _, event in its if not event["name"].startswith("samples")}
    assert names == {"rollout/generating", "rollout/request", "rollout/rewarding"}


def test_requests_at_the_same_time_are_beside_each_other(run_dir: Path, tmp_path: Path) -> None:
    tracks = [its for where, its in laid(made(run_dir, tmp_path)).items() if where[0] == "track"]
    requests = [[event["name"] for *_, event in its].count("rollout/request") for its in tracks]
    assert requests == [1] * 24


def test_moments_faults_and_memory(run_dir: Path, tmp_path: Path) -> None:
    found = made(run_dir, tmp_path)
    counters = [event for event in found if event["ph"] == "C"]
    assert [event["args"] for event in counters] == [{"host": 1.5, "allocated": 2.25}] * 4
    moments = [(event["name"], event["args"].get("field_name")) for event in found if event["ph"] == "i"]
    assert sorted(set(moments)) == [("fault: engine_died", None), ("tool", "python")]
    assert len(moments) == 2 + 12


def test_lanes_add_up_to_the_time_of_the_run(tmp_path: Path) -> None:
    """By hand: of 10 s, 4 s start, 5 s training with a phase within, 1 s of nothing."""
    seconds = [("driver/start", 0.0, 4.0), ("driver/train", 5.0, 5.0), ("driver/probe", 6.0, 1.0)]
    _write(tmp_path, [_line(name, 100 + start, length) for name, start, length in seconds])
    assert seconds_of_lanes(made(tmp_path, tmp_path), "driver") == pytest.approx(
        {"driver/start": 4.0, "driver/train": 5.0, "between": 1.0}
    )


def _line(name: str, start: float, seconds: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "start": start, "seconds": seconds, "role": "driver", **more}


def _write(path: Path, lines: list[dict[str, Any]], name: str = "driver.jsonl") -> None:
    (path / "trace").mkdir(exist_ok=True)
    (path / "trace" / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_spans_that_overlap_are_in_lanes_beside_each_other(tmp_path: Path) -> None:
    _write(tmp_path, [_line("a", 0.0, 2.0), _line("b", 1.0, 2.0), _line("c", 1.5, 0.25), _line("d", 3.0, 1.0)])
    lanes = {where[2]: sorted(e["name"] for *_, e in its) for where, its in laid(made(tmp_path, tmp_path)).items()}
    assert lanes == {1: ["a", "c", "d"], 2: ["b"]}


def test_rounding_does_not_push_a_child_out_of_its_lane(tmp_path: Path) -> None:
    start = 1795805375.6003952
    child = _line("child", start + 1, 1.0000003, id=2, parent=1)
    _write(tmp_path, [child, _line("parent", start, 2.0, id=1), _line("next", start + 1.9999998, 1.0, id=3)])
    found = made(tmp_path, tmp_path)
    assert_shows(found, lines_of(tmp_path))
    assert len(laid(found)) == 1


def test_only_what_went_on_during_some_rollouts(run_dir: Path, tmp_path: Path) -> None:
    found = made(run_dir, tmp_path, "--rollouts", "1")
    rollouts = {event["args"].get("rollout") for event in found if event["ph"] == "X"}
    assert rollouts == {1}
    assert not any(event["name"] == "driver/start" for event in found)
    assert len([event for event in found if event["name"] == "fault: engine_died"]) == 1


def test_what_is_no_whole_line_is_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path, [_line("earlier", 0.0, 1.0)], "driver.jsonl.1")
    _write(tmp_path, [_line("a", 1.0, 1.0, score=float("nan"))])
    with (tmp_path / "trace" / "driver.jsonl").open("a") as file:
        file.write('{"name": "ha\n[1]\n{"name": "being writt')
    found = made(tmp_path, tmp_path)
    assert [event["name"] for event in found if event["ph"] == "X"] == ["earlier", "a"]
    assert [event["args"] for event in found if event["name"] == "a"] == [{"score": "NaN"}]
    assert "2 lines were left out that are no whole span" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["{empty}"], 2, "no spans in"),
        (["{run}", "--rollouts", "7-9"], 2, "no span of rollouts 7 to 9 in the run: it has 0 to 1"),
        (["{run}", "--rollouts", "3-x"], 2, "'3-x' is not a number or a range of two"),
        (["{run}", "--rollouts", "5-3"], 2, "5 is after 3"),
        (["{run}", "--output", "{empty}/no/such.json"], 2, "No such file or directory"),
    ],
)
def test_what_cannot_be_made_is_one_line(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], status: int, message: str
) -> None:
    try:
        found = make_trace.main([word.format(empty=tmp_path, run=run_dir) for word in words])
    except SystemExit as ended:
        found = ended.code  # type: ignore[assignment]
    said = capsys.readouterr().err
    assert (found, message in said, "Traceback" in said) == (status, True, False)
    assert not list(tmp_path.iterdir())


def test_it_needs_python_alone_and_compresses(run_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "trace.json.gz"
    command = [sys.executable, "-S", str(ROOT / "tools/make_trace.py"), str(run_dir), "--output", str(output)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env={})
    assert result.stdout.startswith(f"{output}: ")
    assert json.loads(gzip.decompress(output.read_bytes()))["traceEvents"]
    rows = {row.split()[0]: float(row.split()[-1].rstrip("%")) for row in result.stdout.splitlines()[2:]}
    assert set(rows) == {"driver", "rollout_manager", "trainer_0"}
    assert all(0 < share <= 100 for share in rows.values())
