"""On-policy distillation by a served teacher and by one in the trainers: real Ray, Megatron and SGLang on a CPU."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.harness import ROOT, RUN_S, TrainProcess, series
from tests.integration.strikes import back, events_of
from tests.integration.test_faults import ASKED
from tests.integration.tiny_run import flags, make_workspace

NUM_GPUS = 0
pytestmark = [pytest.mark.integration, pytest.mark.full]
_ROLLOUTS = 8


def make_teacher(directory: Path) -> str:
    """Another model than that of `make_workspace`, of its shape."""
    make = [sys.executable, str(ROOT / "tools/make_tiny_model.py"), str(directory), "--seed", "5"]
    size = ["--num-layers", "2", "--hidden-size", "64", "--initializer-range", "0.1"]
    subprocess.run([*make, *size], check=True, stdout=subprocess.DEVNULL, timeout=120)
    return str(directory)


@pytest.mark.parametrize("top_k", [0, 8])
def test_both_kinds_of_teacher_say_the_same(top_k: int, tmp_path: Path) -> None:
    """Of the same samples and weights, rollout after rollout, with the task's reward beside it: what one of them
    teaches, the other one does too."""
    workspace, teacher = make_workspace(tmp_path), make_teacher(tmp_path / "teacher")
    kinds: dict[str, dict[str, Any]] = {
        "megatron": {"opd_teacher_load": teacher},
        "sglang": {"rm_model_path": teacher, "rm_num_gpus": 1},
    }
    if top_k:
        kinds = {kind: options | {"opd_top_k": top_k} for kind, options in kinds.items()}
    kl = {}
    for kind, options in kinds.items():
        run_dir = tmp_path / kind
        line = flags(workspace, run_dir, use_opd=True, opd_type=kind, num_rollout=4, lr="3e-3", **options)
        with TrainProcess(line, tmp_path / f"{kind}.log") as process:
            assert process.wait(2 * RUN_S) == 0, process.tail()
            process.assert_no_process_left()
        kl[kind] = series(run_dir, "train/opd_reverse_kl")
        assert set(series(run_dir, "rollout/raw_reward")) != {0.0}
    assert kl["sglang"] == pytest.approx(kl["megatron"], abs=1e-5)
    assert len(kl["sglang"]) == 4
    assert kl["sglang"][0] > 0.05


@pytest.mark.parametrize("strike", ["kill", "suspend"])
def test_a_served_teacher_that_dies_or_hangs_is_started_again(strike: str, tmp_path: Path) -> None:
    workspace, teacher, run_dir = make_workspace(tmp_path), make_teacher(tmp_path / "teacher"), tmp_path / "run"
    served = {"use_opd": True, "opd_type": "sglang", "rm_model_path": teacher, "rm_num_gpus": 1}
    line = flags(workspace, run_dir, num_rollout=_ROLLOUTS, reward_timeout=60, **served, **ASKED)
    with TrainProcess(line, tmp_path / "log") as process:
        process.wait_until(lambda: series(run_dir, "train/loss"), RUN_S, "the first training step")
        getattr(process.find("slime.backends.sglang.launch", teacher), strike)()
        assert process.wait(2 * RUN_S) == 0, process.tail()
        process.assert_no_process_left()
    (lost,) = events_of(run_dir, "engine_died", "engine_hangs")
    assert (lost["subject"], lost["kind"]) == ("reward engine 0", {"kill": "engine_died"}.get(strike, "engine_hangs"))
    assert back(run_dir, "reward engine 0")
    assert len(series(run_dir, "train/opd_reverse_kl")) == _ROLLOUTS


@pytest.mark.parametrize(("strike", "reason"), [("hangs", "reward_timeout"), ("dies", "reward_error")])
def test_a_teacher_elsewhere_that_does_not_answer_ends_the_run(strike: str, reason: str, tmp_path: Path) -> None:
    """Nobody here can start it again: the run ends within the deadlines of a reward, and says whom it has asked."""
    workspace, run_dir = make_workspace(tmp_path), tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as server:  # it takes connections, and answers nothing
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        if strike == "dies":
            server.close()
        line = flags(workspace, run_dir, use_opd=True, opd_type="sglang", rm_url=url, reward_timeout=20)
        with TrainProcess(line, tmp_path / "log") as process:
            assert process.wait(RUN_S) == 1, process.tail()
            process.assert_no_process_left()
    (error,) = (text for text in process.log.read_text().splitlines() if text.startswith("train.py: error:"))
    assert f"groups failed, more than a rollout has (--on-sample-error retry); the last one: {reason}" in error
    assert series(run_dir, "train/loss") == []
