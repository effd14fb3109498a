"""Trainers and the rollout manager are killed in runs with the real parts: they come back, and the end is the same."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from slime.files.checkpoints import LATEST
from tests.integration import deadly_hooks
from tests.integration.harness import ROOT, RUN_S, TrainProcess, assert_registered, read_metrics, run_well, series
from tests.integration.replays import assert_same_bits
from tests.integration.strikes import events_of, kill_server, log_of
from tests.integration.test_train_async import assert_every_prompt_once, async_flags
from tests.integration.tiny_run import Value, flags, make_workspace

NUM_GPUS = 0
pytestmark = pytest.mark.integration

_ROLLOUTS = 5
_ANOTHER = "another is made in its place"
"""What the driver says when it has noticed that its rollout manager died."""
_PAIR: dict[str, Value] = {"colocate": None, "actor_num_gpus_per_node": 2, "rollout_num_gpus": 1}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("recovery"))


def pair_flags(workspace: Path, run_dir: Path, **changes: Value) -> list[str]:
    """Two trainers and an engine; the weights after each rollout, and its samples."""
    values: dict[str, Value] = {
        "num_rollout": _ROLLOUTS,
        "rollout_max_response_len": 40,
        "max_tokens_per_gpu": 1024,
        "save_hf": str(run_dir / "hf_{rollout_id}"),
        "save_interval": 1,
        "save_debug_rollout_data": str(run_dir / "samples_{rollout_id}.pt"),
        "eval_interval": 2,
        "eval_prompt_data": ["add", str(workspace / "eval.jsonl")],
        "deterministic_mode": True,
        **_PAIR,
    }
    return flags(workspace, run_dir, **(values | changes))


@pytest.fixture(scope="module")
def uninterrupted(workspace: Path) -> Path:
    run_dir, log = workspace / "uninterrupted", workspace / "uninterrupted.log"
    run_well(pair_flags(workspace, run_dir), log)
    return run_dir


def trainer(process: TrainProcess, rank: int) -> psutil.Process:
    """A training rank, by the number of its log, which names its process."""
    text = (process.log.parent / process.log.stem / "logs" / f"trainer_{rank}.log").read_text()
    return psutil.Process(int(re.findall(r"process (\d+) on", text)[-1]))


def spans(run_dir: Path, role: str) -> list[dict[str, Any]]:
    path = run_dir / "trace" / f"{role}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def assert_equals(run_dir: Path, other: Path) -> None:
    """The same bits, each token of the newest weights, and all prompts accounted for."""
    assert_same_bits(run_dir, other, range(_ROLLOUTS))
    for rollout_id in range(_ROLLOUTS):
        samples = torch.load(run_dir / f"samples_{rollout_id}.pt")["samples"]
        assert {v for s in samples for v in s["weight_versions"]} == {str(rollout_id)}
    last = {line["rollout/step"]: line for line in read_metrics(run_dir) if "rollout/prompts_read" in line}
    assert [last[i]["rollout/prompts_trained"] for i in range(_ROLLOUTS)] == [4 * (i + 1) for i in range(_ROLLOUTS)]
    assert [last[i]["rollout/prompts_read"] for i in range(_ROLLOUTS)] == [4 * (i + 1) for i in range(_ROLLOUTS)]
    steps = [line["train/step"] for line in read_metrics(run_dir) if "train/loss" in line]
    assert sorted(set(steps)) == list(range(_ROLLOUTS)), "no step has another number than before"
    found, expected = (
        {line["eval/step"]: line["eval/add"] for line in read_metrics(each) if "eval/add" in line}
        for each in (run_dir, other)
    )
    # A driver that starts again scores what it starts with, where nobody has: which version that is, a kill decides.
    assert found | expected == found
    assert_registered(run_dir)


def manager(process: TrainProcess) -> psutil.Process:
    return process.find("ray::RolloutManager")


def wait_for_span(process: TrainProcess, run_dir: Path, name: str, **fields: int) -> None:
    """Until the driver has told of the end of such a span."""

    def seen() -> bool:
        return any(line["name"] == name and line.items() >= fields.items() for line in spans(run_dir, "driver"))

    process.wait_until(seen, RUN_S, f"{name} {fields}", 0.01)


def wait_for_call(process: TrainProcess, run_dir: Path, path: str) -> None:
    """Until the engine is asked for this once more."""
    before = log_of(run_dir, 0).count(path)
    process.wait_until(lambda: log_of(run_dir, 0).count(path) > before, RUN_S, path, 0.01)


def run_and_strike(workspace: Path, name: str, strike: Callable[[TrainProcess, Path], None], **changes: Value) -> Path:
    """A run that is struck once, and ends well."""
    run_dir, log = workspace / name, workspace / f"{name}.log"
    marked = {deadly_hooks.MARK: str(workspace / f"{name}.mark")}
    line = pair_flags(workspace, run_dir, train_env_vars=json.dumps(marked), **changes)
    with TrainProcess(line, log) as process:
        strike(process, run_dir)
        assert process.wait(RUN_S) == 0, process.tail()
        process.assert_no_process_left()
    return run_dir


@pytest.mark.full
@pytest.mark.parametrize("kept", ["snapshot", "checkpoint", "nothing"])
def test_a_trainer_that_is_killed_comes_back(workspace: Path, uninterrupted: Path, kept: str) -> None:
    def strike(process: TrainProcess, run_dir: Path) -> None:
        process.wait_until(lambda: len(series(run_dir, "train/loss")) >= 2, RUN_S, "two steps", 0.02)
        trainer(process, 1).send_signal(signal.SIGKILL)

    places: dict[str, dict[str, Value]] = {
        "snapshot": {"trainer_snapshot_interval": 1},
        "checkpoint": {"save": str(workspace / f"kept_{kept}")},
        "nothing": {},
    }
    kept_before = set(Path("/dev/shm").glob("slime-*"))
    run_dir = run_and_strike(workspace, f"kept_{kept}", strike, **places[kept])
    (event,) = events_of(run_dir)
    assert (event["kind"], event["subject"]) == ("trainer_died", "trainer 1")
    wanted = {
        "snapshot": r"/dev/shm/slime-\w+ after rollout",
        "checkpoint": str(run_dir),
        "nothing": "as the run began",
    }
    assert re.search(wanted[kept], event["action"])
    assert event["seconds"] > 0
    assert len(series(run_dir, "perf/recovery_time")) == 1
    assert_equals(run_dir, uninterrupted)
    assert set(Path("/dev/shm").glob("slime-*")) <= kept_before, "snapshots go with the run"


@pytest.mark.full
def test_engines_leave_the_group_of_a_rank_0_that_was_killed(workspace: Path, uninterrupted: Path) -> None:
    """Once while it is idle, and once in a push: the engine goes on, and has left every group that it has joined."""

    def strike(process: TrainProcess, run_dir: Path) -> None:
        wait_for_span(process, run_dir, "driver/push_weights", version=1)
        trainer(process, 0).kill()
        wait_for_span(process, run_dir, "driver/push_weights", version=2)
        wait_for_call(process, run_dir, "/pause_generation")
        trainer(process, 0).kill()

    run_dir = run_and_strike(workspace, "groups", strike, trainer_snapshot_interval=1)
    events = events_of(run_dir)
    assert [(event["kind"], event["subject"]) for event in events] == [("trainer_died", "trainer 0")] * 2
    assert events[1]["phase"].startswith("push")
    joined = re.findall(r"init custom process group: .* group_name=(\S+),", log_of(run_dir, 0))
    assert len(set(joined)) == len(joined) == 3
    assert log_of(run_dir, 0).count('/destroy_weights_update_group HTTP/1.1" 200') == 3
    assert_equals(run_dir, uninterrupted)


@pytest.mark.full
def test_a_trainer_that_stands_still_is_made_anew_when_its_deadline_has_passed(
    workspace: Path, uninterrupted: Path
) -> None:
    def strike(process: TrainProcess, run_dir: Path) -> None:
        # Not before: a trainer that owes an answer to the probe is waited for as long as for a push.
        wait_for_span(process, run_dir, "driver/probe", version=1)
        trainer(process, 1).suspend()

    run_dir = run_and_strike(workspace, "stands_still", strike, trainer_snapshot_interval=1, train_timeout=20)
    (event,) = events_of(run_dir)
    assert event["phase"] == "train on rollout 1"
    assert "no answer within 20 s (--train-timeout)" in event["cause"]
    assert_equals(run_dir, uninterrupted)


@pytest.mark.full
def test_a_trainer_that_always_dies_ends_the_run_with_the_cause(workspace: Path) -> None:
    run_dir, log = workspace / "always", workspace / "always.log"
    hook = f"{deadly_hooks.__name__}.always_die"
    line = pair_flags(workspace, run_dir, custom_megatron_before_train_step_hook_path=hook)
    with TrainProcess(line, log) as process:
        assert process.wait(RUN_S) == 1, process.tail()
        process.assert_no_process_left()
    assert "train on rollout 1: the process of trainer 1 died" in log.read_text()
    assert "the trainers: failed in the same way when made anew" in log.read_text()
    assert len(events_of(run_dir)) == 1


@pytest.mark.full
@pytest.mark.parametrize("what", ["skip", "restore"])
def test_a_step_whose_gradients_are_spoilt_is_left_out(workspace: Path, what: str) -> None:
    run_dir, log = workspace / what, workspace / f"{what}.log"
    hook = f"{deadly_hooks.__name__}.spoil_gradients"
    changes: dict[str, Value] = {"on_bad_step": what, "trainer_snapshot_interval": 1, "num_rollout": 3}
    line = pair_flags(workspace, run_dir, custom_megatron_before_train_step_hook_path=hook, **changes)
    run_well(line, log)
    assert series(run_dir, "train/bad_steps") == [1.0, 1.0], "of rollouts 1 and 2: the hook stays on the parameter"
    assert [event["kind"] for event in events_of(run_dir)] == ["bad_step"] * 2
    before, after = (load_file(run_dir / f"hf_{i}" / "model.safetensors") for i in (0, 2))
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())


@pytest.mark.full
def test_an_asynchronous_run_whose_trainers_and_manager_die_trains_every_prompt_once(workspace: Path) -> None:
    run_dir, log = workspace / "async", workspace / "async.log"
    line = async_flags(workspace, run_dir, trainer_snapshot_interval=1)
    with TrainProcess(line, log, driver="train_async.py") as process:
        wait_for_span(process, run_dir, "driver/push_weights", version=1)
        manager(process).kill()
        wait_for_span(process, run_dir, "driver/push_weights", version=2)
        trainer(process, 0).kill()
        assert process.wait(RUN_S) == 0, process.tail()
        process.assert_no_process_left()
    assert [event["kind"] for event in events_of(run_dir)] == ["manager_died", "trainer_died"]
    assert_every_prompt_once(run_dir, _ROLLOUTS)
    last = {line["rollout/step"]: line for line in read_metrics(run_dir) if "rollout/prompts_read" in line}
    assert [last[i]["rollout/prompts_trained"] for i in range(_ROLLOUTS)] == [4 * (i + 1) for i in range(_ROLLOUTS)]
    for line in last.values():
        parts = [line[f"rollout/prompts_{part}"] for part in ("trained", "dropped", "buffered", "in_flight")]
        assert line["rollout/prompts_read"] == sum(parts)


@pytest.mark.full
def test_an_engine_and_a_trainer_that_die_while_the_manager_is_made_anew_come_back_too(
    workspace: Path, uninterrupted: Path
) -> None:
    def strike_manager(process: TrainProcess, run_dir: Path, version: int) -> None:
        wait_for_span(process, run_dir, "driver/push_weights", version=version)
        wait_for_call(process, run_dir, "/generate")
        before = process.log.read_text().count(_ANOTHER)
        manager(process).kill()
        process.wait_until(lambda: process.log.read_text().count(_ANOTHER) > before, RUN_S, _ANOTHER, 0.02)

    def strike(process: TrainProcess, run_dir: Path) -> None:
        strike_manager(process, run_dir, 1)
        kill_server(run_dir, 0)
        strike_manager(process, run_dir, 3)
        trainer(process, 1).kill()

    run_dir = run_and_strike(workspace, "second_faults", strike, trainer_snapshot_interval=1)
    events = events_of(run_dir)
    print([(event["kind"], event["subject"], event["phase"], event["seconds"]) for event in events])
    kinds = sorted(event["kind"] for event in events)
    assert kinds == ["engine_back", "engine_died", "manager_died", "manager_died", "trainer_died"]
    (died,) = [event for event in events if event["kind"] == "engine_died"]
    assert died["phase"] in ("load data", "start router"), "while there was no manager"
    assert all(event["version"].isdecimal() and event["phase"] for event in events)
    assert_equals(run_dir, uninterrupted)


@pytest.mark.full
def test_a_killed_driver_is_started_again_and_ends_as_if_nothing_were(workspace: Path, uninterrupted: Path) -> None:
    run_dir, log = workspace / "restarted", workspace / "restarted.log"
    line = pair_flags(workspace, run_dir, save=str(run_dir))
    tool = ["2", "--", sys.executable, str(ROOT / "train.py")]
    with TrainProcess([*tool, *line], log, driver="tools/restart_run.py") as process:
        process.wait_until((run_dir / "latest_checkpointed_iteration.txt").exists, RUN_S, "a checkpoint")
        process.find(str(ROOT / "train.py"), f"--run-dir {run_dir}", without="restart_run.py").kill()
        assert process.wait(RUN_S) == 0, process.tail()
        process.assert_no_process_left()
    assert (
        "launch: the run ended with status 137: the run is started again, from the checkpoint after" in log.read_text()
    )
    assert [event["kind"] for event in events_of(run_dir)] == ["driver_died"]
    assert_equals(run_dir, uninterrupted)


@pytest.mark.full
def test_a_run_that_goes_on_from_another_ones_checkpoint_is_started_again_from_its_own(
    workspace: Path, uninterrupted: Path
) -> None:
    first, second, log = workspace / "first", workspace / "second", workspace / "second.log"
    # Of one directory: its files are those of an uninterrupted run.
    line = pair_flags(workspace, second, save=str(first), num_rollout=2)
    run_well(line, workspace / "first.log")
    line = pair_flags(workspace, second, load=str(first), save=str(second / "kept"))
    tool = ["2", "--", sys.executable, str(ROOT / "train.py")]
    with TrainProcess([*tool, *line], log, driver="tools/restart_run.py") as process:
        process.wait_until((second / "kept" / LATEST).exists, RUN_S, "a checkpoint")
        process.find(str(ROOT / "train.py"), f"--run-dir {second}", without="restart_run.py").kill()
        assert process.wait(RUN_S) == 0, process.tail()
        process.assert_no_process_left()
    said = log.read_text()
    assert f"training goes on from {first}/iter_0000001 (--load)" in said
    assert "launch: the run ended with status 137: the run is started again, from the checkpoint after rollout" in said
    assert f"training goes on from {second}/kept/iter_" in said
    assert [event["kind"] for event in events_of(second)] == ["driver_died"]
    assert_equals(second, uninterrupted)


@pytest.mark.full
def test_a_run_that_is_struck_in_every_phase_ends_as_if_nothing_were(workspace: Path, uninterrupted: Path) -> None:
    def strike(process: TrainProcess, run_dir: Path) -> None:
        wait_for_span(process, run_dir, "driver/hand_over", rollout=0)
        manager(process).kill()  # the trainers have its batches
        # Trainer 1 ends by itself while it trains on rollout 1.
        wait_for_span(process, run_dir, "driver/push_weights", version=2)
        wait_for_call(process, run_dir, "/pause_generation")
        trainer(process, 0).kill()
        process.wait_until((run_dir / ".iter_0000003.tmp").exists, RUN_S, "a save", 0.005)
        trainer(process, 1).kill()
        wait_for_span(process, run_dir, "driver/push_weights", version=4)
        wait_for_call(process, run_dir, "/generate")
        manager(process).kill()

    hook = f"{deadly_hooks.__name__}.die_in_training"
    run_dir = workspace / "every_phase"
    run_and_strike(
        workspace, "every_phase", strike, save=str(run_dir), custom_megatron_before_train_step_hook_path=hook
    )
    events = events_of(run_dir)
    print([(event["kind"], event["subject"], event["phase"], event["seconds"]) for event in events])
    assert [event["kind"] for event in events] == ["manager_died", *["trainer_died"] * 3, "manager_died"]
    assert all(event["seconds"] > 0 for event in events)
    phases = [event["phase"] for event in events[1:4]]
    assert [phase.split()[0] for phase in phases] == ["train", "push", "save"]
    assert_equals(run_dir, uninterrupted)
