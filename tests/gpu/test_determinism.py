"""Deterministic runs on a GPU: two of one command, and one that goes on from a checkpoint, are equal bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.gpu.test_loop import run
from tests.integration.replays import assert_same_bits

NUM_GPUS = 1
_ROLLOUTS = 3


def deterministic(workspace: Path, name: str, load: str | None = None) -> Path:
    run_dir = workspace / name
    return run(
        workspace,
        name,
        deterministic_mode=True,
        num_rollout=_ROLLOUTS,
        rollout_max_response_len=64,
        max_tokens_per_gpu=1024,
        save=str(run_dir),
        load=load,
        save_interval=1,
        save_hf=str(run_dir / "hf_{rollout_id}"),
        save_debug_rollout_data=str(run_dir / "samples_{rollout_id}.pt"),
    )


def test_two_runs_and_one_that_goes_on_have_the_same_bits(workspace: Path) -> None:
    first = deterministic(workspace, "first")
    assert_same_bits(deterministic(workspace, "second"), first, range(_ROLLOUTS))
    resumed = workspace / "resumed"
    shutil.copytree(first / "iter_0000000", resumed / "iter_0000000")
    (resumed / "latest_checkpointed_iteration.txt").write_text("0")
    assert_same_bits(deterministic(workspace, "resumed", str(resumed)), first, range(1, _ROLLOUTS))
