"""The ladder on tiny models, as a user climbs it: its report, and that its figures are those of the runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from slime.utils.device import is_cuda
from tests.integration.harness import ROOT, series

NUM_GPUS = 0
pytestmark = pytest.mark.integration

_LIMIT_S = 40 * 60


def climb(output: Path, config: str, *levels: int) -> tuple[int, str]:
    """Exit status, and the report that was printed."""
    command = [sys.executable, "tools/validate_model.py", "--config", f"tests/data/configs/{config}", "--tiny"]
    command += ["--output-dir", str(output), "--levels", *map(str, levels)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S)
    assert done.stdout == (output / "report.txt").read_text() or done.returncode == 2, done.stderr[-4000:]
    return done.returncode, done.stdout


@pytest.mark.full
def test_level_0_passes_on_a_tiny_qwen3(tmp_path: Path) -> None:
    status, report = climb(tmp_path / "out", "qwen3-4B", 0)
    assert status == 0, report
    assert report.startswith("Result: Pass - every part that applies passed: level 0, loop\n")
    run_dir = tmp_path / "out" / "level_0_loop"
    (norm,) = series(run_dir, "train/grad_norm")
    (line,) = re.findall(r"^  - loop: Pass - (.*) \[level_0_loop/log\]$", report, re.MULTILINE)
    assert f"gradient norm {norm:.3g};" in line
    assert "Megatron DDP over 2 rank(s); adapters of rank 4;" in line
    assert (run_dir / "log").read_text().startswith("$ ")


@pytest.mark.full
@pytest.mark.parametrize("config", ["qwen3-4B", "qwen3-30B-A3B"])
def test_levels_0_1_2_and_5_pass(config: str, tmp_path: Path) -> None:
    """Of both, generation too: this SGLang serves experts on a CPU."""
    status, report = climb(tmp_path / "out", config, 0, 1, 2, 5)
    assert status == 0, report
    parts = re.findall(r"^  - (.*?): (\w+) - ", report, re.MULTILINE)
    passed = ["loop", "loop", "one rank", "data 2", "tensor 2, sequence", "pipeline 2", "context 2"]
    passed += ["expert 2"] if "A3B" in config else []
    passed += ["loop with adapters, tensor 2, sequence", "loss, supervised, all weights", "reward, GRPO, adapters"]
    assert [part for part, outcome in parts if outcome == "Pass"] == passed
    assert {outcome for _, outcome in parts} == {"Pass", "Skipped"}
    rewards = series(tmp_path / "out" / "level_5_grpo", "rollout/raw_reward")
    assert sum(rewards[-4:]) / 4 >= sum(rewards[:4]) / 4 + 0.1


@pytest.mark.full
@pytest.mark.parametrize("config", ["qwen3-4B", "qwen3-30B-A3B", "glm4.5-106B-A12B", "moonlight"])
def test_level_4_passes(config: str, tmp_path: Path) -> None:
    status, report = climb(tmp_path / "out", config, 4)
    assert status == 0, report


@pytest.mark.full
@pytest.mark.skipif(is_cuda(), reason="a GPU's SGLang serves it")
def test_a_model_that_no_engine_serves_here_is_blocked_and_trained_without(tmp_path: Path) -> None:
    status, report = climb(tmp_path / "out", "moonlight", 0, 1)
    assert status == 3, report
    parts = re.findall(r"^  - (.*?): (\w+) - (.*)", report, re.MULTILINE)
    assert [part[:2] for part in parts] == [("loop", "Blocked"), ("training part alone", "Pass")] * 2
    assert "SGLang alone, without a trainer, does not serve this model on this host: status 1: train.py:" in parts[0][2]
