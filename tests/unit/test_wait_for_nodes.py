"""tools/wait_for_nodes.py: until a Ray has as many nodes as a run needs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import shipped
from tools import wait_for_nodes

NUM_GPUS = 0


def test_waiting_for_nodes_needs_the_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(SystemExit) as stop:
        wait_for_nodes.main(["2"])
    assert stop.value.code == 2
    assert "RAY_ADDRESS is not set" in capsys.readouterr().err


def test_a_ray_that_does_not_answer(tmp_path: Path) -> None:
    """Something that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        environment = {**os.environ, "RAY_ADDRESS": f"127.0.0.1:{server.getsockname()[1]}"}
        command = [sys.executable, str(shipped.ROOT / "tools/wait_for_nodes.py"), "2", "--timeout", "2"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].endswith("did not answer within 2 s")


def test_a_ray_that_refuses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import ray

    def refuse(**_: object) -> None:
        raise ConnectionError("not\nthis token")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert wait_for_nodes.main(["2"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("error: Ray at 10.0.0.1:6379: not this token")


@pytest.mark.parametrize(("joined", "status"), [([1, 1, 2], 0), ([2], 0), ([1, 1], 1)])
def test_waiting_for_nodes(
    joined: list[int], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node that is gone does not count."""
    import ray

    counts = iter(joined)
    nodes = [{"Alive": False}, {"Alive": True}, {"Alive": True}]
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "nodes", lambda: nodes[: 1 + next(counts)])
    clock = SimpleNamespace(monotonic=iter(range(10)).__next__, sleep=lambda _: None)
    monkeypatch.setattr(wait_for_nodes, "time", clock)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert wait_for_nodes.main(["2", "--timeout", "1.5" if status else "9"]) == status
    said = capsys.readouterr()
    if status:
        assert "Ray at 10.0.0.1:6379: 1 of 2 nodes joined within 2 s" in said.err
    else:
        assert said.out.splitlines()[-1] == "2 of 2 nodes have joined Ray at 10.0.0.1:6379"
