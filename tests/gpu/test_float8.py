"""Engines that serve blocks of float8, pushed what trainers in bfloat16 learn; and the same bytes from every device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime.files.block_scaled import quantise
from slime.models import hf_config
from slime.utils.device import current_device
from tests.gpu.test_families import write_model
from tests.gpu.test_loop import Record, run
from tests.integration.harness import ROOT, series
from tests.integration.tiny_run import Value

NUM_GPUS = 1
_ROLLOUTS = 2
_CONVERT_S = 300
_FLOAT8_DIFFERENCE = {"qwen3-4B": 0.12, "qwen3-30B-A3B": 0.1, "deepseek-v3": 0.32}
"""Of log-probs, at most: twice what inputs of linear layers in float8 alone do to transformers' model in float32 (0.06,
0.05, 0.16). Weights are compared exactly."""
_SPREAD = 0.05
"""Of the random weights: log-probs then tell them apart."""
_ENGINE: dict[str, Value] = {
    # What needs no compiler on the host.
    "sglang_fp8_gemm_backend": "triton",
    "sglang_moe_runner_backend": "triton",
    "bf16": True,
    "use_distributed_optimizer": True,
    "num_rollout": _ROLLOUTS,
    "lr": "1e-5",  # as trainers of such models do: less than a step of float8
    "update_weight_buffer_size": 2**20,
    **dict.fromkeys(("ref_load", "use_kl_loss", "kl_loss_coef", "kl_loss_type")),
}


def write_float8(name: str, workspace: Path, directory: Path) -> Path:
    """A published config made small, with random weights, converted as users convert."""
    write_model(name, workspace / "model", directory / "bf16")
    own = hf_config(directory / "bf16")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(own, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=_SPREAD)
    config = (directory / "bf16" / "config.json").read_bytes()
    model.save_pretrained(directory / "bf16")
    (directory / "bf16" / "config.json").write_bytes(config)
    tool = [sys.executable, str(ROOT / "tools/convert_hf_to_fp8.py")]
    words = ["--model-dir", str(directory / "bf16"), "--save-dir", str(directory / "fp8")]
    subprocess.run([*tool, *words], check=True, timeout=_CONVERT_S, stdout=subprocess.DEVNULL)
    return directory / "fp8"


def run_float8(name: str, workspace: Path, tmp_path: Path, record_property: Record, **changes: Value) -> None:
    """A run makes every step, and the engines' log-probs, in float8, are near the trainer's."""
    checkpoint, limit = write_float8(name, workspace, tmp_path), _FLOAT8_DIFFERENCE[name]
    changes |= {"hf_checkpoint": str(checkpoint), "ci_train_rollout_logprob_abs_diff_threshold": str(limit)}
    run_dir = run(workspace, tmp_path.name, **{**_ENGINE, **changes})
    differences = series(run_dir, "train/train_rollout_logprob_abs_diff")
    record_property("log-prob difference", ", ".join(f"{difference:.4f}" for difference in differences))
    assert len(differences) == _ROLLOUTS
    assert max(differences) < limit
    assert all(norm > 0 for norm in series(run_dir, "train/grad_norm"))


@pytest.mark.parametrize("shape", [(256, 384), (576, 512), (1, 300), (131, 200)])
def test_a_gpu_quantises_into_the_bytes_of_a_cpu(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape).bfloat16() * 3
    weight[: shape[0] // 2, :128] = 0
    for ours, theirs in zip(
        quantise(weight.to(current_device()), (128, 128)), quantise(weight, (128, 128)), strict=True
    ):
        assert torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("name", _FLOAT8_DIFFERENCE)
def test_colocated_engines_in_float8(name: str, workspace: Path, tmp_path: Path, record_property: Record) -> None:
    """Every push is compared in the engine with a float8 checkpoint of the same tensors, in many buckets."""
    run_float8(name, workspace, tmp_path, record_property)


@pytest.mark.parametrize("transport", ["disk", "distributed"])
@pytest.mark.gpus(2)
def test_float8_engines_on_other_gpus(transport: str, workspace: Path, tmp_path: Path, record_property: Record) -> None:
    changes: dict[str, Value] = {"colocate": None, "actor_num_gpus_per_node": 1, "rollout_num_gpus": 1}
    changes["update_weight_transport"] = transport
    if transport == "disk":
        changes["update_weight_disk_dir"] = str(tmp_path / "versions")
    run_float8("qwen3-30B-A3B", workspace, tmp_path, record_property, **changes)
