"""Expert-parallel trainers beside an engine that places experts as they do: each rank is brought its own alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.harness import ROOT, TrainProcess, series
from tests.integration.test_train import Value, flags, make_workspace

NUM_GPUS = 0
pytestmark = pytest.mark.integration

_RUN_S = 300
_FLOAT32 = 4
LAYOUT: dict[str, Value] = {
    **{"actor_num_gpus_per_node": 2, "expert_model_parallel_size": 2},
    **{"rollout_num_gpus_per_engine": 2, "sglang_ep_size": 2, "check_weight_update_equal": True},
}


@pytest.mark.full
def test_every_rank_is_brought_its_own_experts(tmp_path: Path) -> None:
    """All bytes in the engine are the trainers', and log-probs agree after a step."""
    make_workspace(tmp_path)
    words = [str(tmp_path / "experts"), "--arch", "qwen3_moe", "--num-layers", "2", "--hidden-size", "64"]
    made = subprocess.run(
        [sys.executable, str(ROOT / "tools/make_tiny_model.py"), *words],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    model = str(tmp_path / "experts")
    line = flags(tmp_path, tmp_path / "run", hf_checkpoint=model, ref_load=model, num_rollout=2, **LAYOUT)
    with TrainProcess(line, tmp_path / "log") as process:
        assert process.wait(_RUN_S) == 0, process.tail()
        process.assert_no_process_left()
    differences = series(tmp_path / "run", "train/train_rollout_logprob_abs_diff")
    assert len(differences) == 2
    assert max(differences) < 1e-5
    parameters = int(made.stdout.split(" parameters")[0].split()[-1].replace(",", ""))
    pushed = series(tmp_path / "run", "perf/update_weights_wire_bytes")
    assert len(pushed) == 3
    assert max(pushed) < 0.6 * parameters * _FLOAT32, "experts, which are most of it, by halves"
