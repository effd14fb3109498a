"""Engines that are lost and come back on GPUs, by CUDA IPC and by NCCL; prefill and decode on a GPU each."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.gpu.test_loop import _ENGINE, _LARGE_CACHE, RUN_S, Record, check
from tests.integration.harness import TrainProcess, series
from tests.integration.test_faults import (
    ASKED,
    assert_each_version_is_its_rollouts,
    assert_nothing_lost_or_twice,
    back,
    events_of,
    kill_server,
    log_of,
    mid_rollout,
    server_is_busy,
    stop_scheduler,
)
from tests.integration.test_train import Value, flags
from tests.integration.test_train_async import samples_of
from tests.integration.tiny import log_probs_of

NUM_GPUS = 1
_ROLLOUTS = 5
_LENGTH: dict[str, Value] = {"rollout_max_response_len": 1024, "max_tokens_per_gpu": 4096}
"""Some seconds of a rollout, in which the engine is struck."""
_SAME_GIB = 0.25


def used_gib() -> list[float]:
    """What is taken of each GPU that this process may use, by nvidia-smi."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    query += [f"--id={visible}"] if visible else []
    listed = subprocess.run(query, check=True, capture_output=True, text=True, timeout=60).stdout.split()
    return [float(mib) / 1024 for mib in listed]


def run_with_a_loss(workspace: Path, name: str, record_property: Record, strike: object, **changes: Value) -> Path:
    """A run whose only engine is struck in its second rollout; what the GPUs hold while it generates is noted before
    and after, and is the same."""
    run_dir, log = workspace / name, workspace / f"{name}.log"
    dumps: Value = str(run_dir / "samples_{rollout_id}.pt")
    changes |= {**_LENGTH, **ASKED, "num_rollout": _ROLLOUTS, "save_debug_rollout_data": dumps}
    with TrainProcess(flags(workspace, run_dir, **{**_ENGINE, **changes}), log) as process:
        process.wait_until(lambda: series(run_dir, "train/loss"), RUN_S, "the first training step")
        since = len(log_of(run_dir, 0))
        process.wait_until(lambda: server_is_busy(run_dir, 0, since), RUN_S, "a request on the engine", 0.02)
        before = used_gib()
        mid_rollout(process, run_dir, 0, strike)  # type: ignore[arg-type]
        process.wait_until(lambda: back(run_dir, "engine 0"), RUN_S, "the engine")
        steps = len(series(run_dir, "train/loss"))
        process.wait_until(lambda: len(series(run_dir, "train/loss")) > steps, RUN_S, "a step with it")
        since = len(log_of(run_dir, 0))
        process.wait_until(lambda: server_is_busy(run_dir, 0, since), RUN_S, "a request on the engine", 0.02)
        after = used_gib()
        assert process.wait(RUN_S) == 0, process.tail()
        process.assert_no_process_left()
    (returned,) = events_of(run_dir, "engine_back")
    record_property("seconds", f"{returned['seconds']:.0f}")
    record_property("GiB", " ".join(f"{one:.2f}->{other:.2f}" for one, other in zip(before, after, strict=True)))
    check(run_dir, _ROLLOUTS, record_property)
    assert_each_version_is_its_rollouts(run_dir, _ROLLOUTS)
    assert_nothing_lost_or_twice(run_dir, _ROLLOUTS)
    assert max(abs(one - other) for one, other in zip(before, after, strict=True)) < _SAME_GIB
    return run_dir


@pytest.mark.parametrize("strike", [kill_server, stop_scheduler])
def test_an_engine_beside_trainers_comes_back_by_cuda_ipc(
    workspace: Path, record_property: Record, strike: object
) -> None:
    name = f"ipc_{getattr(strike, '__name__', '')}"
    run_dir = run_with_a_loss(workspace, name, record_property, strike, **_LARGE_CACHE)
    asleep = series(run_dir, "perf/asleep_gib")
    record_property("GiB asleep", " ".join(f"{gib:.2f}" for gib in asleep))
    assert max(asleep) - min(asleep) < _SAME_GIB


@pytest.mark.gpus(2)
def test_an_engine_apart_comes_back_by_nccl(workspace: Path, record_property: Record) -> None:
    slots: dict[str, Value] = {"colocate": None, "actor_num_gpus_per_node": 1, "rollout_num_gpus": 1}
    run_with_a_loss(workspace, "nccl_back", record_property, kill_server, **slots)


@pytest.mark.gpus(2)
@pytest.mark.parametrize(("backend", "package"), [("mooncake_tcp", "mooncake.engine"), ("nixl", "nixl._api")])
def test_prefill_and_decode_on_a_gpu_each(workspace: Path, record_property: Record, backend: str, package: str) -> None:
    """No trainers: what the engines hand over is right when the log-probs are those of Transformers."""
    pytest.importorskip(package, exc_type=ImportError)
    run_dir, log = workspace / f"apart_{backend}", workspace / f"apart_{backend}.log"
    apart: dict[str, Value] = {
        "colocate": None,
        "debug_rollout_only": True,
        "actor_num_gpus_per_node": None,
        "rollout_num_gpus": 2,
        "prefill_num_servers": 1,
        "sglang_disaggregation_transfer_backend": backend,
        "num_rollout": 2,
        "rollout_max_response_len": 64,
        "save_debug_rollout_data": str(run_dir / "samples_{rollout_id}.pt"),
    }
    with TrainProcess(flags(workspace, run_dir, **{**_ENGINE, **apart}), log) as process:
        assert process.wait(RUN_S) == 0, process.tail()
        process.assert_no_process_left()
    model = AutoModelForCausalLM.from_pretrained(workspace / "model", dtype=torch.float32)
    differences = []
    for rollout_id in range(2):
        for sample in samples_of(run_dir, rollout_id):
            cut = len(sample.tokens) - sample.response_length
            expected = log_probs_of(model, sample.tokens[:cut], sample.tokens[cut:])
            differences.append((expected - torch.tensor(sample.rollout_log_probs)).abs().mean())
    assert len(differences) == 32
    difference = float(torch.stack(differences).mean())
    record_property("log-prob difference", f"{difference:.4f}")
    assert difference < 0.02
