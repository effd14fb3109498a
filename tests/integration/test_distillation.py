"""On-policy distillation by a served teacher and by one in the trainers: real Ray, Megatron and SGLang on a CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.harness import ROOT, TrainProcess, series
from tests.integration.test_train import RUN_S, flags, make_workspace

NUM_GPUS = 0
pytestmark = [pytest.mark.integration, pytest.mark.full]


def test_both_kinds_of_teacher_say_the_same(tmp_path: Path) -> None:
    """Of the same samples and weights; the student comes nearer to the teacher, with the task's reward beside it."""
    workspace, teacher = make_workspace(tmp_path), tmp_path / "teacher"
    make = [sys.executable, str(ROOT / "tools/make_tiny_model.py"), str(teacher), "--seed", "5"]
    size = ["--num-layers", "2", "--hidden-size", "64", "--initializer-range", "0.1"]
    subprocess.run([*make, *size], check=True, stdout=subprocess.DEVNULL, timeout=120)
    kinds: dict[str, dict[str, Any]] = {
        "megatron": {"opd_teacher_load": str(teacher)},
        "sglang": {"rm_model_path": str(teacher), "rm_num_gpus": 1},
    }
    kl = {}
    for kind, options in kinds.items():
        run_dir = tmp_path / kind
        line = flags(workspace, run_dir, use_opd=True, opd_type=kind, num_rollout=4, lr="3e-3", **options)
        with TrainProcess(line, tmp_path / f"{kind}.log") as process:
            assert process.wait(2 * RUN_S) == 0, process.tail()
            process.assert_no_process_left()
        kl[kind] = series(run_dir, "train/opd_reverse_kl")
        assert set(series(run_dir, "rollout/raw_reward")) != {0.0}
    assert kl["sglang"][0] == pytest.approx(kl["megatron"][0], abs=1e-5)
    for of_run in kl.values():
        assert of_run[0] > 0.05
        assert of_run[-1] < of_run[0] / 1.2
