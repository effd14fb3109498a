"""train.py on a Ray that was there before it: submitted as a job, short of slots, and killed."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from slime.utils.http_utils import PortReservation
from tests.integration.harness import ROOT, RUN_S, TrainProcess, series
from tests.integration.test_train_ends import assert_death_ends_the_run
from tests.integration.tiny_run import Value, flags, make_workspace
from tests.waiting import command_line

NUM_GPUS = 0
pytestmark = [pytest.mark.integration, pytest.mark.full]

_HOST = "127.0.0.1"
_RAYS_OWN = ["ray::IDLE", "default_worker.py"]
"""Workers that a running Ray keeps for the next job."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("running_ray"))


@pytest.fixture(scope="module")
def ray_directory() -> Iterator[Path]:
    """Where that Ray has its files."""
    # Of its own: with that of a test, paths of the dashboard's sockets may be longer than the 107 characters that fit.
    directory = tempfile.mkdtemp(prefix="ray")
    yield Path(directory)
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def ray_head(workspace: Path, ray_directory: Path) -> Iterator[dict[str, str]]:
    """A Ray of two CPUs with its job server; the environment that leads to it."""
    ports = {name: PortReservation(_HOST) for name in ("gcs", "dashboard", "client", "agent")}
    for reservation in ports.values():
        reservation.release()
    numbers = {name: str(reservation.port) for name, reservation in ports.items()}
    ray = Path(sys.executable).with_name("ray")
    command = [str(ray), "start", "--head", "--block", "--num-cpus=2", f"--node-ip-address={_HOST}"]
    command += [f"--port={numbers['gcs']}", f"--dashboard-port={numbers['dashboard']}", f"--dashboard-host={_HOST}"]
    command += [f"--ray-client-server-port={numbers['client']}", f"--temp-dir={ray_directory}", "--disable-usage-stats"]
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


def _agents_of(head: int) -> int:
    """How many of a node's two agents are there: without them it takes no job."""
    return sum("Agent" in command_line(process) for process in psutil.Process(head).children(recursive=True))


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


_KEYS = {name: f"key-of-{name}-0123456789" for name in ("judge", "tracker", "trainers")}


class _Judge(ThreadingHTTPServer):
    """Rewards every response with 1, and knows who asked."""

    def __init__(self) -> None:
        super().__init__((_HOST, 0), _JudgesAnswer)
        self.asked_by: set[str | None] = set()


class _JudgesAnswer(BaseHTTPRequestHandler):
    server: _Judge

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked_by.add(self.headers["Authorization"])
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b"1.0")

    def log_message(self, *words: object) -> None:
        pass


class _Onlooker(threading.Thread):
    """What ps shows of a host's processes, all the time."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: set[tuple[int, str]] = set()
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.02):
            for process in psutil.process_iter():
                self.seen.add((process.pid, command_line(process)))

    def stop(self) -> None:
        self._over.set()
        self.join(60)


def _submit(workspace: Path, line: list[str], environment: dict[str, str]) -> int:
    """Submit a job by the scripts' `launch`, which does so where RAY_ADDRESS is a job server's; its first process."""
    submit = ["bash", "-c", f'source {ROOT}/scripts/launch.sh; launch train.py "$@"', "bash", *line]
    deadline = time.monotonic() + 180  # the agent that starts jobs is the last of a Ray head to be there
    log = workspace / "job.log"
    while True:
        with open(log, "w") as output:
            words: dict[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
            process = subprocess.Popen(submit, env=environment, cwd=workspace, **words)
            status = process.wait(RUN_S)
        if "No available agent" not in log.read_text() or time.monotonic() > deadline:
            break
        time.sleep(1)
    assert status == 0, log.read_text()[-4000:]
    return process.pid


def test_a_job_trains_and_nobody_sees_its_secrets(
    workspace: Path, ray_head: dict[str, str], ray_directory: Path
) -> None:
    """They stand on the submitter's command line until it strikes them, and nowhere else: `docs/run.md`, Keys."""
    run_dir = workspace / "job"
    server = {"RAY_ADDRESS": ray_head["RAY_API_SERVER_ADDRESS"], "PYTHON": sys.executable}
    environment = os.environ | ray_head | server
    onlooker = _Onlooker()
    with _Judge() as judge:
        threading.Thread(target=judge.serve_forever, daemon=True).start()
        onlooker.start()
        secret: dict[str, Value] = {
            "rm_type": "remote_rm",
            "rm_url": f"http://me:{_KEYS['judge']}@{_HOST}:{judge.server_port}/score",
            "use_wandb": True,
            "wandb_mode": "offline",
            "wandb_key": _KEYS["tracker"],
            "train_env_vars": f'{{"JUDGE_TOKEN": "{_KEYS["trainers"]}"}}',
        }
        try:
            submitter = _submit(workspace, flags(workspace, run_dir, num_rollout=1, **secret), environment)
        finally:
            onlooker.stop()
            judge.shutdown()
    assert len(series(run_dir, "train/loss")) == 1
    assert max(series(run_dir, "train/train_rollout_logprob_abs_diff")) < 1e-4

    credentials = base64.b64encode(f"me:{_KEYS['judge']}".encode()).decode()
    assert judge.asked_by == {f"Basic {credentials}"}
    given = {
        name: value
        for group in yaml.safe_load((run_dir / "config.yaml").read_text()).values()
        for name, value in group.items()
    }
    assert given["wandb_key"] == "<redacted>"
    assert given["train_env_vars"] == {"JUDGE_TOKEN": "<redacted>"}

    listed = subprocess.run(
        [Path(sys.executable).with_name("ray"), "job", "list"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert "train.py" in listed.stdout
    shown = {f"process {pid}": line for pid, line in onlooker.seen if pid != submitter} | {
        "ray job list": listed.stdout
    }
    assert any("/train.py" in line for line in shown.values()), "the driver was looked at"
    files = [path for place in (run_dir, ray_directory) for path in place.rglob("*") if path.is_file()]
    assert any(path.name == "runtime_env_agent.log" for path in files)
    assert list(run_dir.glob("wandb/offline-run-*"))
    shown |= {str(path): path.read_bytes().decode("latin-1") for path in [*files, workspace / "job.log"]}
    for key in (*_KEYS.values(), credentials):
        assert not [name for name, text in shown.items() if key in text], key


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
