"""examples/eval_multi_task: its YAML and its command are what train.py takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tools import make_tiny_model

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]


def test_the_examples_command_resolves(tmp_path: Path) -> None:
    assert make_tiny_model.main([str(tmp_path / "model"), "--num-layers", "1", "--hidden-size", "32"]) == 0
    command = ["bash", str(ROOT / "examples/eval_multi_task/run.sh"), "model", "--dry-run"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "evaluation: two_digits, 64 prompts" in done.stdout
    assert "evaluation: one_digit, 20 prompts" in done.stdout
    assert "0 rollouts" in done.stdout
