"""Expert-parallel trainers beside an engine that places experts as they do: each rank is brought its own alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.harness import ROOT, TrainProcess, series
from tests.integration.tiny_run import Value, flags, make_workspace

NUM_GPUS = 0
pytestmark = pytest.mark.integration

_RUN_S = 600
_FLOAT32 = 4
LAYOUT: dict[str, Value] = {
    **{"actor_num_gpus_per_node": 2, "expert_model_parallel_size": 2},
    **{"rollout_num_gpus_per_engine": 2, "sglang_ep_size": 2, "check_weight_update_equal": True},
}


_HALVES = """
from types import SimpleNamespace
import torch
from slime.backends.sglang import patches
from slime.backends.sglang.cpu import stand_ins
patches.install()
from sglang.srt.layers.moe import fused_moe_native as native
from sglang.srt.layers.moe.topk import StandardTopKOutput
native.SiluAndMul = lambda: lambda x: torch.nn.functional.silu(x[:, :12]) * x[:, 12:]  # its own asks for a server
def forward(first, ids):
    layer = SimpleNamespace(num_experts=8, w13_weight=w13[first:], w2_weight=w2[first:])
    config = SimpleNamespace(apply_router_weight_on_input=False, activation="silu", gemm1_alpha=None)
    return native.moe_forward_native(layer, rows, StandardTopKOutput(weights, ids, None), config)
rows, w13, w2 = torch.randn(40, 16), torch.randn(8, 24, 16), torch.randn(8, 16, 12)
weights, ids = torch.rand(40, 8).topk(3)
ids[:10] = torch.rand(10, 4).topk(3).indices  # which have no expert in the second half
whole = forward(0, ids)
try:
    forward(0, ids.where(ids < 4, -1))
    print("nothing to mend")
except RuntimeError:
    stand_ins.leave_out_absent_experts()
halves = forward(0, ids.where(ids < 4, -1)) + forward(4, (ids - 4).where(ids >= 4, -1))
print(float((halves - whole).abs().max() / whole.abs().max()))
print(float(forward(0, torch.full_like(ids, -1)).abs().max()))
"""


def test_ranks_compute_with_the_experts_that_they_have() -> None:
    """SGLang's own function on a CPU; by itself it takes -1, of an absent expert, for a place in a list."""
    done = subprocess.run([sys.executable, "-c", _HALVES], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    *problems, error, of_none = done.stdout.splitlines()[-3:]
    assert "nothing to mend" not in problems, "SGLang leaves absent experts out now: drop the patch"
    assert float(error) < 1e-5
    assert float(of_none) == 0.0


def make_model(directory: Path, *more: str) -> str:
    """A tiny model with experts; what the tool prints."""
    words = [str(directory), "--arch", "qwen3_moe", "--num-layers", "2", "--hidden-size", "64", *more]
    made = [sys.executable, str(ROOT / "tools/make_tiny_model.py"), *words]
    return subprocess.run(made, check=True, capture_output=True, text=True, timeout=300).stdout


@pytest.mark.full
def test_experts_are_found_near_the_one_before(tmp_path: Path) -> None:
    """And weights are loaded byte for byte as without the fix, in whatever order they come."""
    make_model(tmp_path / "model", "--num-experts", "64", "--intermediate-size", "16", "--dtype", "bfloat16")
    command = [sys.executable, "-m", "tests.integration.expert_loading", str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # Every one at once, but for those that are to be loaded apart, and as the class itself loads them.
    assert found["stacks"] == {
        f"{kind}, {where}": [[], 0 if kind == "apart" else 4, 4, True]
        for kind in ("whole", "tensor", "expert", "apart")
        for where in ("CPU", "GPU")
    }
    without, now = found["looks"]
    assert without > 60, "SGLang looks names up now: drop the patch"
    assert now < 20
    assert found["changed"] >= 8
    assert found["differ"] == {"pushed": [], "backwards": [], "shuffled": []}


@pytest.mark.full
def test_every_rank_is_brought_its_own_experts(tmp_path: Path) -> None:
    """All bytes in the engine are the trainers', and log-probs agree after a step."""
    make_workspace(tmp_path)
    printed = make_model(tmp_path / "experts")
    model = str(tmp_path / "experts")
    line = flags(tmp_path, tmp_path / "run", hf_checkpoint=model, ref_load=model, num_rollout=2, **LAYOUT)
    with TrainProcess(line, tmp_path / "log") as process:
        assert process.wait(_RUN_S) == 0, process.tail()
        process.assert_no_process_left()
    differences = series(tmp_path / "run", "train/train_rollout_logprob_abs_diff")
    assert len(differences) == 2
    assert max(differences) < 1e-5
    parameters = int(printed.split(" parameters")[0].split()[-1].replace(",", ""))
    pushed = series(tmp_path / "run", "perf/update_weights_wire_bytes")
    assert len(pushed) == 3
    assert max(pushed) < 0.6 * parameters * _FLOAT32, "experts, which are most of it, by halves"
