"""An engine that hangs beside one that lives: in an evaluation, and while rollouts are generated without end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slime.data import Sample, Status
from tests.integration.harness import RUN_S, TrainProcess, series
from tests.integration.strikes import HANGS, mid_rollout, stop_scheduler
from tests.integration.test_faults import (
    ASKED,
    STAY_LOST,
    assert_accounted_for,
    assert_went_on_without,
    long_flags,
    warnings_of,
)
from tests.integration.tiny_run import Value, make_workspace
from tests.waiting import wait_for_ends

NUM_GPUS = 0
pytestmark = [pytest.mark.integration, pytest.mark.full]

_PROMPTS, _RESPONSES = 6, 4


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("hangs"))


def hanging(workspace: Path, name: str, slots: str, **changes: Value) -> Path:
    """The directory of a run, whose engine 0 stops to generate in what follows its first training step."""
    run_dir, log = workspace / name, workspace / f"{name}.log"
    values: dict[str, Value] = {
        "eval_prompt_data": ["add", str(workspace / "eval.jsonl")],
        "n_samples_per_eval_prompt": _RESPONSES,
        "skip_eval_before_train": True,
        "request_timeout": 40,
        **ASKED,
        **STAY_LOST,
    }
    line = long_flags(workspace, run_dir, slots, **(values | changes))
    with TrainProcess(line, log, driver="train_async.py" if slots == "asynchronous" else "train.py") as process:
        process.wait_until(lambda: series(run_dir, "train/loss"), RUN_S, "the first training step")
        tree = mid_rollout(process, run_dir, 0, stop_scheduler)
        process.wait_until(lambda: len(warnings_of(log)) == 2, RUN_S, "the push that skips the engine")
        wait_for_ends(tree, "its actor, and all below", 20)
        assert process.wait(RUN_S) == 0, process.tail()
        process.assert_no_process_left()
    assert_went_on_without(log, run_dir, 0, HANGS)
    return run_dir


def scored(run_dir: Path, version: int) -> list[Sample]:
    """The samples of an evaluation."""
    data = torch.load(run_dir / f"samples_eval_{version}.pt", weights_only=True)
    return [Sample.from_dict(fields) for fields in data["samples"]]


def assert_evaluated(run_dir: Path, version: int) -> None:
    """Every prompt has all its responses, whole, of one version, and judged."""
    samples = scored(run_dir, version)
    assert sorted(sample.index or 0 for sample in samples) == list(range(_PROMPTS * _RESPONSES))
    for sample in samples:
        assert sample.status in (Status.COMPLETED, Status.TRUNCATED)
        assert sample.response_length
        assert sample.weight_versions == [str(version)]
        assert sample.reward is not None


def test_an_evaluation_has_all_its_samples(workspace: Path) -> None:
    """The engines are idle between a training step and the evaluation that follows it."""
    num_rollout = 3
    run_dir = hanging(workspace, "evaluation", "disaggregated", num_rollout=num_rollout, eval_interval=1)
    (died, _) = warnings_of(workspace / "evaluation.log")
    assert "warning: evaluation of weight version 1: engine 0 failed" in died
    assert len(series(run_dir, "train/loss")) == len(series(run_dir, "eval/add")) == num_rollout
    assert series(run_dir, "eval/add-no_reward") == [0.0] * num_rollout
    for version in range(1, num_rollout + 1):
        assert_evaluated(run_dir, version)
    assert max(series(run_dir, "train/train_rollout_logprob_abs_diff")) < 1e-4
    assert_accounted_for(run_dir, num_rollout)


def test_rollouts_without_end_go_on(workspace: Path) -> None:
    num_rollout = 5
    changes: dict[str, Value] = {
        "rollout_function_path": "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
        "max_weight_staleness": 2,
        "num_rollout": num_rollout,
        "eval_interval": 2,
        "weight_update_timeout": 60,
    }
    run_dir = hanging(workspace, "without_end", "asynchronous", **changes)
    assert len(series(run_dir, "train/loss")) == num_rollout
    assert_accounted_for(run_dir, num_rollout)
    assert max(series(run_dir, "rollout/weight_staleness_max")) <= 2
    assert series(run_dir, "rollout/prompts_dropped")[-1] == 0
    for version in (2, 4):
        assert_evaluated(run_dir, version)
