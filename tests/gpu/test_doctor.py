"""The self-test of tools/doctor.py on a GPU, with the engine's defaults of such a host."""

from __future__ import annotations

from pathlib import Path

from tests.integration.test_doctor import self_test

NUM_GPUS = 1


def test_a_run_in_small(tmp_path: Path) -> None:
    assert self_test(tmp_path) < 0.05
