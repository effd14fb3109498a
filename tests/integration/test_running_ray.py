"""train.py on a Ray that was there before it: submitted as a job, short of slots, and killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from slime.utils.http_utils import PortReservation
from tests.integration.harness import ROOT, TrainProcess, series
from tests.integration.test_train import RUN_S, flags, make_workspace
from tests.integration.test_train_ends import assert_death_ends_the_run

NUM_GPUS = 0
pytestmark = [pytest.mark.integration, pytest.mark.full]

_HOST = "127.0.0.1"
_RAYS_OWN = ["ray::IDLE", "default_worker.py"]
"""Workers that a running Ray keeps for the next job."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("running_ray"))


@pytest.fixture(scope="module")
def ray_head(workspace: Path) -> Iterator[dict[str, str]]:
    """A Ray of two CPUs with its job server; the environment that leads to it."""
    ports = {name: PortReservation(_HOST) for name in ("gcs", "dashboard", "client", "agent")}
    for reservation in ports.values():
        reservation.release()
    numbers = {name: str(reservation.port) for name, reservation in ports.items()}
    ray = Path(sys.executable).with_name("ray")
    command = [str(ray), "start", "--head", "--block", "--num-cpus=2", f"--node-ip-address={_HOST}"]
    command += [f"--port={numbers['gcs']}", f"--dashboard-port={numbers['dashboard']}", f"--dashboard-host={_HOST}"]
    # Of its own: with that of a test, paths of the dashboard's sockets may be longer than the 107 characters that fit.
    directory = tempfile.mkdtemp(prefix="ray")
    command += [f"--ray-client-server-port={numbers['client']}", f"--temp-dir={directory}", "--disable-usage-stats"]
    # Its default is taken where another Ray runs, and a node whose agent does not listen takes no job.
    command += [f"--dashboard-agent-listen-port={numbers['agent']}"]
    with open(workspace / "head.log", "w") as log:
        # The dashboard's first start after an installation compiles its modules, which takes two cores over a minute.
        patient = os.environ | {"RAY_DASHBOARD_STARTUP_TIMEOUT_S": "180"}
        head = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=patient, start_new_session=True)
    url = f"http://{_HOST}:{numbers['dashboard']}"
    try:
        deadline = time.monotonic() + 240
        while not (_answers(f"{url}/api/version") and _agents_of(head.pid) == 2):
            assert head.poll() is None, (workspace / "head.log").read_text()[-3000:]
            assert time.monotonic() < deadline, (workspace / "head.log").read_text()[-3000:]
            time.sleep(0.5)
        # `ray start` asks for the token that it wrote into the home directory; clients send it in this mode only.
        yield {"RAY_ADDRESS": f"{_HOST}:{numbers['gcs']}", "RAY_AUTH_MODE": "token", "RAY_API_SERVER_ADDRESS": url}
    finally:
        head.terminate()
        head.wait(60)
        shutil.rmtree(directory, ignore_errors=True)


def _agents_of(head: int) -> int:
    """How many of a node's two agents are there: without them it takes no job."""
    return sum("Agent" in process.name() for process in psutil.Process(head).children(recursive=True))


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return reply.status == 200
    except urllib.error.HTTPError as error:
        return error.code in (401, 403)  # it answers, and wants the token that the ray command has
    except OSError:
        return False


def test_too_few_slots_is_one_line_with_the_command_that_helps(workspace: Path, ray_head: dict[str, str]) -> None:
    line = flags(workspace, workspace / "few", actor_num_gpus_per_node=3)
    with TrainProcess(line, workspace / "few.log", ray_head) as process:
        assert process.wait(RUN_S) == 2, process.tail()
        process.assert_no_process_left(ignore=_RAYS_OWN)
    error = process.tail().splitlines()[-1]
    assert "3 CPU slots" in error
    assert "ray start --head --num-cpus 3" in error


def test_job_submission_trains(workspace: Path, ray_head: dict[str, str]) -> None:
    """By the scripts' `launch`, which submits where RAY_ADDRESS is a job server's."""
    run_dir = workspace / "job"
    line = flags(workspace, run_dir, num_rollout=1)
    submit = ["bash", "-c", f'source {ROOT}/scripts/launch.sh; launch train.py "$@"', "bash", *line]
    server = {"RAY_ADDRESS": ray_head["RAY_API_SERVER_ADDRESS"], "PYTHON": sys.executable}
    environment = os.environ | ray_head | server
    status, deadline = 1, time.monotonic() + 180  # the agent that starts jobs is the last of a Ray head to be there
    while status and time.monotonic() < deadline:
        with open(workspace / "job.log", "w") as log:
            status = subprocess.run(
                submit,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                timeout=RUN_S,
                env=environment,
                cwd=workspace,
            ).returncode
        if "No available agent" not in (workspace / "job.log").read_text():
            break
        time.sleep(1)
    assert status == 0, (workspace / "job.log").read_text()[-4000:]
    assert len(series(run_dir, "train/loss")) == 1
    assert max(series(run_dir, "train/train_rollout_logprob_abs_diff")) < 1e-4


def test_killed_driver_leaves_only_ray(workspace: Path, ray_head: dict[str, str]) -> None:
    run_dir = workspace / "killed"
    line = flags(workspace, run_dir, num_rollout=100)
    with TrainProcess(line, workspace / "killed.log", ray_head) as process:
        process.wait_until(lambda: series(run_dir, "train/loss"), RUN_S, "the first training step")
        process.kill()
        process.wait(10)
        process.assert_no_process_left(ignore=_RAYS_OWN)


@pytest.mark.parametrize("victim", ["engine_server", "engine_actor", "manager"])
def test_death_of_a_process_ends_the_run_and_not_ray(workspace: Path, ray_head: dict[str, str], victim: str) -> None:
    assert_death_ends_the_run(workspace, victim, env=ray_head, others=_RAYS_OWN)
