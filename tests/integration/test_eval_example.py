"""examples/eval_multi_task, run as its README says, with a model that has learnt nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.harness import ROOT, read_metrics
from tools import make_tiny_model

NUM_GPUS = 0
pytestmark = pytest.mark.integration


@pytest.mark.full
def test_the_example_scores_both_tasks(tmp_path: Path) -> None:
    assert make_tiny_model.main([str(tmp_path / "model"), "--num-layers", "2", "--hidden-size", "64"]) == 0
    with open(tmp_path / "log", "w") as log:
        status = subprocess.run(
            ["bash", str(ROOT / "examples/eval_multi_task/run.sh"), "model", "--run-dir", "run"],
            cwd=tmp_path,
            env=os.environ | {"PYTHON": sys.executable},
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=600,
        ).returncode
    assert status == 0, (tmp_path / "log").read_text()[-4000:]
    (scores,) = [line for line in read_metrics(tmp_path / "run") if "eval/step" in line]
    assert {"eval/two_digits-avg@4", "eval/two_digits-pass@4", "eval/one_digit"} <= scores.keys()
    assert scores["eval/two_digits-no_reward"] == scores["eval/one_digit-no_reward"] == 0
    assert "eval/one_digit-avg@1" not in scores
    assert "rollout 0/0 | eval/two_digits " in (tmp_path / "log").read_text()
