"""Every test file that runs by a label, with a tiny model on CPU slots."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ci.registry import TestFile, read_all
from tests.integration.harness import ROOT, TrainProcess

NUM_GPUS = 0
pytestmark = [pytest.mark.integration, pytest.mark.full]

LIMIT_S = 2400
REGISTERED = [file for file in read_all(ROOT) if file.labels]
NEEDS_GPUS = {"SLIME_TEST_USE_FP8_ROLLOUT=1": "only the published checkpoint is in float8; unset SLIME_TEST_SCALE"}
"""Variants that no CPU runs, and what they say."""


def runs() -> list[object]:
    """Each variant of each file."""
    found = []
    for file in REGISTERED:
        names = [" ".join([file.path, variant]).rstrip() for variant in file.variants]
        found += [pytest.param(file, v, id=n) for v, n in zip(file.variants, names, strict=True)]
    return found


@pytest.mark.parametrize(("file", "variant"), runs())
def test_a_registered_file_passes_with_a_tiny_model(file: TestFile, variant: str, tmp_path: Path) -> None:
    words = variant.split()
    switches = dict(word.split("=", 1) for word in words if word.startswith("SLIME_TEST_"))
    environment = {"SLIME_TEST_SCALE": "tiny", "OUTPUT_DIR": str(tmp_path / "outputs"), **switches}
    arguments = [word for word in words if not word.startswith("SLIME_TEST_")]
    with TrainProcess(arguments, tmp_path / "log", environment, driver=file.path) as process:
        status = process.wait(LIMIT_S)
        if variant in NEEDS_GPUS:
            assert (status, NEEDS_GPUS[variant] in process.tail()) == (2, True), process.tail()
            return
        assert status == 0, process.tail()
        process.assert_no_process_left()
    print(process.tail(2500))
    assert "[metrics] ok" in process.tail()
