"""What the proof costs, by a run's traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.benchmarks.push_proof import main

NUM_GPUS = 0


def line(role: str, name: str, version: int, seconds: float, **fields: Any) -> dict[str, Any]:
    return {"role": role, "name": name, "version": version, "seconds": seconds, **fields}


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))


def run_of(run_dir: Path, versions: int) -> None:
    for version in range(versions):
        slow = 1.0 if version == 0 else 0.001 * version  # the first push meets the engines
        spans = [line("trainer_0", "push/note", version, 0.0005), line("trainer_0", "push/note", version, 0.0005)]
        spans += [line("trainer_0", "push/call", version, slow, phase=phase) for phase in ("pause", "prove")]
        spans += [line(f"trainer_{rank}", "push/probe", version, seconds) for rank, seconds in enumerate((0.002, 9.0))]
        spans += [line("engine_0_actor", "engine/probe", version, 0.003)]
        write(run_dir / "trace" / f"trainer_{version}.jsonl", spans)
        write(run_dir / "trace" / f"driver_{version}.jsonl", [line("driver", "driver/probe", version, 0.004)])
    steps = [{"perf/step_time": seconds} for seconds in (1.0, 2.0, 9.0)]
    write(run_dir / "metrics.jsonl", [*steps, {"train/loss": 1.0}])


def test_parts_are_in_the_median_over_all_pushes_but_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of(tmp_path, 4)
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "3 pushes, steps of 2000 ms",
        "| part | ms | % of a step |",
        "|---|---|---|",
        "| trainers count and sample what they send | 1.00 | 0.050 |",
        "| engines that are new forget earlier loads | 0.00 | 0.000 |",
        "| engines tell what they loaded and hold | 2.00 | 0.100 |",
        "| the driver waits for the probe | 4.00 | 0.200 |",
        "| together | 7.00 | 0.350 |",
        "| beside: trainers score the probe | 2.00 | 0.100 |",
        "| beside: an engine scores the probe | 3.00 | 0.150 |",
    ]


def test_of_one_push_nothing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(tmp_path, 1)
    assert main([str(tmp_path)]) == 1
    assert main([str(tmp_path / "none")]) == 1
    assert "no run of two pushes or more is here" in capsys.readouterr().err
