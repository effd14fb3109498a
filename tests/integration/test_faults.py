"""Runs whose engines or routers are killed or stopped: they start again, or a run goes on with the engine that is left,
and ends with every cause when that is lost too."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from slime.data import Sample
from tests.integration import faulty_hooks
from tests.integration.harness import RUN_S, TrainProcess, read_metrics, series
from tests.integration.strikes import (
    HANGS,
    KILLED,
    Strike,
    back,
    events_of,
    kill_server,
    log_of,
    mid_rollout,
    next_life,
    router_of,
    server_is_busy,
    stop_scheduler,
    stop_server,
    stop_tree,
)
from tests.integration.test_train_async import assert_every_prompt_once, samples_of
from tests.integration.tiny_run import Value, flags, make_workspace
from tests.waiting import command_line, wait_for_ends

NUM_GPUS = 0
pytestmark = pytest.mark.integration

_SUPERVISOR = ["slime.processes.supervisor", "slime.backends.sglang.launch "]
_SLOTS: dict[str, dict[str, Value]] = {
    "disaggregated": {"colocate": None, "actor_num_gpus_per_node": 1, "rollout_num_gpus": 2},
    "colocated": {"actor_num_gpus_per_node": 2},
    "asynchronous": {"colocate": None, "actor_num_gpus_per_node": 1, "rollout_num_gpus": 2, "use_tis": True},
}
STAY_LOST: dict[str, Value] = {"no_use_fault_tolerance": True}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("faults"))


def long_flags(workspace: Path, run_dir: Path, slots: str, **changes: Value) -> list[str]:
    """Rollouts of some seconds, of which both engines get requests."""
    values: dict[str, Value] = {
        "rollout_max_response_len": 320,
        "max_tokens_per_gpu": 1024,
        "router_policy": "round_robin",
        "save_debug_rollout_data": str(run_dir / "samples_{rollout_id}.pt"),
        **_SLOTS[slots],
    }
    return flags(workspace, run_dir, **(values | changes))


ASKED: dict[str, Value] = {"rollout_health_check_interval": 1, "rollout_health_check_timeout": 6}


def assert_nothing_lost_or_twice(run_dir: Path, num_rollout: int) -> None:
    assert_every_prompt_once(run_dir, num_rollout)
    assert_accounted_for(run_dir, num_rollout)


def assert_accounted_for(run_dir: Path, num_rollout: int) -> list[int | None]:
    """No sample was trained twice, and every prompt is somewhere; the groups that were trained."""
    samples: list[Sample] = [s for rollout_id in range(num_rollout) for s in samples_of(run_dir, rollout_id)]
    assert len({sample.index for sample in samples}) == len(samples) == 16 * num_rollout
    lines = [line for line in read_metrics(run_dir) if "rollout/prompts_read" in line]
    for line in lines:
        parts = [line[f"rollout/prompts_{part}"] for part in ("trained", "dropped", "buffered", "in_flight")]
        assert line["rollout/prompts_read"] == sum(parts)
    assert lines[num_rollout - 1]["rollout/prompts_trained"] == 4 * num_rollout
    return [sample.group_index for sample in samples][::4]


def warnings_of(log: Path) -> list[str]:
    return [
        line for line in log.read_text().splitlines() if re.match(r"train(_async)?\.py: warning: .*engine \d", line)
    ]


def assert_each_version_is_its_rollouts(run_dir: Path, num_rollout: int) -> None:
    """No token is of what an engine starts from, nor of weights that are not the newest."""
    for rollout_id in range(num_rollout):
        versions = {version for sample in samples_of(run_dir, rollout_id) for version in sample.weight_versions}
        assert versions == {str(rollout_id)}


def assert_went_on_without(log: Path, run_dir: Path, rank: int, why: str = KILLED) -> None:
    died, skipped = warnings_of(log)
    # The phase is the driver's: a rollout may end, its requests tried again, before the death is known.
    assert re.search(rf": engine {rank} failed .*engine {rank}( node \d)? at http://\S+ {why}", died)
    assert "going on with 1 of 2 engines" in died
    assert f"engine_{rank}.log" in died
    assert re.search(
        rf"push of version \d+: skipped engine {rank}, which was lost at 2\d\d\d-\d\d-\d\d \d\d:\d\d:\d\d", skipped
    )
    alive = series(run_dir, "rollout/engines_alive")
    assert alive[0] == 2
    assert alive[-1] == 1


@pytest.mark.full
def test_a_run_goes_on_with_one_engine_and_ends_without_any(workspace: Path) -> None:
    """Engine 1 is killed and comes back; it is stopped, and given up. Engine 0 is killed, and killed as it starts."""
    run_dir, log = workspace / "both_die", workspace / "both_die.log"
    changes: dict[str, Value] = {"num_rollout": 100, "save": str(run_dir), "save_interval": 1, **ASKED}
    line = long_flags(workspace, run_dir, "disaggregated", engine_restart_limit=1, **changes)
    with TrainProcess(line, log) as process:
        process.wait_until(lambda: series(run_dir, "train/loss"), RUN_S, "the first training step")
        mid_rollout(process, run_dir, 1, kill_server)
        process.wait_until(lambda: back(run_dir, "engine 1"), RUN_S, "the engine that was killed")
        mid_rollout(process, run_dir, 1, stop_server)
        steps = len(series(run_dir, "train/loss"))
        process.wait_until(lambda: len(series(run_dir, "train/loss")) >= steps + 2, RUN_S, "two more steps")
        assert max(series(run_dir, "train/train_rollout_logprob_abs_diff")) < 1e-4
        tree = mid_rollout(process, run_dir, 0, kill_server)
        process.wait_until(lambda: next_life(process, 0, tree), RUN_S, "its next life", 0.05).kill()
        assert process.wait(RUN_S) == 1, process.tail()
        process.assert_no_process_left()
    (error,) = [text for text in log.read_text().splitlines() if text.startswith("train.py: error:")]
    assert "no engine is left, engine 1 and engine 0 were lost" in error
    lost = [(event["kind"], event["subject"]) for event in events_of(run_dir)]
    assert lost == [
        ("engine_died", "engine 1"),
        ("engine_back", "engine 1"),
        ("engine_hangs", "engine 1"),
        ("engine_given_up", "engine 1"),
        ("engine_died", "engine 0"),
        ("engine_given_up", "engine 0"),
    ]
    for rank, why in ((0, KILLED), (1, HANGS + ".*")):
        assert re.search(rf"\nengine {rank} was lost at .*{why}\nlast lines of .*engine_{rank}.log", log.read_text())
    checkpoints = list(run_dir.glob("iter_*"))
    assert checkpoints
    assert all((path / ".metadata").exists() and (path / "rollout_state.pt").exists() for path in checkpoints)
    assert sum(series(run_dir, "rollout/engine_restarts")) >= 1
    assert len(series(run_dir, "perf/recovery_time")) == 1
    assert_each_version_is_its_rollouts(run_dir, steps + 2)
    assert_nothing_lost_or_twice(run_dir, steps + 2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("slots", "strike"),
    [
        *[("disaggregated", strike) for strike in (kill_server, stop_scheduler, stop_tree)],
        *[("colocated", kill_server), ("asynchronous", stop_server)],
    ],
)
def test_a_run_waits_for_its_only_engine_to_come_back(workspace: Path, slots: str, strike: Strike) -> None:
    """It starts while a rollout waits for it, and the trainers, who wait for the rollout, give it its weights."""
    name = f"only_{slots}_{strike.__name__}"
    num_rollout, run_dir, log = 4, workspace / name, workspace / f"{name}.log"
    one: Value = None if slots == "colocated" else 1
    line = long_flags(workspace, run_dir, slots, num_rollout=num_rollout, actor_num_gpus_per_node=1, **ASKED)
    line += [] if one is None else ["--rollout-num-gpus", "1"]
    driver = "train_async.py" if slots == "asynchronous" else "train.py"
    with TrainProcess(line, log, driver=driver) as process:
        process.wait_until(lambda: series(run_dir, "train/loss"), RUN_S, "the first training step")
        tree = mid_rollout(process, run_dir, 0, strike)
        process.wait_until(lambda: back(run_dir, "engine 0"), RUN_S, "the engine")
        wait_for_ends(tree, "its former actor, and all below", 20)
        assert process.wait(RUN_S) == 0, process.tail()
        process.assert_no_process_left()
    (lost,) = events_of(run_dir, "engine_died", "engine_hangs")
    assert re.search(KILLED if strike is kill_server else HANGS, lost["cause"])
    assert len(series(run_dir, "perf/recovery_time")) == 1
    assert series(run_dir, "rollout/engines_alive")[-1] == 1
    assert len(series(run_dir, "train/loss")) == num_rollout
    if slots != "asynchronous":
        assert max(series(run_dir, "train/train_rollout_logprob_abs_diff")) < 1e-4
        assert_each_version_is_its_rollouts(run_dir, num_rollout)
    assert not [key for entry in read_metrics(run_dir) for key in entry if "sample_failures" in key]
    assert_nothing_lost_or_twice(run_dir, num_rollout)


@pytest.mark.full
@pytest.mark.parametrize("strike", [psutil.Process.kill, psutil.Process.suspend])
def test_a_router_that_is_lost_comes_back_at_its_address(workspace: Path, strike: Callable[..., None]) -> None:
    name = f"router_{strike.__name__}"
    num_rollout, run_dir, log = 4, workspace / name, workspace / f"{name}.log"
    with TrainProcess(
        long_flags(workspace, run_dir, "disaggregated", num_rollout=num_rollout, **ASKED), log
    ) as process:
        process.wait_until(lambda: series(run_dir, "train/loss"), RUN_S, "the first training step")
        since = len(log_of(run_dir, 0))
        process.wait_until(lambda: server_is_busy(run_dir, 0, since), RUN_S, "a request on the engine", 0.05)
        strike(router_of(process))
        process.wait_until(lambda: back(run_dir, "router"), RUN_S, "the router")
        assert process.wait(RUN_S) == 0, process.tail()
        process.assert_no_process_left()
    died, returned = events_of(run_dir, "router_died", "router_back")
    assert died["kind"] == "router_died"
    for event in (died, returned):
        assert event["version"].isdecimal()
        assert re.fullmatch(r"rollout \d|between rollouts", event["phase"])
    assert not events_of(run_dir, "engine_died", "engine_hangs")
    assert_each_version_is_its_rollouts(run_dir, num_rollout)
    assert_nothing_lost_or_twice(run_dir, num_rollout)


@pytest.mark.full
@pytest.mark.parametrize("slots", ["disaggregated", "colocated"])
def test_an_engine_that_dies_while_trainers_train_or_push_comes_back(workspace: Path, slots: str) -> None:
    """Beside trainers it starts when these are asleep again."""
    name = f"push_{slots}_back"
    num_rollout, run_dir, log = 6, workspace / name, workspace / f"{name}.log"
    changes: dict[str, Value] = {"num_rollout": num_rollout, "weight_update_timeout": 30, **ASKED}
    with TrainProcess(long_flags(workspace, run_dir, slots, **changes), log) as process:
        process.wait_until((run_dir / "samples_1.pt").exists, RUN_S, "a rollout that is about to be trained", 0.02)
        kill_server(run_dir, 1)
        assert process.wait(RUN_S) == 0, process.tail()
        process.assert_no_process_left()
    assert back(run_dir, "engine 1") or slots == "disaggregated"
    assert max(series(run_dir, "train/train_rollout_logprob_abs_diff")) < 1e-4
    assert_each_version_is_its_rollouts(run_dir, num_rollout)
    assert_nothing_lost_or_twice(run_dir, num_rollout)


@pytest.mark.full
@pytest.mark.parametrize("slots", _SLOTS)
@pytest.mark.parametrize("strike", [kill_server, stop_server, stop_scheduler])
def test_a_run_that_loses_an_engine_finishes(workspace: Path, slots: str, strike: Strike) -> None:
    name = f"{slots}_{strike.__name__}"
    num_rollout, run_dir, log = 5, workspace / name, workspace / f"{name}.log"
    changes: dict[str, Value] = {"num_rollout": num_rollout, "check_weight_update_equal": True, "eval_interval": 2}
    changes |= ASKED | STAY_LOST | {"request_timeout": 40, "weight_update_timeout": 60}
    line = long_flags(workspace, run_dir, slots, eval_prompt_data=["add", str(workspace / "eval.jsonl")], **changes)
    driver = "train_async.py" if slots == "asynchronous" else "train.py"
    with TrainProcess(line, log, driver=driver) as process:
        process.wait_until(lambda: series(run_dir, "train/loss"), RUN_S, "the first training step")
        tree = mid_rollout(process, run_dir, 0, strike)
        process.wait_until(lambda: len(warnings_of(log)) == 2, RUN_S, "the push that skips the engine")
        wait_for_ends(tree, "its actor, and all below", 20)
        assert process.wait(RUN_S) == 0, process.tail()
        process.assert_no_process_left()
    assert_went_on_without(log, run_dir, 0, KILLED if strike is kill_server else HANGS)
    assert len(series(run_dir, "train/loss")) == num_rollout
    if slots != "asynchronous":
        # The other's tokens are of the newest weights, which the trainer's own log-probs show.
        assert max(series(run_dir, "train/train_rollout_logprob_abs_diff")) < 1e-4
    assert_nothing_lost_or_twice(run_dir, num_rollout)


@pytest.mark.full
@pytest.mark.parametrize("strike", [stop_server, stop_scheduler])
def test_a_push_goes_on_without_an_engine_that_hangs(workspace: Path, strike: Strike) -> None:
    """Nobody has a request at the engine, so that only its silence, or the push's own deadline, tells of it."""
    num_rollout, run_dir, log = 4, workspace / f"push_{strike.__name__}", workspace / f"push_{strike.__name__}.log"
    changes: dict[str, Value] = {"num_rollout": num_rollout, "weight_update_timeout": 20, **ASKED, **STAY_LOST}
    with TrainProcess(long_flags(workspace, run_dir, "disaggregated", **changes), log) as process:
        process.wait_until((run_dir / "samples_1.pt").exists, RUN_S, "a rollout that is about to be trained", 0.02)
        strike(run_dir, 1)
        assert process.wait(RUN_S) == 0, process.tail()
        process.assert_no_process_left()
    assert_went_on_without(log, run_dir, 1, HANGS)
    assert len(series(run_dir, "train/loss")) == num_rollout
    assert max(series(run_dir, "train/train_rollout_logprob_abs_diff")) < 1e-4
    assert_nothing_lost_or_twice(run_dir, num_rollout)


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "blamed"),
    [
        (["/raylet/raylet "], r"Ray's raylet on this host, process \d+, was ended by signal 9"),
        (["/gcs/gcs_server "], r"Ray's head \(gcs_server\) on this host, process \d+, was ended by signal 9"),
        (_SUPERVISOR, r"engine 0 at \S+ is gone: the process that supervises it was ended by signal 9"),
    ],
)
def test_nothing_is_left_when_what_holds_a_run_together_is_killed(
    workspace: Path, words: list[str], blamed: str
) -> None:
    """While the engine's server imports: none of SGLang's processes has asked to die with its parent yet."""
    name = words[0].strip().rsplit("/", 1)[-1]
    run_dir, log = workspace / name, workspace / f"{name}.log"
    with TrainProcess(flags(workspace, run_dir, num_rollout=100), log) as process:
        process.wait_until(lambda: _server_runs(process), RUN_S, "the engine's server", 0.05)
        lines = {p.pid: command_line(p) + " " for p in process.descendants()}
        # The first of them: the supervisor's guard has the same command line.
        victim = min(pid for pid, line in lines.items() if all(word in line for word in words))
        psutil.Process(victim).kill()
        assert process.wait(60) == 1, process.tail()
        process.assert_no_process_left(30)
    (error,) = (text for text in log.read_text().splitlines() if text.startswith("train.py: error:"))
    assert re.search(blamed, error)
    assert "last lines of the Raylet" not in log.read_text()


def _server_runs(process: TrainProcess) -> bool:
    supervisor, launch = _SUPERVISOR
    lines = map(command_line, process.descendants())
    return any(launch in line and supervisor not in line for line in lines)


@pytest.mark.full
@pytest.mark.parametrize("comes_back", [True, False])
def test_an_engine_over_nodes_that_loses_one_is_gone_as_a_whole(workspace: Path, comes_back: bool) -> None:
    """Two engines of two servers, on slots that are a node each; one that comes back has both again."""
    num_rollout, run_dir, log = 5, workspace / f"nodes_{comes_back}", workspace / f"nodes_{comes_back}.log"
    nodes: dict[str, Value] = {"rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2, "num_gpus_per_node": 1}
    nodes |= {**ASKED, "num_rollout": 1000 if comes_back else num_rollout} | ({} if comes_back else STAY_LOST)
    with TrainProcess(long_flags(workspace, run_dir, "disaggregated", **nodes), log) as process:
        process.wait_until(lambda: series(run_dir, "train/loss"), RUN_S, "the first training step")
        # The seed of engine 1 is the run's, 7, and one more.
        words = ("slime.backends.sglang.launch", "--random-seed 8")
        servers = [process.find(*words, f"--node-rank {node}") for node in range(2)]
        owners = [server.parents()[:2] for server in servers]
        assert "ray::NodeActor" in command_line(owners[1][1])
        trees = [
            *servers,
            *(p for pair in owners for p in pair),
            *(p for s in servers for p in s.children(recursive=True)),
        ]
        if comes_back:
            servers[1].suspend()
            process.wait_until(lambda: back(run_dir, "engine 1"), RUN_S, "the engine")
            steps = len(series(run_dir, "train/loss"))
            process.wait_until(lambda: len(series(run_dir, "train/loss")) > steps + 1, RUN_S, "steps with it")
            process.kill(signal.SIGINT)
            assert process.wait(60) == 130, process.tail()
        else:
            servers[1].kill()
            process.wait_until(lambda: len(warnings_of(log)) == 2, RUN_S, "the push that skips the engine")
            assert process.wait(RUN_S) == 0, process.tail()
        wait_for_ends(trees, "its actors, and all below", 20)
        process.assert_no_process_left()
    assert max(series(run_dir, "train/train_rollout_logprob_abs_diff")) < 1e-4
    if comes_back:
        (lost,) = events_of(run_dir, "engine_hangs")
        assert re.search("engine 1 node 1 at .* " + HANGS, lost["cause"])
        assert_each_version_is_its_rollouts(run_dir, steps + 1)
    else:
        assert_went_on_without(log, run_dir, 1)
        assert "engine 1 node 1 at" in warnings_of(log)[0]
        assert len(series(run_dir, "train/loss")) == num_rollout


@pytest.mark.full
def test_a_run_with_lost_requests_a_hanging_judge_and_a_dead_engine_finishes(workspace: Path) -> None:
    num_rollout, run_dir, log = 5, workspace / "faults", workspace / "faults.log"
    hooks = faulty_hooks.__name__
    changes: dict[str, Value] = {
        "num_rollout": num_rollout,
        "rm_type": None,
        "custom_generate_function_path": f"{hooks}.generate",
        "custom_rm_path": f"{hooks}.reward_func",
        "reward_timeout": 2,
        **STAY_LOST,
    }
    with TrainProcess(long_flags(workspace, run_dir, "disaggregated", **changes), log) as process:
        process.wait_until(lambda: series(run_dir, "train/loss"), RUN_S, "the first training step")
        mid_rollout(process, run_dir, 0, kill_server)
        assert process.wait(RUN_S) == 0, process.tail()
        process.assert_no_process_left()
    assert_went_on_without(log, run_dir, 0)
    assert len(series(run_dir, "train/loss")) == num_rollout
    assert max(series(run_dir, "train/train_rollout_logprob_abs_diff")) < 1e-4

    trained = assert_accounted_for(run_dir, num_rollout)
    read = int(series(run_dir, "rollout/prompts_read")[-1])
    hopeless = [group for group in range(read) if faulty_hooks.is_hopeless(group, 4)]
    assert hopeless, "the seed drops a group"
    assert trained == [group for group in range(read) if group not in hopeless]
    assert series(run_dir, "rollout/prompts_dropped")[-1] == len(hopeless)
    assert series(run_dir, "rollout/prompts_dropped/generate_error")[-1] == len(hopeless)
    assert sum(series(run_dir, "rollout/sample_failures/generate_error")) >= faulty_hooks.TRIES * len(hopeless)
    assert sum(series(run_dir, "rollout/sample_failures/reward_timeout")) == 1
    assert max(series(run_dir, "perf/rollout_time")) < faulty_hooks.HANG_S, "the judge is not waited for"
