"""Columns and media of a user's module through a whole run: generated, cut, buffered, dumped, replayed and resumed.

The model refuses a token that has another one's entries (`tests.column_hooks`): a run that trains had the right ones.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from slime.data import Sample
from slime.files.safe_dump import load_safe
from tests import column_hooks
from tests.integration.harness import TrainProcess, kill_after_checkpoint, run_well, series
from tests.integration.replays import training
from tests.integration.tiny_run import Value, flags, make_workspace

NUM_GPUS = 0
pytestmark = [pytest.mark.integration, pytest.mark.full]

HOOKS = str(Path(column_hooks.__file__).resolve())
ROLLOUTS = 4


def columns_flags(workspace: Path, run_dir: Path, **changes: Value) -> list[str]:
    """Of runs whose rollouts are cut into three samples each, in micro-batches of dynamic size."""
    values: dict[str, Value] = {
        "custom_generate_function_path": f"{HOOKS}:generate",
        "custom_model_provider_path": f"{HOOKS}:model_provider",
        "num_rollout": ROLLOUTS,
        "rollout_max_response_len": 60,
        "mismatch_threshold": 0.3,  # a response that goes on has tokens of the weights before
    }
    return flags(workspace, run_dir, **(values | changes))


def samples_of(run_dir: Path, rollout_id: int) -> list[Sample]:
    content = load_safe(run_dir / f"samples_{rollout_id}.pt", "--save-debug-rollout-data")
    return [Sample.from_dict(fields) for fields in content["samples"]]


def test_declared_columns_go_all_the_way(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path)
    run_dir, replay = workspace / "run", workspace / "replay"
    dumps = str(run_dir / "samples_{rollout_id}.pt")
    line = columns_flags(
        workspace,
        run_dir,
        save=str(run_dir),
        load=str(run_dir),
        save_interval=1,
        save_debug_rollout_data=dumps,
        over_sampling_batch_size=8,
        partial_rollout=True,
        sglang_server_concurrency=16,
    )
    with TrainProcess(line, workspace / "first.log") as process:
        resumed_at = kill_after_checkpoint(process, run_dir, 1)
    state = torch.load(run_dir / f"iter_{resumed_at - 1:07d}" / "rollout_state.pt", weights_only=False)
    assert state["data_source"]["buffer"], "what was not needed is in the checkpoint"
    run_well(line, workspace / "resumed.log")
    assert len(series(run_dir, "train/loss")) >= ROLLOUTS
    for rollout_id in range(ROLLOUTS):
        for sample in samples_of(run_dir, rollout_id):
            length = len(sample.tokens)
            route = column_hooks.route_of(sample.index or 0, length, sample.response_length)
            assert np.array_equal(sample.columns["route"], route)
            pictures = [reference.load() for reference in sample.columns["pictures"]]
            wanted = range((sample.group_index or 0) % 3)
            assert pictures == [column_hooks.picture_of(sample.group_index or 0, number) for number in wanted]
    line = columns_flags(workspace, replay, load_debug_rollout_data=dumps)
    run_well(line, workspace / "replay.log")
    assert len(training(replay)) == ROLLOUTS
    assert training(replay)[0] == training(run_dir)[0]
