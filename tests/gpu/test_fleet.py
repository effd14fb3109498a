"""Engines that are lost and come back on GPUs, by CUDA IPC and by NCCL; prefill and decode on a GPU each."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.gpu.test_loop import _ENGINE, _LARGE_CACHE, RUN_S, Record, check
from tests.integration.harness import TrainProcess, series
from tests.integration.strikes import (
    Strike,
    back,
    events_of,
    kill_server,
    log_of,
    mid_rollout,
    server_is_busy,
    stop_scheduler,
)
from tests.integration.test_faults import ASKED, assert_each_version_is_its_rollouts, assert_nothing_lost_or_twice
from tests.integration.test_train_async import samples_of
from tests.integration.tiny import log_probs_of
from tests.integration.tiny_run import Value, flags

NUM_GPUS = 1
_LENGTH: dict[str, Value] = {"rollout_max_response_len": 1024, "max_tokens_per_gpu": 4096}
"""Some seconds of a rollout, in which the engine is struck."""
_SAME_GIB = 0.25
When = Callable[[TrainProcess, Path, int, Strike], list[psutil.Process]]
"""Waits for its moment and strikes an engine."""


def used_gib() -> list[float]:
    """What is taken of each GPU that this process may use, by nvidia-smi."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    query += [f"--id={visible}"] if visible else []
    listed = subprocess.run(query, check=True, capture_output=True, text=True, timeout=60).stdout.split()
    return [float(mib) / 1024 for mib in listed]


def while_trainers_train(process: TrainProcess, run_dir: Path, rank: int, strike: Strike) -> list[psutil.Process]:
    """Strike an engine that is asleep beside the trainers, who train, or wake it to push."""
    next_one = run_dir / f"samples_{len(series(run_dir, 'train/loss')) + 1}.pt"
    process.wait_until(next_one.exists, RUN_S, "a rollout that is about to be trained", 0.02)
    return strike(run_dir, rank)


def run_with_a_loss(
    workspace: Path, name: str, record_property: Record, strike: Strike, when: When = mid_rollout, **changes: Value
) -> Path:
    """A run whose first engine is struck after two steps, and which is ended when that has worked again; what the GPUs
    hold while it generates is noted before and after, and is the same."""
    run_dir, log = workspace / name, workspace / f"{name}.log"
    dumps: Value = str(run_dir / "samples_{rollout_id}.pt")
    changes |= {**_LENGTH, **ASKED, "num_rollout": 1000, "save_debug_rollout_data": dumps}
    with TrainProcess(flags(workspace, run_dir, **{**_ENGINE, **changes}), log) as process:
        # The first step leaves more on a GPU than was there when the engine slept first.
        process.wait_until(lambda: len(series(run_dir, "train/loss")) > 1, RUN_S, "two training steps")
        since = len(log_of(run_dir, 0))
        process.wait_until(lambda: server_is_busy(run_dir, 0, since), RUN_S, "a request on the engine", 0.02)
        before = used_gib()
        when(process, run_dir, 0, strike)
        process.wait_until(lambda: back(run_dir, "engine 0"), RUN_S, "the engine")
        steps = len(series(run_dir, "train/loss"))
        process.wait_until(lambda: len(series(run_dir, "train/loss")) > steps, RUN_S, "a step with it")
        since = len(log_of(run_dir, 0))
        process.wait_until(lambda: server_is_busy(run_dir, 0, since), RUN_S, "a request on the engine", 0.02)
        after = used_gib()
        process.kill(signal.SIGINT)
        assert process.wait(60) == 130, process.tail()
        process.assert_no_process_left()
    steps = len(series(run_dir, "train/loss"))
    (lost,) = events_of(run_dir, "engine_died", "engine_hangs")
    assert lost["subject"] == "engine 0"
    (returned,) = events_of(run_dir, "engine_back")
    record_property("seconds", f"{returned['seconds']:.0f}")
    record_property("GiB", " ".join(f"{one:.2f}->{other:.2f}" for one, other in zip(before, after, strict=True)))
    check(run_dir, steps, record_property)
    assert_each_version_is_its_rollouts(run_dir, steps)
    assert_nothing_lost_or_twice(run_dir, steps)
    assert max(abs(one - other) for one, other in zip(before, after, strict=True)) < _SAME_GIB
    return run_dir


@pytest.mark.parametrize(
    ("strike", "when"),
    [(kill_server, mid_rollout), (stop_scheduler, mid_rollout), (kill_server, while_trainers_train)],
    ids=["killed", "stopped", "killed-asleep"],
)
def test_an_engine_beside_trainers_comes_back_by_cuda_ipc(
    workspace: Path, record_property: Record, strike: Strike, when: When
) -> None:
    name = f"ipc_{strike.__name__}_{when.__name__}"
    run_dir = run_with_a_loss(workspace, name, record_property, strike, when, **_LARGE_CACHE)
    asleep = series(run_dir, "perf/asleep_gib")[1:]
    record_property("GiB asleep", " ".join(f"{gib:.2f}" for gib in asleep))
    # It is measured before trainers train: an engine that is struck then is no more there, or is still.
    with_engine = [gib for gib in asleep if gib > asleep[0] - _SAME_GIB]
    assert len(asleep) - len(with_engine) <= (when is while_trainers_train)
    assert max(with_engine) - min(with_engine) < _SAME_GIB


@pytest.mark.parametrize(
    "engines", [pytest.param(1, marks=pytest.mark.gpus(2)), pytest.param(2, marks=pytest.mark.gpus(3))]
)
def test_an_engine_apart_comes_back_by_nccl(workspace: Path, record_property: Record, engines: int) -> None:
    """The other of two goes on: it leaves the group in which one is dead, and joins the next."""
    slots: dict[str, Value] = {"colocate": None, "actor_num_gpus_per_node": 1, "rollout_num_gpus": engines}
    run_with_a_loss(workspace, f"nccl_back_{engines}", record_property, kill_server, **slots)


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
