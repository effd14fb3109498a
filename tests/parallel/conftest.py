"""Tiny models, made once a session, and the launcher of `worker.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.parallel import tiny

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 240.0
"""Seconds for one torchrun."""

Run = Callable[[int, dict[str, Any], list[str]], dict[str, list[float]]]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a kind -> directory of its model, made at the first call."""
    root = tmp_path_factory.mktemp("models")

    def get(kind: str) -> Path:
        directory = root / kind
        if not directory.exists():
            tiny.save(kind, directory)
        return directory

    return get


@pytest.fixture
def run_layout(tmp_path: Path, models: Callable[[str], Path]) -> Run:
    """(ranks, layout, kinds) -> per kind the largest errors of logits and gradients over all ranks."""

    def run(ranks: int, layout: dict[str, Any], kinds: list[str]) -> dict[str, list[float]]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += [str(Path(__file__).with_name("worker.py")), json.dumps(layout), str(tmp_path)]
        command += [str(models(kind)) for kind in kinds]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        log = tmp_path / "log"
        with log.open("w") as stream:
            done = subprocess.run(
                command, env=env, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, timeout=TIMEOUT
            )
        assert done.returncode == 0, log.read_text()[-6000:]
        reports = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(ranks)]
        return {kind: [max(errors) for errors in zip(*(r[kind] for r in reports), strict=True)] for kind in kinds}

    return run
