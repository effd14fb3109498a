"""`U.execute_train` with a real Ray: its start, a job, and its end, however that comes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.utils.http_utils import PortReservation
from tests.integration.harness import ROOT, RUN_S, TrainProcess, series
from tests.integration.tiny_run import flags, make_workspace
from tests.waiting import command_line

NUM_GPUS = 0
pytestmark = pytest.mark.integration

_KEY = "key-of-a-tracker-0123456789"
_PATIENT = {"RAY_DASHBOARD_STARTUP_TIMEOUT_S": "180"}
SCRIPT = """
import json, pathlib, sys
import slime.utils.external_utils.command_utils as U

here = pathlib.Path(__file__).parent
name, train_script, model_type, *words = sys.argv[1:]
called = lambda: (here / f"{name}.called").write_text(str((here / f"{name}.job").exists()))
try:
    returned = U.execute_train(
        " ".join(words), 2, model_type or None, train_script=train_script, before_ray_job_submit=called,
        extra_env_vars={"NAME": name},
    )
    print(f"returned {returned}")
except U.JobError as error:
    sys.exit(f"{error.status}: {error}")
"""
JOB = """
import json, os, pathlib, signal, sys, time

here = pathlib.Path(__file__).parent
name = os.environ["NAME"]

def leave(*_):
    (here / f"{name}.left").touch()
    sys.exit(0)

signal.signal(signal.SIGTERM, leave)
known = {each: os.environ.get(each) for each in ("WANDB_API_KEY", "RAY_ADDRESS")}
(here / f"{name}.job.tmp").write_text(json.dumps({"words": sys.argv[1:], "cwd": os.getcwd(), **known}))
(here / f"{name}.job.tmp").rename(here / f"{name}.job")
print("the job has begun")
while sys.argv[1] == "wait" and not all((here / f"{each}.job").exists() for each in sys.argv[2:]):
    time.sleep(0.1)
sys.exit(int(sys.argv[2]) if sys.argv[1] == "exit" else 0)
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory with both programs; Rays write below the ``rays`` in it, whose real path is short."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "job.py").write_text(JOB)
    rays = tempfile.mkdtemp(prefix="s", dir="/tmp")
    (tmp_path / "rays").symlink_to(rays)
    yield tmp_path
    shutil.rmtree(rays)


def started(place: Path, name: str, *words: str, model_type: str = "", **variables: str) -> TrainProcess:
    """The script, which runs ``job.py WORD ...``."""
    environment = {"RAY_TMPDIR": str((place / "rays").resolve()), "WANDB_API_KEY": _KEY, **_PATIENT, **variables}
    line = [name, str(place / "job.py"), model_type, *words]
    return TrainProcess(line, place / f"{name}.log", environment, driver=str(place / "script.py"))


def far_port() -> str:
    """A free port that a run which takes the first free ones does not take."""
    with contextlib.closing(PortReservation("127.0.0.1", 50)) as block:
        return str(block.port + 49)


def seen(place: Path, name: str) -> dict[str, str]:
    found: dict[str, str] = json.loads((place / f"{name}.job").read_text())
    return found


def log_of_job(process: TrainProcess) -> str:
    """What the log has whose path the script prints."""
    (path,) = {line.partition("its log: ")[2] for line in process.tail().splitlines() if "SUCCEEDED; its log" in line}
    return Path(path).read_text()


def test_a_job_runs_on_a_ray_of_its_own_and_nothing_is_left(place: Path) -> None:
    with started(place, "a", "exit", "0", "'b c'", model_type="qwen2.5-0.5B") as process:
        process.wait_until((place / "a.job").exists, RUN_S, "the job")
        lines = " ".join(map(command_line, process.descendants()))
        assert process.wait(RUN_S) == 0, process.tail()
        process.assert_no_process_left(timeout=5)
    job = seen(place, "a")
    assert "returned SUCCEEDED" in process.tail()
    assert (place / "a.called").read_text() == "False", "called before the job was submitted"
    assert job["words"][:2] == ["--num-layers", "24"]
    assert job["words"][-3:] == ["exit", "0", "b c"]
    assert (job["WANDB_API_KEY"], job["cwd"]) == (_KEY, str(place))
    assert _KEY not in lines + process.tail()
    assert "the job has begun" in log_of_job(process)


@pytest.mark.full
def test_a_failed_job_is_an_error_with_its_status(place: Path) -> None:
    with started(place, "a", "exit", "3") as process:
        assert process.wait(RUN_S) == 1, process.tail()
        process.assert_no_process_left(timeout=5)
    assert "FAILED: job raysubmit_" in process.tail()
    assert "failed: Job entrypoint command failed with exit code 3; its log: /tmp/s" in process.tail()


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("to", ["driver", "group"])
def test_whatever_ends_the_script_ends_its_job_and_its_ray(place: Path, number: signal.Signals, to: str) -> None:
    with started(place, "a", "wait", "never") as process:
        process.wait_until((place / "a.job").exists, RUN_S, "the job")
        process.kill(number, to)
        assert process.wait(120) == {signal.SIGINT: -2, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
        process.assert_no_process_left(timeout=90 if number == signal.SIGKILL else 5)
    if number != signal.SIGKILL:
        assert (place / "a.left").exists(), "the job had time to end in order"


@pytest.mark.full
def test_ctrl_c_ends_a_ray_that_has_not_come_up(place: Path) -> None:
    with started(place, "a", "wait", "never") as process:
        process.wait_until(lambda: process.runs("gcs_server"), RUN_S, "a part of the Ray")
        process.kill(signal.SIGINT)
        process.wait(120)
        process.assert_no_process_left(timeout=5)
    assert not (place / "a.called").exists()


@pytest.mark.full
def test_two_at_once_on_one_host_do_not_disturb_each_other(place: Path) -> None:
    """The ends of one, and a third that wants the other's port, neither."""
    wanted = far_port()
    port = {"SLIME_SCRIPT_RAY_PORT": wanted}
    with started(place, "a", "wait", "a", "b", "c", **port) as a, started(place, "b", "wait", "a", "b") as b:
        assert b.wait(RUN_S) == 0, b.tail()
        refused = [sys.executable, str(place / "script.py"), "d", str(place / "job.py"), "", "exit", "0"]
        ran = subprocess.run(refused, capture_output=True, text=True, env=os.environ | port, cwd=ROOT, timeout=RUN_S)
        assert f"BadInputError: port {wanted} of this host is taken" in ran.stderr
        (place / "c.job").touch()
        assert a.wait(RUN_S) == 0, a.tail()
        a.assert_no_process_left(timeout=5)
    assert seen(place, "a")["RAY_ADDRESS"].endswith(f":{wanted}")
    assert seen(place, "b")["RAY_ADDRESS"] != seen(place, "a")["RAY_ADDRESS"]


@pytest.mark.full
def test_a_job_on_a_ray_that_runs_is_all_that_ends(place: Path) -> None:
    """The Ray is one that was started to stay."""
    server = far_port()
    stays = {"SLIME_SCRIPT_RAY_DASHBOARD_PORT": server, "SLIME_SCRIPT_ENABLE_RAY_SUBMIT": "0"}
    line = [sys.executable, str(place / "script.py")]
    there = os.environ | {"RAY_ADDRESS": f"http://127.0.0.1:{server}", "PYTHONPATH": str(ROOT)}
    with started(place, "ray", "exit", "0", **stays) as ray:
        ray.wait_until(lambda: "not submitted to http" in ray.tail(), RUN_S, "the Ray")
        job = str(place / "job.py")
        ran = subprocess.run(
            [*line, "a", job, "", "exit", "0"], capture_output=True, text=True, env=there, timeout=RUN_S
        )
        assert "returned SUCCEEDED" in ran.stdout, ran.stdout + ran.stderr
        with open(place / "b.log", "w") as log:
            other = subprocess.Popen([*line, "b", job, "", "wait", "never"], stdout=log, stderr=log, env=there)
        ray.wait_until((place / "b.job").exists, RUN_S, "the second job")
        assert ray.runs(f"{job} wait never")
        other.terminate()
        assert other.wait(120) == 143
        assert (place / "b.left").exists(), (place / "b.log").read_text()
        assert not ray.runs(f"{job} wait never")
        assert ray.runs("gcs_server")
        ray.kill(signal.SIGTERM)
        assert ray.wait(120) == 143
        ray.assert_no_process_left(timeout=5)
    assert not (place / "ray.job").exists()


@pytest.mark.full
def test_further_nodes_join_the_first_ones_ray(place: Path) -> None:
    nodes = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_HOSTNAMES": "127.0.0.1\nother", "NODES_TIMEOUT": "180"}
    nodes |= {"SLIME_SCRIPT_RAY_PORT": far_port()}
    ports = [PortReservation("127.0.0.1") for _ in range(2)]
    for reservation in ports:
        reservation.release()  # not closed: the first node takes neither
    agent, metrics = (reservation.port for reservation in ports)
    # Two nodes of one address: the second needs ports of its own.
    own = "--node-ip-address=127.0.0.1 --min-worker-port=0 --max-worker-port=0"
    own += f" --dashboard-agent-listen-port={agent} --metrics-export-port={metrics}"
    with (
        started(place, "b", "exit", "0", SLURM_NODEID="1", RAY_START_ARGS=own, **nodes) as second,
        started(place, "a", "exit", "0", SLURM_NODEID="0", **nodes) as first,
    ):
        assert first.wait(RUN_S) == 0, first.tail()
        assert second.wait(180) == 0, second.tail()
        second.assert_no_process_left(timeout=5)
    for reservation in ports:
        reservation.close()
    assert "2 of 2 nodes have joined" in first.tail()
    assert "returned None" in second.tail()
    assert not (place / "b.called").exists()


@pytest.mark.full
def test_the_training_script_trains_on_cpu_slots(place: Path) -> None:
    """With a checkpoint that `U.convert_checkpoint` makes of the model, by two processes, and then finds."""
    workspace = make_workspace(place)
    (place / "models").mkdir()
    (place / "model").rename(place / "models/model")
    (place / "model").symlink_to(place / "models/model")
    convert = "import slime.utils.external_utils.command_utils as U; print(U.convert_checkpoint('model', None, 2))"
    known = os.environ | {"SLIME_MODELS_DIR": str(place / "models"), "PYTHONPATH": str(ROOT)}
    for begin in ("EXEC: ", "convert_checkpoint: "):
        ran = subprocess.run([sys.executable, "-c", convert], capture_output=True, text=True, env=known, timeout=RUN_S)
        assert ran.stdout.startswith(begin), ran.stdout + ran.stderr
        assert ran.stdout.splitlines()[-1] == f"{place}/models/model_torch_dist"
    line = flags(workspace, place / "run", num_rollout=1, ref_load=f"{place}/models/model_torch_dist")
    environment = {"RAY_TMPDIR": str((place / "rays").resolve()), **_PATIENT}
    words = ["a", "train.py", "", *line]
    with TrainProcess(words, place / "a.log", environment, driver=str(place / "script.py")) as process:
        assert process.wait(RUN_S) == 0, process.tail()
        process.assert_no_process_left(timeout=5)
    assert len(series(place / "run", "train/loss")) == 1
