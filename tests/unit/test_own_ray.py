"""A Ray for one run: its ports, its directory, its end; with a stand-in for `ray start`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slime.utils.errors import BadInputError, SlimeError
from slime.utils.external_utils import own_ray
from slime.utils.external_utils.own_ray import Node, Ray
from slime.utils.http_utils import PortReservation
from tests.shipped import ROOT
from tests.waiting import alive, wait_for

NUM_GPUS = 0

ALONE = Node(1, 0, "127.0.0.1")
FAKE = """
import json, os, pathlib, socket, subprocess, sys, time
flags = dict(zip(sys.argv[2:], sys.argv[3:] + [""]))
home = pathlib.Path(flags["--temp-dir"])
session = home / "session_2026-01-01"
(session / "logs").mkdir(parents=True)
(session / "sockets").mkdir()
(home / "session_latest").symlink_to(session)
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
(home / "started").write_text(json.dumps({"flags": flags, "env": dict(os.environ), "pids": [os.getpid(), child.pid]}))
print("about to start", flush=True)
BODY
names = ("--dashboard-port", "--dashboard-agent-listen-port")
servers = [socket.create_server(("127.0.0.1", int(flags[name]))) for name in names]
time.sleep(600)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Has ``ray start`` be a program that listens as Ray does, after ``body``."""
    for name in os.environ:
        if name.startswith(("SLIME_SCRIPT_", "SLURM_", "RAY_", "MASTER_ADDR", "NODE_RANK")):
            monkeypatch.delenv(name)
    short = tempfile.mkdtemp(prefix="s", dir="/tmp")
    monkeypatch.setenv("RAY_TMPDIR", short)
    monkeypatch.setattr("tempfile.tempdir", short)
    monkeypatch.setattr(own_ray, "_has_gpu", lambda: False)
    monkeypatch.setattr(own_ray, "_ray", lambda command: [sys.executable, str(tmp_path / "fake.py"), command])

    def write(body: str) -> None:
        (tmp_path / "fake.py").write_text(FAKE.replace("BODY", body))

    write("")
    yield write
    shutil.rmtree(short)


def seen(ray: Ray) -> dict[str, object]:
    assert ray.directory is not None
    found: dict[str, object] = json.loads((ray.directory / "started").read_text())
    return found


def alive_of(pids: object) -> list[int]:
    assert isinstance(pids, list)
    return [pid for pid in pids if alive(pid)]


def test_two_on_one_host_share_nothing_and_end_with_all_that_they_started(
    fake: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://elsewhere")
    with own_ray.own_ray(3, ALONE) as one:
        with own_ray.own_ray(3, Node(1, 0, "localhost")) as other:
            first, second = seen(one)["flags"], seen(other)["flags"]
            assert isinstance(first, dict)
            assert isinstance(second, dict)
            for flag in ("--port", "--temp-dir", *(name for name in first if name.endswith("-port"))):
                if "worker" not in flag:
                    assert first[flag] != second[flag], flag
            assert one.address == f"http://127.0.0.1:{first['--dashboard-port']}"
            assert one.log_of("j") == f"{one.directory}/session_2026-01-01/logs/job-driver-j.log"
            environment, pids = seen(other)["env"], seen(other)["pids"]
            assert isinstance(environment, dict)
            assert "RAY_API_SERVER_ADDRESS" not in environment
            assert int(environment["RAY_JOB_STOP_WAIT_TIME_S"]) > 30
            assert environment["RAY_USAGE_STATS_REPORT_URL"].startswith("http://127.0.0.1:")
            assert len(alive_of(pids)) == 2
            assert second["--node-ip-address"] == "127.0.0.1", "of a name"
        assert alive_of(pids) == []
        assert len(alive_of(seen(one)["pids"])) == 2, "the other one's end is its own"
    assert alive_of(seen(one)["pids"]) == []
    assert one.directory is not None
    assert [path.name for path in (one.directory / "session_latest").iterdir()] == ["logs"]


def test_an_exception_ends_it(fake: Callable[[str], None]) -> None:
    with pytest.raises(KeyboardInterrupt), own_ray.own_ray(1, ALONE) as ray:
        raise KeyboardInterrupt
    assert alive_of(seen(ray)["pids"]) == []


def test_it_ends_with_a_process_that_is_killed(fake: Callable[[str], None], tmp_path: Path) -> None:
    program = f"""
import time
from slime.utils.external_utils import own_ray
own_ray._has_gpu = lambda: False
own_ray._ray = lambda command: [{sys.executable!r}, {str(tmp_path / "fake.py")!r}, command]
with own_ray.own_ray(1, own_ray.Node(1, 0, "127.0.0.1")) as ray:
    print(ray.directory, flush=True)
    time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert owner.stdout is not None
    assert "Ray started for this run" in owner.stdout.readline()
    pids = seen(Ray("", Path(owner.stdout.readline().strip())))["pids"]
    assert len(alive_of(pids)) == 2
    owner.send_signal(signal.SIGKILL)
    owner.wait(60)
    wait_for(lambda: not alive_of(pids), "the Ray of a killed process ends")
    owner.stdout.close()


def test_one_that_does_not_start_is_an_error_with_its_last_line(
    fake: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("sys.exit('ports are gone')")
    with pytest.raises(SlimeError, match=r"ended with status 1: ports are gone; its logs are in /.*slime_ray_"):
        own_ray.own_ray(1, ALONE).__enter__()
    fake("time.sleep(600)")
    monkeypatch.setattr(own_ray, "_START_S", 1.0)
    with pytest.raises(SlimeError, match=r"the Ray of this run did not start within 1 s: about to start"):
        own_ray.own_ray(1, ALONE).__enter__()


@pytest.mark.parametrize("variable", ["SLIME_SCRIPT_RAY_PORT", "SLIME_SCRIPT_RAY_DASHBOARD_PORT"])
def test_a_port_that_is_asked_for_is_had_or_refused(
    fake: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    reservation = PortReservation("127.0.0.1")
    reservation.close()
    monkeypatch.setenv(variable, str(reservation.port))
    flag = "--dashboard-port" if "DASHBOARD" in variable else "--port"
    with own_ray.own_ray(1, ALONE) as ray:
        flags = seen(ray)["flags"]
        assert isinstance(flags, dict)
        assert flags[flag] == str(reservation.port)
        taken = f"port {reservation.port} of this host is taken, .*: set {variable} to another one, or SLIME_SCRIPT_EXT"
        with pytest.raises(BadInputError, match=taken):
            own_ray.own_ray(1, ALONE).__enter__()
    for port in ("first", "0", "70000"):
        monkeypatch.setenv(variable, port)
        with pytest.raises(BadInputError, match=f"{variable}={port} is not a port"):
            own_ray.own_ray(1, ALONE).__enter__()


def test_a_port_is_free_while_the_kernel_remembers_a_server_that_has_ended() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        connection, _ = server.accept()
        with pytest.raises(OSError, match=f"no 1 free ports in a row in {port}-{port}"):
            PortReservation("127.0.0.1", port=port)
        connection.close()  # this end first: it is the one that is remembered
        client.close()
    with contextlib.closing(PortReservation("127.0.0.1", port=port)) as reservation:
        assert reservation.port == port


def test_an_address_of_another_host_is_refused(fake: Callable[[str], None]) -> None:
    with pytest.raises(BadInputError, match=r"at MASTER_ADDR=192\.0\.2\.77: 192\.0\.2\.77 is not an"):
        own_ray.own_ray(1, Node(1, 0, "192.0.2.77")).__enter__()


def test_a_directory_with_a_long_path_is_not_for_sockets(
    fake: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    with own_ray.own_ray(1, ALONE) as ray:
        assert ray.directory is not None
        assert ray.directory.parent == Path("/tmp")
        assert ray.directory.stat().st_mode & 0o077 == 0, "others do not read its logs"
    shutil.rmtree(ray.directory)
    given = tmp_path / "given"
    monkeypatch.setenv("SLIME_SCRIPT_RAY_TEMP_DIR", str(given))
    with own_ray.own_ray(1, ALONE) as ray:
        assert ray.directory == given
    assert (given / "session_latest/sockets").is_dir(), "nothing of a directory that was given is removed"


@pytest.mark.parametrize(
    ("gpus", "slots", "expected"),
    [
        (True, 4, ["--num-gpus", "4"]),
        (False, 999, ["--num-cpus", "999", "--num-gpus", "0"]),
        (False, 1, ["--num-cpus", str(os.cpu_count()), "--num-gpus", "0"]),
    ],
)
def test_slots_are_gpus_or_cpus(monkeypatch: pytest.MonkeyPatch, gpus: bool, slots: int, expected: list[str]) -> None:
    monkeypatch.setattr(own_ray, "_has_gpu", lambda: gpus)
    assert list(own_ray.slot_flags(slots))[: len(expected)] == expected


HOSTS = "n0\nn1"


@pytest.mark.parametrize(
    ("count", "variables", "expected"),
    [
        (1, {}, Node(1, 0, "127.0.0.1")),
        (1, {"MASTER_ADDR": "10.0.0.1", "SLURM_NODEID": "0"}, Node(1, 0, "10.0.0.1")),
        (2, {"SLURM_NODEID": "1", "SLURM_JOB_HOSTNAMES": HOSTS}, Node(2, 1, "n0")),
        (2, {"SLURM_NODEID": "1", "SLURM_JOB_HOSTNAMES": HOSTS, "MASTER_ADDR": "10.0.0.1"}, Node(2, 1, "10.0.0.1")),
        (2, {"NODE_RANK": "0", "MASTER_ADDR": "10.0.0.1"}, Node(2, 0, "10.0.0.1")),
        (None, {"SLURM_NODEID": "1", "SLURM_JOB_HOSTNAMES": HOSTS}, Node(2, 1, "n0")),
        (None, {"SLURM_NODEID": "1"}, "several nodes need SLURM_NODEID"),
        (2, {"NODE_RANK": "1"}, "several nodes need SLURM_NODEID"),
        (2, {"SLURM_JOB_HOSTNAMES": HOSTS}, "several nodes need SLURM_NODEID"),
        (2, {"NODE_RANK": "2", "MASTER_ADDR": "a"}, "node 2 is not one of 2: SLURM_NODEID .* is from 0 to 1"),
        (2, {"NODE_RANK": "one", "MASTER_ADDR": "a"}, "node one is not one of 2"),
    ],
)
def test_which_node_this_is(
    fake: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    count: int | None,
    variables: dict[str, str],
    expected: Node | str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if isinstance(expected, Node):
        assert own_ray.this_node(count) == expected
    else:
        with pytest.raises(BadInputError, match=expected):
            own_ray.this_node(count)


def test_a_further_node_joins_until_the_first_ones_ray_ends(
    fake: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(own_ray, "LAUNCH", tmp_path / "launch.sh")
    script = 'launch() { echo "$NODE_RANK/$NUM_NODES $MASTER_ADDR:$RAY_PORT $RAY_START_ARGS" > RECORD; SAYS; }\n'
    script = script.replace("RECORD", f"{tmp_path}/record")
    (tmp_path / "launch.sh").write_text(script.replace("SAYS", "echo Ray runtime started."))
    own_ray.join_head(999, Node(2, 1, "10.0.0.1"))
    assert (tmp_path / "record").read_text().startswith("1/2 10.0.0.1:6379  --num-cpus 999 ")
    (tmp_path / "launch.sh").write_text(script.replace("SAYS", "echo no Ray there; exit 2"))
    with pytest.raises(SlimeError, match=r"node 1 did not join the Ray of 10\.0\.0\.1: no Ray there"):
        own_ray.join_head(999, Node(2, 1, "10.0.0.1"))
