"""Trainers of several dimensions beside or apart from engines of other layouts: every push proved byte by byte."""

from __future__ import annotations

from pathlib import Path

from tests.gpu.test_families import agree
from tests.gpu.test_loop import Record, check, run
from tests.integration.tiny_run import Value

NUM_GPUS = 8
_TENSOR: dict[str, Value] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
_ENGINES: dict[str, Value] = {
    "sglang_enforce_disable_flashinfer_allreduce_fusion": True,  # which FlashInfer would compile for minutes
}


def test_tensor_pipeline_and_data_into_tensor(workspace: Path, record_property: Record) -> None:
    """Colocated and resumed, with the distributed optimizer."""
    saved = str(workspace / "eight-saved")
    layout: dict[str, Value] = {"actor_num_gpus_per_node": 8, "pipeline_model_parallel_size": 2, **_TENSOR, **_ENGINES}
    layout |= {"rollout_num_gpus_per_engine": 2, "use_distributed_optimizer": True, "save": saved, "save_interval": 1}
    run_dir = run(workspace, "eight", num_rollout=2, **layout)
    run(workspace, "eight", num_rollout=3, load=saved, **layout)
    check(run_dir, 3, record_property)


def test_experts_of_pipeline_stages_into_experts(workspace: Path, tmp_path: Path, record_property: Record) -> None:
    layout: dict[str, Value] = {"actor_num_gpus_per_node": 8, "pipeline_model_parallel_size": 2, **_TENSOR, **_ENGINES}
    layout |= {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}
    layout |= {"rollout_num_gpus_per_engine": 4, "sglang_ep_size": 4}
    agree("qwen3-30B-A3B", "experts", workspace, tmp_path, record_property, **layout)


def test_asynchronous_from_tensor_and_context(workspace: Path, record_property: Record) -> None:
    """By NCCL into two engines of two GPUs."""
    layout: dict[str, Value] = {"colocate": None, "actor_num_gpus_per_node": 4, "rollout_num_gpus": 4, **_ENGINES}
    layout |= {"context_parallel_size": 2, "rollout_num_gpus_per_engine": 2, **_TENSOR}
    run_dir = run(workspace, "apart", "train_async.py", keep_old_actor=True, num_rollout=4, **layout)
    check(run_dir, 4, record_property)
