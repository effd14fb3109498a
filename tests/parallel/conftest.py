"""Tiny models, made once a session, and the launchers of this directory's workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.multiprocessing.spawn import ProcessException

from slime.utils import device
from tests.parallel import tiny
from tests.ranks import run_program

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 600.0
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
    return lambda ranks, layout, kinds: layout_errors(ranks, layout, [models(kind) for kind in kinds], tmp_path)


def layout_errors(ranks: int, layout: dict[str, Any], models: list[Path], work: Path) -> dict[str, list[float]]:
    """The largest errors of logits and gradients over all ranks, by the name of each model's directory."""
    run_worker(ranks, "worker.py", json.dumps(layout), work, *models, log=work / "log")
    reports = [json.loads((work / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return {kind: [max(errors) for errors in zip(*(r[kind] for r in reports), strict=True)] for kind in reports[0]}


def run_worker(ranks: int, worker: str, *arguments: str | Path, log: Path, timeout: float = TIMEOUT) -> None:
    """As `torchrun`, which it uses on GPUs, of four ranks, and with ``--full``; else the ranks are forked, which saves
    each one's imports. But forks have the same order of sets: what depends on it differs between programs alone."""
    if device.is_cuda() or ranks > 2 or "SLIME_TEST_TORCHRUN" in os.environ:
        torchrun(ranks, worker, *arguments, log=log, timeout=timeout)
        return
    try:
        run_program(Path(__file__).parent / worker, list(map(str, arguments)), ranks, log, timeout)
    except (ProcessException, AssertionError) as error:
        raise AssertionError(f"{worker}: {error}\n{log.read_text()[-6000:]}") from None


def torchrun(ranks: int, worker: str | Path, *arguments: str | Path, log: Path, timeout: float = TIMEOUT) -> None:
    """Run a worker of this directory, or another program, on a number of ranks; its output goes to ``log``.

    On GPUs every rank has one of its own, and the test is skipped where there are fewer.

    Raises:
        AssertionError: it failed, or took longer than ``timeout`` seconds, after which none of its processes is left.
    """
    if device.is_cuda() and device.count() < ranks:
        pytest.skip(f"needs {ranks} GPUs, {device.count()} are here")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(Path(__file__).parent / worker), *map(str, arguments)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # Workers are in sessions of their own: their launcher ends them, in time.
            if process.poll() is None:
                process.terminate()
                process.wait(60)
    ended = f"status {code}" if code is not None else f"still running after {timeout} s"
    assert code == 0, f"{worker}: {ended}\n{log.read_text()[-6000:]}"
