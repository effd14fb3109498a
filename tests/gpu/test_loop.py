"""The loops with the real parts on GPUs: both placements, weights proved equal, sleep and wake, resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slime.utils import device
from tests.integration.harness import TrainProcess, series
from tests.integration.tiny_run import Value, flags

NUM_GPUS = 1
RUN_S = 420
ASLEEP_GIB = 6.0
"""What both sides may keep of a GPU while they sleep: 3 GiB each."""
_BFLOAT16_DIFFERENCE = 0.02
_ENGINE: dict[str, Value] = {
    "sglang_attention_backend": "triton",
    "sglang_sampling_backend": "pytorch",
    "sglang_grammar_backend": "none",
    "sglang_mem_fraction_static": "0.3",
    "sglang_disable_prefill_cuda_graph": True,
    "sglang_cuda_graph_max_bs_decode": 16,
    "sglang_max_total_tokens": 32768,
    "sglang_enable_deterministic_inference": None,
    "fp32": None,
    "bf16": True,
}
"""The cache is small: engines that start on a GPU at the same time would count each other's memory."""
_LARGE_CACHE: dict[str, Value] = {"sglang_max_total_tokens": 2**24}
"""For runs that have a GPU to themselves and look at what is left on it: 4 GiB of the tiny model's keys and values,
more than `ASLEEP_GIB` allows beside all else if they stayed."""

Record = Callable[[str, object], None]


def run(workspace: Path, name: str, driver: str = "train.py", **changes: Value) -> Path:
    """Run a driver to a good end that leaves no process; its directory."""
    run_dir = workspace / name
    line = flags(workspace, run_dir, **{**_ENGINE, "check_weight_update_equal": True, **changes})
    with TrainProcess(line, workspace / f"{name}.log", driver=driver) as process:
        assert process.wait(RUN_S) == 0, process.tail()
        process.assert_no_process_left()
    return run_dir


def check(run_dir: Path, rollouts: int, record_property: Record, limit: float = _BFLOAT16_DIFFERENCE) -> None:
    """Every step was made, and trainer and engine agreed on its log-probs, up to ``limit`` in the mean."""
    differences = series(run_dir, "train/train_rollout_logprob_abs_diff")
    record_property("log-prob difference", f"{max(differences):.4f}")
    assert len(differences) == rollouts
    assert max(differences) < limit
    assert all(norm > 0 for norm in series(run_dir, "train/grad_norm"))


def test_colocated_sleeps_wakes_and_resumes(workspace: Path, record_property: Record) -> None:
    """The resume is with other learning rates, of matrices and of the embedding and head."""
    saved: dict[str, Value] = {"save": str(workspace / "checkpoints"), "save_interval": 1}
    same: dict[str, Value] = {**saved, **_LARGE_CACHE, "use_distributed_optimizer": True}
    run_dir = run(workspace, "colocated", num_rollout=2, lr="1e-3", decoupled_lr="2e-3", **same)
    asleep = series(run_dir, "perf/asleep_gib")
    record_property("GiB asleep", f"{max(asleep):.2f}")
    assert max(asleep) <= ASLEEP_GIB
    run(workspace, "colocated", num_rollout=3, lr="5e-4", decoupled_lr="4e-4", load=saved["save"], **same)
    check(run_dir, 3, record_property)
    steps = series(run_dir, "rollout/step")
    assert sorted(set(steps)) == [0, 1, 2]
    rates = {tuple(series(run_dir, f"train/lr-pg_{group}")) for group in range(2)}
    assert rates == {(1e-3, 1e-3, 5e-4), (2e-3, 2e-3, 4e-4)}


def test_adapters_above_weights_that_sleep_and_on_a_resume(workspace: Path, record_property: Record) -> None:
    """Sleeping engines keep the weights below adapters; a resume is on these weights, not on the merged ones."""
    saved: dict[str, Value] = {"save": str(workspace / "adapters-saved"), "save_hf": str(workspace / "merged")}
    adapters: dict[str, Value] = {"lora_rank": 8, "lora_sync": "adapter", "ref_load": None, **saved, **_LARGE_CACHE}
    run_dir = run(workspace, "adapters", num_rollout=2, **adapters)
    adapters["load"] = saved["save"]
    run(workspace, "adapters", num_rollout=3, **adapters)
    check(run_dir, 3, record_property)
    assert max(series(run_dir, "perf/asleep_gib")) <= ASLEEP_GIB
    adapters |= {"hf_checkpoint": saved["save_hf"], "save_hf": None, "num_rollout": 4}
    line = flags(workspace, workspace / "refused", **{**_ENGINE, **adapters})
    with TrainProcess(line, workspace / "refused.log") as process:
        assert process.wait(RUN_S) == 2, process.tail()
    assert f"the base of this run, {saved['save_hf']}" in process.tail()


@pytest.mark.gpus(2)
def test_disaggregated_by_nccl(workspace: Path, record_property: Record) -> None:
    """All GPUs but one train, tensor-parallel over two of them where there are enough."""
    trainers = device.count() - 1 if device.count() < 4 else 2
    slots: dict[str, Value] = {"colocate": None, "actor_num_gpus_per_node": trainers, "rollout_num_gpus": 1}
    parallel: dict[str, Value] = {"tensor_model_parallel_size": trainers, "sequence_parallel": trainers > 1 or None}
    check(run(workspace, "disaggregated", **slots, **parallel), 3, record_property)


@pytest.mark.gpus(2)
def test_colocated_trainers_of_another_layout_than_the_engine(workspace: Path, record_property: Record) -> None:
    """Pipeline-parallel trainers push into one tensor-parallel engine on the same two GPUs."""
    layout: dict[str, Value] = {"actor_num_gpus_per_node": 2, "pipeline_model_parallel_size": 2}
    check(run(workspace, "relayout", rollout_num_gpus_per_engine=2, **layout), 3, record_property)


@pytest.mark.gpus(2)
def test_an_engine_over_two_nodes(workspace: Path, record_property: Record) -> None:
    """Nodes of one GPU, both on this host: a server for each, and both sleep and wake."""
    nodes: dict[str, Value] = {"num_gpus_per_node": 1, "rollout_num_gpus_per_engine": 2}
    run_dir = run(workspace, "nodes", actor_num_gpus_per_node=2, **nodes)
    check(run_dir, 3, record_property)
    assert (run_dir / "logs/engine_0_node_1.log").exists()


@pytest.mark.gpus(2)
def test_asynchronous_by_nccl(workspace: Path, record_property: Record) -> None:
    """Pushes interrupt long responses; the trainer's log-probs by each token's own weights are the engine's."""
    slots: dict[str, Value] = {"colocate": None, "actor_num_gpus_per_node": 1, "rollout_num_gpus": 1}
    lengths: dict[str, Value] = {"rollout_max_response_len": 1024, "max_tokens_per_gpu": 4096, "num_rollout": 4}
    run_dir = run(workspace, "async", "train_async.py", keep_old_actor=True, **slots, **lengths)
    check(run_dir, 4, record_property)
    staleness = max(series(run_dir, "rollout/weight_staleness_max"))
    record_property("staleness", f"{staleness:.0f}")
    assert staleness <= 1
