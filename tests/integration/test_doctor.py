"""The self-test of tools/doctor.py, by a user's command: real processes, and what a bundle has of its host."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import ray

from tests.integration.harness import ROOT, RUN_S
from tools.doctoring.findings import Level, Setting
from tools.doctoring.nodes import clocks

NUM_GPUS = 0
pytestmark = [pytest.mark.integration, pytest.mark.full]


def test_a_run_in_small_pushes_twice_and_leaves_nothing(tmp_path: Path) -> None:
    assert self_test(tmp_path) < 1e-3


def self_test(tmp_path: Path) -> float:
    """By how much engine and trainer differ in it."""
    bundle = tmp_path / "b.tar.gz"
    words = ["--self-test", "--self-test-timeout", str(RUN_S), "--all", "--bundle", str(bundle)]
    command = [sys.executable, str(ROOT / "tools" / "doctor.py"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=RUN_S + 240)
    found = re.search(r"ok +self-test: a run in small took \d+ s: 2 pushes \(.* s\), .* differ by (\S+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert (done.returncode, "STOPS" in done.stdout) == (0, False), done.stdout
    with tarfile.open(bundle) as archive:
        assert {Path(name).name for name in archive.getnames()} >= {"report.txt", "packages.txt", "environment.txt"}
    return float(found[1])


def test_the_clocks_of_a_running_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    context = ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", object_store_memory=100 << 20)
    try:
        monkeypatch.setenv("RAY_ADDRESS", context.address_info["gcs_address"])
        (found,) = clocks(Setting())
    finally:
        ray.shutdown()
    assert (found.level, "the clock of" in found.text) == (Level.FINE, True), found
