"""tools/view_run.py: where the time of steps goes, what bounds them, and the lanes of a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.observability.phases import NAMES, OTHER, PHASES, STEP
from slime.observability.progress import step_line
from slime.utils.errors import BadInputError
from tests.recorded_run import START, append, metric_lines, spans, write_run, write_trace
from tools.tracing.lines import Recording
from tools.viewing.run import RunSite
from tools.viewing.steps import RULES, Steps, bound_by, seconds_of
from tools.viewing.traces import Traces, lanes, memory
from tools.website.registry import unregistered

NUM_GPUS = 0
QUIET = {"perf/wait_for_rollout_time": 1.0, "perf/train_time": 1.0, "perf/update_weights_time": 1.0}


@pytest.mark.parametrize(
    ("metrics", "idle", "name", "sentence"),
    [
        ({"perf/wait_for_rollout_time": 6}, {}, "rollout", "the rollout: trainers waited 6.0 of 10.0 s for samples."),
        ({"perf/rollout_time": 6}, {}, "rollout", "the rollout: trainers waited 1.0 of"),
        (
            {"perf/wait_for_rollout_time": 6, "perf/rollout_ahead_time": 3},
            {},
            "rollout",
            "the rollout: trainers waited 6.0 of 10.0 s for samples, though these were begun 3.0 s before.",
        ),
        (
            {"perf/wait_for_rollout_time": 6},
            {"made": 5.0, "rewards": 3.0, "tools": 1.0},
            "rewards",
            "rewards: for 3.0 of the 5.0 s in which samples were made",
        ),
        (
            {"perf/wait_for_rollout_time": 6},
            {"made": 5.0, "rewards": 1.0, "tools": 3.0},
            "tools",
            "tools: for 3.0 of the 5.0 s in which samples were made",
        ),
        ({"perf/wait_for_rollout_time": 6}, {"made": 5.0, "rewards": 2.0, "tools": 2.0}, "rollout", "the rollout: "),
        ({"perf/train_time": 6}, {"made": 5.0, "rewards": 5.0}, "training", "training: it took 6.0 of 10.0 s."),
        ({"perf/train_time": 2, "perf/transfer_time": 3}, {}, "training", "training: it took 5.0 of 10.0 s."),
        ({"perf/update_weights_time": 6}, {}, "push", "the push of weights: it took 6.0 of 10.0 s."),
        (
            {"perf/wake_trainers_time": 3, "perf/resume_engines_time": 2},
            {},
            "sleep and wake",
            "trainers and engines that take turns in the memory: 5.0 of 10.0 s.",
        ),
        ({"perf/wait_for_eval_time": 6}, {}, "evaluation", "the evaluation: it was waited for 6.0 of 10.0 s."),
        ({"perf/save_model_time": 6}, {}, "saving", "saving: checkpoint and exports took 6.0 of 10.0 s."),
        ({}, {}, OTHER, "what no phase accounts for: 7.0 of 10.0 s."),
        (
            {"perf/train_time": 6, "perf/recovery_time": 2},
            {},
            "training",
            "training: it took 6.0 of 10.0 s. A fault was mended within 2.0 s.",
        ),
    ],
)
def test_a_sentence_says_what_bounds_a_step(
    metrics: dict[str, float], idle: dict[str, float], name: str, sentence: str
) -> None:
    if "perf/rollout_time" in metrics:  # which counts only where nothing is known of a wait
        metrics = {**metrics, "perf/train_time": 0.1, "perf/update_weights_time": 0.1, "perf/step_time": 1.0}
    seconds = seconds_of({**QUIET, "perf/step_time": 10.0, **metrics}) | idle
    found, said = bound_by(seconds)
    assert found == name
    assert said.startswith(f"Bound by {sentence}")


def test_every_rule_can_hold_and_every_phase_has_one() -> None:
    assert {rule.bound_by for rule in RULES} == {*NAMES, "rewards", "tools"}
    keys = {key for phase in PHASES for keys in phase.keys for key in keys}
    assert unregistered(keys) == []


@pytest.mark.parametrize("key", [keys[0] for phase in PHASES for keys in phase.keys])
def test_the_line_of_a_step_says_what_its_page_says(key: str) -> None:
    metrics = {**QUIET, "perf/step_time": 12.0, key: 8.0}
    name, _ = bound_by(seconds_of(metrics))
    assert step_line(0, 1, metrics).endswith(f" | 12.0 s | bound by {name} ({seconds_of(metrics)[name]:.1f} s)")


def test_phases_add_up_to_the_step() -> None:
    for extra in ({}, {"perf/step_time": 10.0}, {"perf/step_time": 2.0}):
        seconds = seconds_of(QUIET | extra)
        assert sum(seconds[name] for name in NAMES) == max(3.0, extra.get("perf/step_time", 3.0))
        assert seconds[STEP] == extra.get("perf/step_time", 3.0)


def test_a_step_has_what_was_logged_during_it() -> None:
    """The first push, an evaluation before the first step, and a step that did not end belong to none."""
    steps = Steps()
    steps.add({"rollout/step": 0, "perf/update_weights_time": 99.0})
    steps.add({"eval/step": 0, "perf/wait_for_eval_time": 99.0})
    for line in metric_lines(range(5)):
        steps.add(line)
        if "train/step" in line and line["train/step"] == 3:
            steps.add({"rollout/step": 3, "perf/save_model_time": 99.0})
            for again in list(metric_lines([3]))[:2]:
                steps.add(again)
    assert steps.x == [0, 1, 2, 3, 4]
    for step in range(5):
        seconds = steps.seconds(step)
        assert seconds is not None
        expected = {"rollout": 6, "training": 2, "push": 1, "saving": 0, "evaluation": 0.5 if step == 4 else 0}
        assert {name: seconds[name] for name in expected} == expected
    assert steps.seconds(5) is None


def test_many_steps_are_means_that_keep_the_longest() -> None:
    steps = Steps()
    for step in range(1000):
        slow = 50.0 if step == 500 else 0.0
        steps.add({"rollout/step": step, **QUIET, "perf/train_time": 2 + slow, "perf/step_time": 4 + slow})
    bands = steps.bands(10, 0, 1e9, {})
    assert bands["x"] == list(range(0, 1000, 100))
    assert bands["end"] == 1000
    assert bands["seconds"]["training"] == [2.0] * 5 + [2.5] + [2.0] * 4
    assert max(bands["longest"]) == 54.0
    assert bands["bound_by"] == {"training": 1000}
    assert bands["sentence"].startswith("Mean of 1000 steps: Bound by training: it took 2.0 of 4.0")  # 2.05 of 4.05
    assert steps.bands(10, 400, 401, {})["x"] == [400, 401]
    assert steps.bands(10, 2000, 3000, {})["sentence"] == ""


# ---- traces ----


def test_waits_of_a_rollout_are_seen_in_its_trace(tmp_path: Path) -> None:
    site = RunSite(write_run(tmp_path / "run", 3))
    assert site.answer("/api/step", {"step": "1"})["sentence"].startswith("Bound by the rollout")
    site.answer("/api/traces", {})
    said = site.answer("/api/step", {"step": "1"})["sentence"]
    assert said.startswith("Bound by rewards: for 3.8 of the 5.9 s in which samples were made")
    assert site.answer("/api/phases", {})["bound_by"] == {"rewards": 3}


@pytest.mark.parametrize(
    ("requests", "rewards", "generating", "expected"),
    [
        ([(0, 10)], [(0, 10)], [(0, 10)], (0, 0)),
        ([(0, 4)], [(3, 9)], [(0, 5)], (5, 0)),
        ([(0, 2), (6, 8)], [(8, 9)], [(0, 8)], (1, 4)),
        ([(0, 2), (1, 3)], [], [(0, 10)], (0, 7)),
        ([(-5, 1), (9, 20)], [(2, 3), (4, 5)], [(0, 9)], (2, 6)),
    ],
)
def test_seconds_without_a_request(
    tmp_path: Path, requests: Any, rewards: Any, generating: Any, expected: tuple[float, float]
) -> None:
    kinds = {"rollout/request": requests, "rollout/rewarding": rewards, "rollout/generating": generating}
    found = [(name, start, end) for name, those in kinds.items() for start, end in those]
    common = {"role": "rollout_manager", "rollout": 7}
    lines = [{"name": n, "start": START + a, "seconds": float(b - a), **common} for n, a, b in found]
    append(tmp_path / "trace" / "rollout_manager.jsonl", lines)
    append(tmp_path / "trace" / "rollout_manager.jsonl", [span_of_samples(10.0, **common)])
    traces = Traces(tmp_path)
    traces.refresh()
    assert traces.idle[7] == pytest.approx({"made": 10, "rewards": expected[0], "tools": expected[1]}, abs=1e-6)


def span_of_samples(seconds: float, **more: Any) -> dict[str, Any]:
    return {"name": "rollout/samples", "start": START, "seconds": seconds, **more}


def test_without_spans_of_requests_nothing_is_said_of_waits(tmp_path: Path) -> None:
    append(tmp_path / "trace" / "r.jsonl", [span_of_samples(5.0, role="rollout_manager", rollout=0)])
    traces = Traces(tmp_path)
    traces.refresh()
    assert traces.idle == {0: {}}


def test_a_range_of_rollouts_is_found_in_a_long_trace(tmp_path: Path) -> None:
    write_trace(tmp_path, range(400))
    traces = Traces(tmp_path)
    traces.refresh()
    found = traces.recording(201, 202)
    expected = [line for rollout in (201, 202) for line in spans(rollout)]
    there = {(span.role, span.own_id) for span in found.spans if span.fields["rollout"] in (201, 202)}
    assert there == {(line["role"], line["id"]) for line in expected}
    assert found.start == pytest.approx(START + 2010)
    with pytest.raises(BadInputError, match="no spans of rollouts 400 to 401; there are those of 0 to 399"):
        traces.recording(400, 401)


def test_a_trace_that_grows_and_turns_is_read_once(tmp_path: Path) -> None:
    traces, file = Traces(tmp_path), tmp_path / "trace" / "driver.jsonl"
    write_trace(tmp_path, range(2))
    traces.refresh()
    write_trace(tmp_path, [2])
    file.rename(file.with_suffix(".jsonl.1"))
    write_trace(tmp_path, [3])
    with file.open("a") as output:
        output.write("{broken}\n" + json.dumps(next(iter(spans(9)))))
    for _ in range(2):
        traces.refresh()
        assert traces.broken == 1
        recording = traces.recording(0, 3)
        driver = [span.fields["rollout"] for span in recording.spans if span.role == "driver"]
        assert sorted(driver) == sorted([0, 1, 2, 3] * 3)


def test_lanes_have_every_span_once_and_children_below_their_parents(tmp_path: Path) -> None:
    write_trace(tmp_path, [0])
    traces = Traces(tmp_path)
    traces.refresh()
    drawn = lanes(traces.recording(0, 0))
    assert [role["role"] for role in drawn["roles"]] == ["driver", "rollout_manager", "trainer_0"]
    assert sum(len(role["spans"]) for role in drawn["roles"]) == len(list(spans(0)))
    trainer = drawn["roles"][2]["spans"]
    assert [(row, drawn["names"][name]) for row, name, *_ in trainer] == [
        (0, "train/rollout"),
        (1, "train/actor_train"),
    ]
    assert trainer[1][2:4] == [6100.0, 1800.0]
    for role in drawn["roles"]:
        rows: dict[int, list[tuple[float, float]]] = {}
        for row, _, start, length, _ in role["spans"]:
            rows.setdefault(row, []).append((start, start + length))
        assert max(rows) < role["rows"]
        for row in rows.values():
            assert all(a[1] <= b[0] + 0.01 for a, b in zip(sorted(row), sorted(row)[1:], strict=False))


def test_of_too_many_spans_the_shortest_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.viewing.traces._MOST_SPANS", 4)
    monkeypatch.setattr("tools.viewing.traces._MOST_ROWS", 2)
    write_trace(tmp_path, [0])
    traces = Traces(tmp_path)
    traces.refresh()
    recording: Recording = traces.recording(0, 0)
    drawn = lanes(recording)
    assert drawn["left_out"] == len(recording.spans) - 4
    left = [drawn["names"][name] for role in drawn["roles"] for _, name, *_ in role["spans"]]
    assert left == ["driver/wait_for_rollout", "rollout/samples", "rollout/rewarding"]
    assert sum(role["hidden"] for role in drawn["roles"]) == 1  # another rollout/rewarding at the same time


def test_memory_over_the_time_of_the_run(tmp_path: Path) -> None:
    write_trace(tmp_path, range(3))
    traces = Traces(tmp_path)
    traces.refresh()
    curves = memory(traces)
    assert set(curves) == {f"{kind}/trainer_0" for kind in ("host", "used", "peak", "total")}
    assert list(curves["peak/trainer_0"].y) == [30.0, 31.0, 32.0]
    assert list(curves["host/trainer_0"].x) == pytest.approx([7.9, 17.9, 27.9])
