"""scripts/launch.sh on several nodes: two Rays of one slot each, on one machine."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from slime.utils.http_utils import PortReservation
from tests.integration.harness import ROOT, RUN_S, series
from tests.integration.tiny_run import flags, make_workspace
from tests.waiting import command_line

NUM_GPUS = 0
pytestmark = [pytest.mark.integration, pytest.mark.full]

_HOST = "127.0.0.1"
_END_S = 120
"""How long a node may take to notice that the first one's Ray has ended."""
_START_S = RUN_S + 240


class Nodes:
    """Both nodes' scripts, the first node's first."""

    def __init__(self, workspace: Path, processes: list[subprocess.Popen[bytes]]) -> None:
        self.workspace = workspace
        self.processes = processes

    def log(self, rank: int = 0) -> str:
        """What a node's script has said."""
        return (self.workspace / f"node{rank}.log").read_text()

    def assert_end(self, status: int) -> None:
        """The first node's script ends so, then the other's, and no server is left."""
        assert self.processes[0].wait(_START_S) == status, self.log()[-6000:]
        self.processes[1].wait(_END_S)
        assert not self.servers()

    def servers(self) -> list[psutil.Process]:
        """The SGLang servers of this run that live."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if f"{self.workspace}/model" in words and "slime.backends.sglang.launch" in words[:3]:
                found.append(process)
        return found


@contextlib.contextmanager
def two_nodes(workspace: Path, line: list[str]) -> Iterator[Nodes]:
    """A run of train.py on two Rays."""
    ports = [PortReservation(_HOST) for _ in range(6)]
    numbers = [str(reservation.port) for reservation in ports]
    for reservation in ports:
        reservation.release()
    script = workspace / "run.sh"
    script.write_text(f'source {ROOT}/scripts/launch.sh\nlaunch train.py "$@"\n')
    shared = {"NUM_NODES": "2", "MASTER_ADDR": _HOST, "RAY_PORT": numbers[0], "PYTHON": sys.executable}
    shared |= {"RAY_DASHBOARD_STARTUP_TIMEOUT_S": "180", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ray_files = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # its sockets' paths may have 107 characters
    # Nodes of one address: each needs its own ports, and workers free ones.
    common = f"--num-cpus=1 --num-gpus=0 --min-worker-port=0 --max-worker-port=0 --object-store-memory={256 << 20}"
    own = (
        f"--include-dashboard=false --temp-dir={ray_files} --ray-client-server-port={numbers[1]} "
        f"--dashboard-agent-listen-port={numbers[2]} --metrics-export-port={numbers[3]}",
        f"--node-ip-address={_HOST} --dashboard-agent-listen-port={numbers[4]} --metrics-export-port={numbers[5]}",
    )
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in (1, 0):  # the first node may be late
            variables = shared | {"NODE_RANK": str(rank), "RAY_START_ARGS": f"{common} {own[rank]}"}
            environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | variables
            with open(workspace / f"node{rank}.log", "w") as log:
                node = subprocess.Popen(
                    ["bash", str(script), *line], stdout=log, stderr=subprocess.STDOUT, env=environment,
                    stdin=subprocess.DEVNULL, cwd=workspace,
                )  # fmt: skip
            nodes.insert(0, node)
        yield Nodes(workspace, nodes)
    finally:
        for node in nodes:
            node.terminate()
        for node in nodes:
            node.wait(60)
        shutil.rmtree(ray_files, ignore_errors=True)


@pytest.mark.parametrize("per_engine", [1, 2])
def test_two_nodes_train_one_model(tmp_path: Path, per_engine: int) -> None:
    """With an engine on each node, and with one over both."""
    workspace = make_workspace(tmp_path)
    options = {"actor_num_nodes": 2, "num_gpus_per_node": 1, "rollout_num_gpus_per_engine": per_engine}
    line = flags(workspace, workspace / "run", num_rollout=2, check_weight_update_equal=True, **options)
    with two_nodes(workspace, line) as nodes:
        nodes.assert_end(0)
    assert "2 of 2 nodes have joined" in nodes.log()
    assert "\x1b" not in nodes.log(0) + nodes.log(1), "colours in a file"
    assert len(series(workspace / "run", "train/loss")) == 2
    assert max(series(workspace / "run", "train/train_rollout_logprob_abs_diff")) < 1e-4
    names = sorted(path.name for path in (workspace / "run/logs").glob("engine_*"))
    logs = [name for name in names if not name.endswith("_actor.log")]
    assert logs == [["engine_0.log", "engine_1.log"], ["engine_0.log", "engine_0_node_1.log"]][per_engine - 1]


def test_the_death_of_one_nodes_server_ends_the_run_with_engine_and_node(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path)
    options = {"actor_num_nodes": 2, "num_gpus_per_node": 1, "rollout_num_gpus_per_engine": 2}
    options["no_use_fault_tolerance"] = True
    with two_nodes(workspace, flags(workspace, workspace / "run", num_rollout=100, **options)) as nodes:
        deadline = time.monotonic() + _START_S
        while not series(workspace / "run", "train/loss"):
            assert nodes.processes[0].poll() is None, nodes.log()[-6000:]
            assert time.monotonic() < deadline, nodes.log()[-6000:]
            time.sleep(0.5)
        (victim,) = (server for server in nodes.servers() if "--node-rank 1" in command_line(server))
        victim.kill()
        nodes.assert_end(1)
    errors = [text for text in nodes.log().splitlines() if text.startswith("train.py: error:")]
    assert len(errors) == 1, nodes.log()[-6000:]
    assert re.search(r"engine 0 node 1 at http://\S+ ended with status 137 \(signal 9\)", errors[0]), errors
