"""An engine joins a run and leaves it again: it answers nothing before it has the current weights, and its slots are
free afterwards."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.harness import read_metrics, run_well, series
from tests.integration.strikes import log_of
from tests.integration.test_train_async import assert_accounted_for, assert_every_prompt_once, async_flags, samples_of
from tests.integration.tiny_run import Value, flags, make_workspace

NUM_GPUS = 0
pytestmark = pytest.mark.integration

_CALL = re.compile(r'"(?:POST|GET) (/\S+) HTTP/1.1" 200')

_JOINS = """
import os

os.cpu_count = lambda: 3  # so that a slot is left

from slime.driver.process import run_driver
from slime.driver.run import Run
from slime.entry.arguments import parse_args
from slime.ray.supervision import Deadline


def train(args):
    with Run(args) as run:
        run.start()
        run.push_weights(version=0)
        for rollout_id in run.rollouts():
            with run.step(rollout_id):
                batches = run.generate(rollout_id)
                run.train(rollout_id, batches)
                if rollout_id == 0:
                    joined = run.engines.add("actor")
                    assert [row["state"] for row in run.engines.describe()] == ["serves", "starts"]
                    run._supervisor.wait_until(run.engines.waiting, "wait for it", Deadline(240.0), joined)
                if rollout_id == 1:
                    run.engines.remove(joined)
                run.push_weights(version=rollout_id + 1)


run_driver(train, parse_args())
"""

_REPLACES = """
from slime.driver.process import run_driver
from slime.driver.pipeline import Pipeline
from slime.driver.run import Run
from slime.entry.arguments import parse_args
from slime.ray.supervision import Deadline


def train(args):
    with Run(args) as run:
        run.start()
        rollouts = Pipeline(run)
        rollouts.push_weights(version=0)
        for rollout_id in run.rollouts():
            with run.step(rollout_id):
                batches = rollouts.next(rollout_id)
                run.train(rollout_id, batches)
                if rollout_id == 0:
                    run.engines.remove("engine 1")
                if rollout_id == 1:
                    assert run.engines.add("actor") == "engine 2"
                    run._supervisor.wait_until(run.engines.waiting, "wait for it", Deadline(240.0), "engine 2")
                rollouts.push_weights(version=rollout_id + 1)


run_driver(train, parse_args(asynchronous=True))
"""
"""The run's Ray has no more than its three slots."""


def run_driver_file(text: str, workspace: Path, line: list[str], name: str) -> None:
    driver = workspace / f"{name}.py"
    driver.write_text(text)
    run_well(line, workspace / f"{name}.log", driver=str(driver))


def calls_of(run_dir: Path, rank: int) -> list[str]:
    """What an engine was asked, in that order."""
    return _CALL.findall(log_of(run_dir, rank))


def versions_of(run_dir: Path, rollout_id: int) -> set[str]:
    return {version for sample in samples_of(run_dir, rollout_id) for version in sample.weight_versions}


@pytest.mark.full
def test_an_engine_joins_between_two_rollouts_serves_the_new_weights_and_leaves(tmp_path: Path) -> None:
    workspace, run_dir = make_workspace(tmp_path), tmp_path / "run"
    line = flags(
        workspace,
        run_dir,
        colocate=None,
        actor_num_gpus_per_node=1,
        rollout_num_gpus=1,
        router_policy="round_robin",
        lr="1e-2",
        check_weight_update_equal=True,
        save_debug_rollout_data=str(run_dir / "samples_{rollout_id}.pt"),
    )
    run_driver_file(_JOINS, workspace, line, "joins")
    assert series(run_dir, "rollout/engines_alive") == [1, 2, 1]
    asked = calls_of(run_dir, 1)
    probed = asked.count("/continue_generation")
    assert asked.count("/generate") == 8 + probed, "half of the second rollout's 16 samples, and a probe a push"
    assert asked.index("/generate") > asked.index("/continue_generation") > asked.index("/update_weight_version")
    # Those of its own files, which it started from, are of no version.
    assert [versions_of(run_dir, rollout_id) for rollout_id in range(3)] == [{"0"}, {"1"}, {"2"}]
    assert max(series(run_dir, "train/train_rollout_logprob_abs_diff")) < 1e-4
    assert_every_prompt_once(run_dir, 3)


@pytest.mark.full
def test_an_engine_leaves_in_the_midst_of_a_rollout_and_another_takes_its_slot(tmp_path: Path) -> None:
    workspace, run_dir = make_workspace(tmp_path), tmp_path / "run"
    changes: dict[str, Value] = {"actor_num_gpus_per_node": 1, "rollout_num_gpus": 2, "router_policy": "round_robin"}
    line = async_flags(workspace, run_dir, num_rollout=4, **changes)
    run_driver_file(_REPLACES, workspace, line, "replaces")
    assert series(run_dir, "rollout/engines_alive") == [2, 1, 2, 2]
    asked = calls_of(run_dir, 1)[::-1]
    assert asked.index("/abort_request") < asked.index("/continue_generation"), "what it had was cut"
    asked = calls_of(run_dir, 2)
    assert asked.index("/generate") > asked.index("/continue_generation") > asked.index("/update_weight_version")
    versions = set().union(*(versions_of(run_dir, rollout_id) for rollout_id in range(4)))
    assert versions <= {"0", "1", "2", "3"}, "nobody answered by what an engine starts from"
    assert not [key for entry in read_metrics(run_dir) for key in entry if "sample_failures" in key]
    assert_every_prompt_once(run_dir, 4)
    assert_accounted_for(run_dir)
