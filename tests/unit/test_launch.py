"""scripts/launch.sh: how a run is started on one node, on several, and as a job."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from slime.utils.http_utils import PortReservation
from tests import shipped
from tests.recorder import SCRIPTS, recorded, run, write_recorder
from tests.waiting import wait_for

NUM_GPUS = 0


RUN = "run-qwen2.5-0.5B.sh"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what stands in for python3."""
    directory = tmp_path_factory.mktemp("launch")
    write_recorder(directory)
    return directory


def test_on_one_node_the_script_becomes_the_run(files: Path, tmp_path: Path) -> None:
    _, (words,) = run(RUN, files, tmp_path / "record", "--lr", "2e-6", PROMPT_DATA="a b.jsonl")
    assert words[0] == f"{shipped.ROOT}/train.py"
    assert words[words.index("--prompt-data") + 1] == "a b.jsonl"
    assert words[-2:] == ["--lr", "2e-6"]
    assert "--dry-run" not in words


def test_a_program_that_is_not_in_the_checkout_is_named_by_its_path(files: Path, tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(files / "python"), "RECORD": str(tmp_path / "record")}
    program = f"source {SCRIPTS}/launch.sh; launch {tmp_path}/mine.py --lr 1"
    subprocess.run(["bash", "-c", program], check=True, timeout=300, env=environment)
    assert recorded(tmp_path / "record") == [[f"{tmp_path}/mine.py", "--lr", "1"]]


def test_without_data_the_smoke_test_makes_its_own(files: Path, tmp_path: Path) -> None:
    _, (first, words) = run(RUN, files, tmp_path / "record", OUTPUT_DIR=str(tmp_path))
    assert first == [f"{shipped.ROOT}/tools/make_arithmetic_data.py", f"{tmp_path}/data"]
    assert words[words.index("--prompt-data") + 1] == f"{tmp_path}/data/train.jsonl"


def test_a_job_server_gets_the_run_as_a_job(files: Path, tmp_path: Path) -> None:
    server = {"RAY_ADDRESS": "http://127.0.0.1:8265", "PROMPT_DATA": "x"}
    _, (words,) = run(RUN, files, tmp_path / "record", **server)
    where = ["--", "env", f"--chdir={os.getcwd()}", str(files / "python"), f"{shipped.ROOT}/train.py"]
    assert words[0] == f"{shipped.ROOT}/tools/submit_job.py"
    assert words[1:6] == where


@pytest.mark.parametrize(
    ("missing", "expected"), [("NODE_RANK", "NODE_RANK, from 0 to 1"), ("MASTER_ADDR", "MASTER_ADDR, the address")]
)
def test_what_several_nodes_need(files: Path, tmp_path: Path, missing: str, expected: str) -> None:
    variables = {"PROMPT_DATA": "x", "NUM_NODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    del variables[missing]
    ran, commands = run(RUN, files, tmp_path / "record", **variables)
    assert (ran.returncode, commands) == (2, [])
    assert ran.stderr == f"launch: error: NUM_NODES=2 needs {expected}" + ran.stderr.partition(expected)[2]


@pytest.mark.parametrize("dry_run", ["0", "1"])
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"NUM_NODES": "two"}, "NUM_NODES=two is not a whole number from 1"),
        ({"NUM_NODES": "0"}, "NUM_NODES=0 is not a whole number from 1"),
        ({"NUM_NODES": "two", "RAY_ADDRESS": "http://127.0.0.1:1"}, "NUM_NODES=two is not a whole number from 1"),
        ({"NUM_NODES": "2", "NODE_RANK": "7"}, "NODE_RANK=7 is not a node of NUM_NODES=2: from 0 to 1"),
        ({"NUM_NODES": "2", "NODE_RANK": "2"}, "NODE_RANK=2 is not a node of NUM_NODES=2: from 0 to 1"),
        ({"NUM_NODES": "2", "NODE_RANK": "-1"}, "NODE_RANK=-1 is not a node of NUM_NODES=2: from 0 to 1"),
        ({"NUM_NODES": "2", "NODE_RANK": "one"}, "NODE_RANK=one is not a node of NUM_NODES=2: from 0 to 1"),
        ({"NUM_NODES": "2", "NODE_RANK": "0"}, "NUM_NODES=2 needs MASTER_ADDR, the address of node 0"),
    ],
)  # fmt: skip
def test_nodes_that_are_none_are_one_line_in_a_dry_run_too(
    files: Path, tmp_path: Path, variables: dict[str, str], expected: str, dry_run: str
) -> None:
    ran, commands = run(RUN, files, tmp_path / "record", PROMPT_DATA="x", DRY_RUN=dry_run, **variables)
    assert (ran.returncode, ran.stdout, commands) == (2, "", [])
    assert ran.stderr == f"launch: error: {expected}\n"


@pytest.mark.parametrize(
    "variables", [{}, {"MASTER_ADDR": "x"}, {"NODE_RANK": "1", "MASTER_ADDR": "x"}, {"RAY_ADDRESS": "http://x:1"}]
)
def test_a_run_on_several_nodes_is_checked_without_them(files: Path, tmp_path: Path, variables: dict[str, str]) -> None:
    ran, (words,) = run(RUN, files, tmp_path / "record", PROMPT_DATA="x", DRY_RUN="1", NUM_NODES="2", **variables)
    assert (ran.returncode, words[-1]) == (0, "--dry-run")
    told = "a run on 2 nodes needs NODE_RANK and MASTER_ADDR on each of them" in ran.stderr
    assert told == variables.keys().isdisjoint(("NODE_RANK", "RAY_ADDRESS"))


@pytest.fixture
def nodes() -> Iterator[dict[str, str]]:
    reservation = PortReservation(
        "127.0.0.1"
    )  # until the end: engines of other tests, too, take the first that is free
    reservation.release()
    yield {"PROMPT_DATA": "x", "NUM_NODES": "2", "MASTER_ADDR": "127.0.0.1", "RAY_PORT": str(reservation.port)}
    reservation.close()


def test_the_first_node_trains_and_its_ray_ends_with_the_run(
    files: Path, tmp_path: Path, nodes: dict[str, str]
) -> None:
    ran, commands = run(RUN, files, tmp_path / "record", NODE_RANK="0", RAY_START_ARGS="--num-gpus 2", **nodes)
    start, wait, train = commands
    assert ran.returncode == 0, ran.stderr
    assert start[:3] == ["-m", "ray.scripts.scripts", "start"]
    assert start[-2:] == ["--num-gpus", "2"]
    assert wait[:2] == [f"{shipped.ROOT}/tools/wait_for_nodes.py", "2"]
    assert train[0] == f"{shipped.ROOT}/train.py"
    assert not processes_of(files)


@pytest.mark.parametrize(("busy", "commands"), [("RECORDER_WAITS", 2), ("RECORDER_TRAINS", 3)])
def test_the_first_node_passes_failures_and_signals_on(
    busy: str, commands: int, files: Path, tmp_path: Path, nodes: dict[str, str]
) -> None:
    ran, _ = run(RUN, files, tmp_path / "record", "bad", NODE_RANK="0", RECORDER_FAILS="bad", **nodes)
    assert ran.returncode == 3
    assert not processes_of(files)
    record = tmp_path / "second"
    kept = {"PATH": os.environ["PATH"], "PYTHON": str(files / "python"), "RECORD": str(record), busy: "1"}
    script = subprocess.Popen(["bash", str(SCRIPTS / RUN)], env=kept | nodes | {"NODE_RANK": "0"})
    try:
        wait_for(lambda: len(recorded(record)) == commands, "the run is started, or waits for nodes")
        script.send_signal(signal.SIGTERM)
        assert script.wait(60) == 143
    finally:
        script.kill()
    assert not processes_of(files)


def test_what_the_users_script_has_started_goes_on(files: Path, tmp_path: Path, nodes: dict[str, str]) -> None:
    script = tmp_path / "run-mine.sh"
    script.write_text(f"sleep 600 >/dev/null 2>&1 &\necho $!\nsource {SCRIPTS}/launch.sh\nlaunch train.py --lr 1e-6\n")
    ran, _ = run(str(script), files, tmp_path / "record", NODE_RANK="0", **nodes)
    assert ran.returncode == 0, ran.stderr
    assert not processes_of(files)
    theirs = psutil.Process(int(ran.stdout.splitlines()[0]))
    assert theirs.status() != psutil.STATUS_ZOMBIE
    theirs.terminate()


def test_what_does_not_end_is_killed(files: Path, tmp_path: Path, nodes: dict[str, str]) -> None:
    record = tmp_path / "record"
    kept = {"PATH": os.environ["PATH"], "PYTHON": str(files / "python"), "RECORD": str(record)}
    more = {"RECORDER_TRAINS": "deaf", "END_TIMEOUT": "1", "NODE_RANK": "0"}
    command = ["bash", str(SCRIPTS / RUN)]
    script = subprocess.Popen(command, env=kept | nodes | more, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(Path(f"{record}.deaf").exists, "the run is started, and deaf")
        script.send_signal(signal.SIGTERM)
        _, said = script.communicate(timeout=300)
    finally:
        script.kill()
    assert script.returncode == 143
    assert "not ended within 1 s (END_TIMEOUT), killed" in said
    assert not processes_of(files)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"NODE_RANK": "0"}, "launch: error: slime is not installed for "),
        ({"RAY_ADDRESS": "http://127.0.0.1:1"}, "has no Ray by which a job is submitted"),
    ],
)
def test_without_an_installation_no_ray_is_started_or_asked(
    where: dict[str, str], message: str, tmp_path: Path, nodes: dict[str, str]
) -> None:
    (tmp_path / "python").write_text(f'#!/bin/bash\nexec {sys.executable} -S "$@"\n')
    (tmp_path / "python").chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(tmp_path / "python"), **nodes, **where}
    command = ["bash", str(SCRIPTS / RUN)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert ran.returncode == 2
    (line,) = ran.stderr.splitlines()
    assert message in line


@pytest.mark.parametrize("missing", ["aiohttp", "pydantic", "ray"])
def test_a_job_needs_all_of_rays_client(missing: str, tmp_path: Path) -> None:
    (tmp_path / f"{missing}.py").write_text("raise ImportError")  # aiohttp and pydantic are of ray[default] alone
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    environment |= {"RAY_ADDRESS": "http://127.0.0.1:1", "PROMPT_DATA": "x"}
    command = ["bash", str(SCRIPTS / RUN)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert ran.returncode == 2
    assert ran.stderr.endswith(": install ray[default], or set PYTHON to one that has it\n")


def test_other_nodes_wait_for_the_first_and_join_it(files: Path, tmp_path: Path, nodes: dict[str, str]) -> None:
    ran, commands = run(RUN, files, tmp_path / "record", NODE_RANK="1", NODES_TIMEOUT="1", **nodes)
    assert (ran.returncode, commands) == (2, [])
    assert f"no Ray at 127.0.0.1:{nodes['RAY_PORT']} within 1 s (NODES_TIMEOUT)" in ran.stderr
    address = f"127.0.0.1:{nodes['RAY_PORT']}"
    head = subprocess.Popen([sys.executable, "-m", "http.server", nodes["RAY_PORT"], "--bind", "127.0.0.1"])
    try:
        _, (words,) = run(RUN, files, tmp_path / "record", NODE_RANK="1", RECORDER_FAILS=address, **nodes)
    finally:
        head.kill()
        head.wait(60)
    start = ["-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", "--log-color", "false"]
    assert words == [*start, "--address", address]


@pytest.mark.parametrize(
    ("redirection", "flag", "prefix"),
    [("", "", ""), ("2> error.log", " --log-color false", "0"), ("> out.log", " --log-color false", "0")],
)
def test_a_ray_that_is_started_colours_terminals_only(redirection: str, flag: str, prefix: str, tmp_path: Path) -> None:
    (tmp_path / "python").write_text('#!/bin/bash\n[ "$1" = -c ] || echo "$@ $RAY_COLOR_PREFIX" > words\n')
    (tmp_path / "python").chmod(0o755)
    terminal, end = pty.openpty()
    with socket.create_server(("127.0.0.1", 0)) as head:
        port = str(head.getsockname()[1])
        program = f"source {SCRIPTS}/launch.sh; launch train.py {redirection}"
        variables = {"NUM_NODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "RAY_PORT": port}
        variables |= {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHON": str(tmp_path / "python")}
        command = ["bash", "-c", program]
        ran = subprocess.run(command, stdout=end, stderr=end, timeout=300, env=variables, cwd=tmp_path)
    os.close(terminal)
    os.close(end)
    assert ran.returncode == 0
    start = f"-m ray.scripts.scripts start --block --disable-usage-stats{flag} --address 127.0.0.1:{port}"
    assert (tmp_path / "words").read_text() == f"{start} {prefix}\n"


def processes_of(files: Path) -> list[str]:
    """Command lines of what runs the recorder."""
    lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if str(files / "python") in line]


@pytest.mark.parametrize(
    ("variables", "mode"),
    [
        ({}, ""),
        ({"RAY_ADDRESS": "10.0.0.1:6379"}, ""),
        ({"RAY_ADDRESS": "10.0.0.1:6379", "RAY_AUTH_TOKEN": "x"}, "token"),
        ({"RAY_ADDRESS": "http://10.0.0.1:8265", "RAY_AUTH_TOKEN": "x"}, "token"),
        ({"RAY_ADDRESS": "http://10.0.0.1:8265", "RAY_AUTH_TOKEN": "x", "RAY_AUTH_MODE": "disabled"}, "disabled"),
    ],
)
def test_a_token_is_sent_where_there_is_one(variables: dict[str, str], mode: str, tmp_path: Path) -> None:
    (tmp_path / "python").write_text('#!/bin/bash\n[ "$1" = -c ] || echo "mode=${RAY_AUTH_MODE:-}"\n')
    (tmp_path / "python").chmod(0o755)
    program = f"source {SCRIPTS}/launch.sh; launch train.py"
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(tmp_path / "python"), "HOME": str(tmp_path), **variables}
    ran = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=300, env=environment)
    assert ran.stdout == f"mode={mode}\n"


def test_a_dry_run_prints_no_secret(files: Path, tmp_path: Path) -> None:
    words = "--wandb-key s3cret --wandb-key=s3cret --judge-api-key s3cret --rm-url http://me:s3cret@judge/score --lr 1"
    program = (
        f"source {SCRIPTS}/launch.sh; launch train.py {words} --train-env-vars '{{\"A\": \"s3cret\"}}' --name 'a b'"
    )
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(files / "python"), "RECORD": str(tmp_path / "record")}
    environment |= {"HOME": str(tmp_path), "DRY_RUN": "1"}
    ran = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=300, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert "s3cret" not in ran.stdout + ran.stderr
    shown = ran.stdout.split(" \\\n   ")
    assert shown[0] == f"{files}/python {shipped.ROOT}/train.py"
    assert {"--lr 1", "--name a\\ b\n", r"--judge-api-key \*\*\*"} <= set(shown)
    assert (tmp_path / "record").read_text().count("s3cret") == 5, "train.py has them"


def test_rays_own_processes_ask_each_other_without_a_proxy(tmp_path: Path) -> None:
    """In a run on several nodes; what the user excepts stays excepted, and everything stays everything."""
    (tmp_path / "python").write_text('#!/bin/bash\n[ "$1" = -c ] || echo "$no_proxy $NO_PROXY"\n')
    (tmp_path / "python").chmod(0o755)
    nodes = {"NUM_NODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "RAY_PORT": "9", "NODES_TIMEOUT": "5"}
    known = {"PATH": os.environ["PATH"], "PYTHON": str(tmp_path / "python"), "HOME": str(tmp_path), **nodes}
    program = f'source {SCRIPTS}/launch.sh; _bypass_proxies; "$PYTHON"'
    for given, expected in (("corp.example", "corp.example,localhost,127.0.0.1,::1,127.0.0.1"), ("*", "*")):
        for name in ("no_proxy", "NO_PROXY"):
            command = ["bash", "-c", program]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=known | {name: given})
            assert ran.stdout.strip().startswith(expected), ran
            assert len(set(ran.stdout.split())) == 1
