"""scripts/launch.sh on several nodes: two Rays of one slot each, on one machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime.utils.http_utils import PortReservation
from tests.integration.harness import ROOT, series
from tests.integration.test_train import RUN_S, flags, make_workspace

NUM_GPUS = 0
pytestmark = [pytest.mark.integration, pytest.mark.full]

_HOST = "127.0.0.1"
_END_S = 120
"""How long a node may take to notice that the first one's Ray has ended."""


def test_two_nodes_train_one_model(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path)
    ports = [PortReservation(_HOST) for _ in range(6)]
    numbers = [str(reservation.port) for reservation in ports]
    for reservation in ports:
        reservation.release()
    script = workspace / "run.sh"
    script.write_text(f'source {ROOT}/scripts/launch.sh\nlaunch train.py "$@"\n')
    line = flags(workspace, workspace / "run", num_rollout=2, actor_num_nodes=2, num_gpus_per_node=1)
    shared = {"NUM_NODES": "2", "MASTER_ADDR": _HOST, "RAY_PORT": numbers[0], "PYTHON": sys.executable}
    shared |= {"RAY_DASHBOARD_STARTUP_TIMEOUT_S": "180", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    # Nodes of one address: each needs its own ports, and workers free ones.
    common = f"--num-cpus=1 --num-gpus=0 --min-worker-port=0 --max-worker-port=0 --object-store-memory={256 << 20}"
    own = (
        f"--include-dashboard=false --temp-dir={workspace}/r --ray-client-server-port={numbers[1]} "
        f"--dashboard-agent-listen-port={numbers[2]} --metrics-export-port={numbers[3]}",
        f"--node-ip-address={_HOST} --dashboard-agent-listen-port={numbers[4]} --metrics-export-port={numbers[5]}",
    )
    nodes = []
    logs = [workspace / f"node{rank}.log" for rank in range(2)]
    try:
        for rank in (1, 0):  # the first node may be late
            variables = shared | {"NODE_RANK": str(rank), "RAY_START_ARGS": f"{common} {own[rank]}"}
            environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | variables
            with open(logs[rank], "w") as log:
                nodes.append(
                    subprocess.Popen(
                        ["bash", str(script), *line], stdout=log, stderr=subprocess.STDOUT, env=environment,
                        stdin=subprocess.DEVNULL, cwd=workspace,
                    )
                )  # fmt: skip
        other, first = nodes
        status = first.wait(RUN_S + 240)
        assert status == 0, logs[0].read_text()[-6000:]
        other.wait(_END_S)
    finally:
        for node in nodes:
            node.terminate()
        for node in nodes:
            node.wait(60)
    assert "2 of 2 nodes have joined" in logs[0].read_text()
    assert len(series(workspace / "run", "train/loss")) == 2
    assert max(series(workspace / "run", "train/train_rollout_logprob_abs_diff")) < 1e-4
