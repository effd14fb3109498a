"""Corridors of metrics: what is in, out, missing or not finite, and baselines that change on purpose only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.utils.errors import BadInputError
from slime.utils.external_utils import metric_gate
from slime.utils.external_utils.metric_gate import Corridor, MetricGateError, Seen, check_metrics, read_baselines
from tools import update_baselines

NUM_GPUS = 0
KEY = "test_x.py full"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLIME_TEST_SCALE", "SLIME_TEST_USE_DEEPEP", "SLIME_TEST_USE_FP8_ROLLOUT", "SLIME_CI_GATE_TIMES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(metric_gate, "_card", lambda: "cpu")


@pytest.fixture
def test_file(tmp_path: Path) -> Path:
    return tmp_path / "tests" / "test_x.py"


def run(tmp_path: Path, *lines: dict[str, Any], name: str = "run") -> Path:
    directory = tmp_path / name
    directory.mkdir()
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def baseline(test_file: Path, card: str = "cpu", **values: dict[str, float]) -> None:
    metric_gate.write_baselines(metric_gate.baselines_file(test_file), {KEY: Seen(card, values)})


STEPS = (
    {"train/step": 0, "time": 1.0, "kl": 0.0},
    {"rollout/step": 0, "time": 1.5, "reward": 0.2},
    {"rollout/step": 0, "time": 1.6, "perf/step_time": 4.0},
    {"train/step": 1, "time": 2.0, "kl": 0.5},
    {"rollout/step": 1, "time": 2.5, "reward": 0.6},
)


@pytest.mark.parametrize(
    ("corridor", "fault"),
    [
        (Corridor("kl", steps=(0,), at_least=0.0, at_most=0.0), None),
        (Corridor("kl", steps=(0, 1), at_most=0.4), "kl at step 1: 0.5, allowed -inf to 0.4"),
        (Corridor("reward", at_least=0.6), None),
        (Corridor("reward", steps=(-2,), at_least=0.6), "reward at step -2: 0.2, allowed 0.6 to inf"),
        (Corridor("reward", steps=(-3,)), "reward at step -3: missing"),
        (Corridor("kl", steps=(2,)), "kl at step 2: missing"),
        (Corridor("nothing"), "nothing at the last step: missing"),
        (Corridor("reward", below=0.1, above=0.2), None),
        (Corridor("reward", above=0.05), "reward at the last step: 0.6, allowed -inf to 0.55"),
        (Corridor("reward", below_ratio=0.5, above_ratio=0.3), None),
        (Corridor("reward", above_ratio=0.1), "reward at the last step: 0.6, allowed -inf to 0.55"),
        (Corridor("reward", at_most=0.3, above=9), "reward at the last step: 0.6, allowed -inf to 0.3"),
        (Corridor("reward", steps=(0,), below=1), "there is no baseline to hold it against"),
    ],
)
def test_corridors(tmp_path: Path, test_file: Path, corridor: Corridor, fault: str | None) -> None:
    baseline(test_file, reward={"-1": 0.5})
    directory = run(tmp_path, *STEPS)
    if fault is None:
        check_metrics(test_file, directory, [corridor])
        return
    with pytest.raises(MetricGateError) as raised:
        check_metrics(test_file, directory, [corridor])
    assert fault in str(raised.value)
    assert (f"update_baselines.py {directory}" in str(raised.value)) == corridor.needs_baseline()


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_what_is_not_finite_is_a_fault_without_any_bound(tmp_path: Path, test_file: Path, value: str) -> None:
    directory = run(tmp_path, {"train/step": 0, "time": 1.0, "kl": value})
    with pytest.raises(MetricGateError, match=f"kl at the last step: {float(value)}"):
        check_metrics(test_file, directory, [Corridor("kl")])
    assert "kl" not in json.loads((directory / "gate.json").read_text())["values"]


def test_all_faults_are_told_at_once(tmp_path: Path, test_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corridors = [Corridor("kl", at_most=0.1), Corridor("reward"), Corridor("other")]
    with pytest.raises(MetricGateError, match="2 metrics of"):
        check_metrics(test_file, run(tmp_path, *STEPS), corridors)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["FAILED", "ok", "FAILED"]


def test_a_resumed_run_counts_as_it_went_on(tmp_path: Path, test_file: Path) -> None:
    directory = run(tmp_path, *STEPS, {"train/step": 1, "time": 9.0, "kl": 0.1})
    assert check_metrics(test_file, directory, [Corridor("kl")]).values == {"kl": {"-1": 0.1}}


@pytest.mark.parametrize(
    ("switch", "card", "gated"), [("1", "cpu", True), ("", "cpu", False), ("1", "NVIDIA H200", False)]
)
def test_times_are_gated_where_it_is_asked_for_and_on_the_baselines_card(
    tmp_path: Path, test_file: Path, monkeypatch: pytest.MonkeyPatch, switch: str, card: str, gated: bool
) -> None:
    monkeypatch.setenv("SLIME_CI_GATE_TIMES", switch)
    baseline(test_file, card, **{"perf/step_time": {"-1": 2.0}})
    directory = run(tmp_path, *STEPS)
    corridors = [Corridor("perf/step_time", above_ratio=0.2, timed=True)]
    if gated:
        with pytest.raises(MetricGateError, match=r"perf/step_time at the last step: 4, allowed -inf to 2\.4"):
            check_metrics(test_file, directory, corridors)
    else:
        check_metrics(test_file, directory, corridors)
    assert json.loads((directory / "gate.json").read_text())["values"] == {"perf/step_time": {"-1": 4.0}}


def test_scales_and_variants_have_their_own_baselines(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {metric_gate.baseline_key("tests/test_x.py")}
    for name, value in (
        ("SLIME_TEST_SCALE", "tiny"),
        ("SLIME_TEST_USE_DEEPEP", "1"),
        ("SLIME_TEST_USE_FP8_ROLLOUT", "1"),
    ):
        monkeypatch.setenv(name, value)
        keys.add(metric_gate.baseline_key("tests/test_x.py"))
    assert keys == {KEY, "test_x.py tiny", "test_x.py tiny deepep", "test_x.py tiny deepep fp8-rollout"}


@pytest.mark.parametrize("content", [None, '{"train/step": 0', '{"train/step": 0}\n{'])
def test_a_run_without_readable_metrics(tmp_path: Path, test_file: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(BadInputError, match=r"metrics\.jsonl(, line \d is damaged| cannot be read)"):
        check_metrics(test_file, tmp_path, [])


def test_baselines_change_on_purpose(tmp_path: Path, test_file: Path) -> None:
    file = metric_gate.baselines_file(test_file)
    directories = []
    for number, reward in enumerate((0.4, 0.6)):
        directories.append(run(tmp_path, {"rollout/step": 0, "time": 1.0, "reward": reward}, name=f"run{number}"))
        with pytest.raises(MetricGateError, match="no baseline"):
            check_metrics(test_file, directories[-1], [Corridor("reward", below=0.05, above=0.05)])
    assert not file.exists(), "a run changes no baseline"
    assert update_baselines.update(directories, file) == [f"{KEY}: reward at step -1: none -> 0.5 (cpu)"]
    assert read_baselines(file) == {KEY: Seen("cpu", {"reward": {"-1": 0.5}})}
    assert update_baselines.update(directories, file) == []
    assert update_baselines.update(directories[1:], file) == [f"{KEY}: reward at step -1: 0.5 -> 0.6 (cpu)"]
    check_metrics(test_file, directories[1], [Corridor("reward", below=0.05, above=0.05)])


@pytest.mark.parametrize("content", ["{", "[]", '{"card": "cpu"}', '{"test": "a", "no": 1}'])
def test_damaged_records_change_nothing(tmp_path: Path, test_file: Path, content: str) -> None:
    baseline(test_file, reward={"-1": 0.5})
    file = metric_gate.baselines_file(test_file)
    before = file.read_text()
    (tmp_path / "gate.json").write_text(content)
    with pytest.raises(BadInputError, match=r"gate\.json is damaged"):
        update_baselines.update([tmp_path], file)
    assert file.read_text() == before
    with pytest.raises(BadInputError, match=r"gate\.json is missing"):
        update_baselines.update([tmp_path / "none"], file)


def test_runs_of_different_cards_make_no_mean() -> None:
    with pytest.raises(BadInputError, match="different cards"):
        update_baselines.mean_of([Seen("cpu", {"a": {"0": 1.0}}), Seen("NVIDIA H200", {"a": {"0": 1.0}})])
    mean = update_baselines.mean_of([Seen("cpu", {"a": {"0": value}}) for value in (1.0, 2.0)])
    assert mean == Seen("cpu", {"a": {"0": 1.5}})
