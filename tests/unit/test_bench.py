"""What a benchmark says of itself."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path

import pytest

from tools import bench
from tools.benchmarks.report import Report


@pytest.mark.parametrize(
    "words",
    [
        ["step"],
        ["async", "--gpus", "2", "--budget-s", "300"],
        ["train", "--model", "qwen3-4b", "--profile", "--flags=--recompute-granularity full --seed 3"],
        ["train", "--model", "qwen3-30b-a3b", "--num-layers", "12"],
    ],
)
def test_the_command_of_a_figure_measures_the_same(words: list[str], tmp_path: Path) -> None:
    kept = ["--output", str(tmp_path / "out.jsonl"), "--log-dir", str(tmp_path)]
    command = bench.command_of(bench.parse([*words, *kept]))
    assert str(tmp_path) not in command
    again = shlex.split(command)
    assert again[:2] == ["python3", "tools/bench.py"]
    assert vars(bench.parse(again[2:])) == vars(bench.parse(words))


def test_a_figure_says_whether_it_is_reached(tmp_path: Path) -> None:
    report = Report("command", math.inf, tmp_path / "out.jsonl")
    report.add("refit", "qwen3-4b", 1, 0.05, "s", at_most=0.1)
    report.add("train, MFU", "qwen3-4b", 1, 0.05, "", at_least=0.42)
    report.add("step", "qwen3-4b", 1, 3.0, "s", parts={"generation": 1.0})
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["target"], row["met"]) for row in rows] == [(0.1, True), (0.42, False), (None, None)]
    assert rows[2]["parts"] == {"generation": 1.0}
    part = Report("command", math.inf, whole_model=False)
    part.add("refit", "qwen3-4b, 2 layers", 1, 0.05, "s", at_most=0.1)
    assert (part.rows[0]["target"], part.rows[0]["met"]) == (None, None)


def test_a_host_of_too_few_gpus_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(bench.device, "count", lambda: 1)
    assert bench.main(["step", "--gpus", "2", "--log-dir", str(tmp_path / "logs")]) == 1
    assert capsys.readouterr().err == "bench: error: --gpus 2: GPUs that torch sees on this host: 1\n"
    assert not (tmp_path / "logs").exists()
