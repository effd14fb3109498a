"""How runs of the real parts end before their last rollout: parts that die, and signals."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.harness import RUN_S, TrainProcess, series
from tests.integration.tiny_run import Value, flags, make_workspace

NUM_GPUS = 0
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("train_ends"))


VICTIMS = {
    "engine_server": ("slime.backends.sglang.launch", "engine 0"),
    "engine_actor": ("ray::EngineActor", "engine 0"),
    "manager": ("ray::RolloutManager", "the rollout manager"),
    "trainer": ("ray::TrainActor", "trainer 0"),
}
"""A word of each one's command line, and the name that the error must have."""


def assert_death_ends_the_run(
    workspace: Path,
    victim: str,
    *,
    while_saving: bool = False,
    env: dict[str, str] | None = None,
    others: Sequence[str] = (),
) -> None:
    """Kill one process of a run: it ends within 60 s, with one line that names the part, and checkpoints are whole.

    Args:
        victim: one of `VICTIMS`.
        while_saving: kill while a checkpoint is being written, not after the first one.
        env: leads to a Ray that is there already.
        others: words in the command lines of processes that are that Ray's own.
    """
    word, culprit = VICTIMS[victim]
    run_dir = workspace / f"death_of_{victim}{'_while_saving' if while_saving else ''}"
    saves: dict[str, Value] = {"save": str(run_dir), "save_interval": 1}
    line = flags(workspace, run_dir, num_rollout=100, no_use_fault_tolerance=True, **saves)
    with TrainProcess(line, workspace / f"{run_dir.name}.log", env) as process:
        process.wait_until((run_dir / "latest_checkpointed_iteration.txt").exists, RUN_S, "the first checkpoint")
        found = process.find(word)
        if while_saving:
            process.wait_until(lambda: any(run_dir.glob(".iter_*.tmp/*")), RUN_S, "an unfinished checkpoint", 0.001)
        found.kill()
        assert process.wait(60) == 1, process.tail()
        process.assert_no_process_left(ignore=others)
    errors = [text for text in process.log.read_text().splitlines() if text.startswith("train.py: error:")]
    assert len(errors) == 1, process.tail()
    assert culprit in errors[0]
    checkpoints = list(run_dir.glob("iter_*"))
    assert checkpoints
    assert all((path / ".metadata").exists() and (path / "rollout_state.pt").exists() for path in checkpoints)
    assert not any(run_dir.glob(".iter_*")), "what was half-written is gone"
    assert "error: save after rollout" in errors[0] or not while_saving, "killed too late to show anything"


@pytest.mark.full
@pytest.mark.parametrize("victim", ["engine_server", "manager", "engine_actor", "trainer"])
def test_death_of_a_process_ends_the_run_with_its_name(workspace: Path, victim: str) -> None:
    assert_death_ends_the_run(workspace, victim)


@pytest.mark.full
def test_death_while_a_checkpoint_is_written_leaves_the_one_before(workspace: Path) -> None:
    assert_death_ends_the_run(workspace, "trainer", while_saving=True)


@pytest.mark.full
@pytest.mark.parametrize(
    ("signum", "to"),
    [(signal.SIGINT, "driver"), (signal.SIGTERM, "driver"), (signal.SIGTERM, "group"), (signal.SIGTERM, "all")],
)
def test_a_signal_to_end_leaves_no_process(workspace: Path, signum: signal.Signals, to: str) -> None:
    run_dir = workspace / f"{signum.name}_to_{to}"
    with TrainProcess(flags(workspace, run_dir, num_rollout=100), workspace / f"{run_dir.name}.log") as process:
        process.wait_until(lambda: series(run_dir, "train/loss"), RUN_S, "the first training step")
        process.kill(signum, to)
        # Well before the minute after which a client of Ray gives its head up.
        assert process.wait(45) == 128 + signum, process.tail()
        process.assert_no_process_left(30)


def test_sigterm_while_ray_waits_has_its_status(tmp_path: Path) -> None:
    """Where the exceptions of handlers do not come out as they were raised."""
    program = tmp_path / "waits.py"
    program.write_text(
        """
import os, signal, threading, time
from argparse import Namespace
import ray
from slime.driver import process

def wait(args):
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    ray.wait([ray.remote(lambda: time.sleep(60)).remote()], timeout=60)

ray.init("local", num_cpus=1, include_dashboard=False)
process.interrupt_on_sigterm()
process.check_patches = lambda *_: None
process.run_driver(wait, Namespace(dry_run=False, num_rollout=None))
"""
    )
    with (tmp_path / "log").open("w") as log:
        ended = subprocess.run([sys.executable, program], stdout=log, stderr=log, timeout=RUN_S, check=False)
    assert ended.returncode == 128 + signal.SIGTERM, (tmp_path / "log").read_text()


@pytest.mark.full
def test_a_signal_while_ray_starts_leaves_no_process(workspace: Path) -> None:
    with TrainProcess(flags(workspace, workspace / "early"), workspace / "early.log") as process:
        process.wait_until(lambda: process.runs("raylet/raylet"), RUN_S, "the raylet")
        process.kill(signal.SIGTERM, "group")
        assert process.wait(45) == 128 + signal.SIGTERM, process.tail()
        process.assert_no_process_left(90)  # Ray has agents that only end when they miss the raylet
