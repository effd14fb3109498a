"""The quickstart as a user runs it: accuracy rises on three seeds, and does not with rewards that mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.integration.harness import ROOT
from tools import quickstart

NUM_GPUS = 0
pytestmark = [pytest.mark.integration, pytest.mark.full]

_LIMIT_S = 25 * 60


def _quickstart(output: Path, *options: str) -> dict[str, float]:
    with open(output.with_suffix(".log"), "w") as log:
        status = subprocess.run(
            [sys.executable, str(ROOT / "tools/quickstart.py"), "--output-dir", str(output), *options],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=_LIMIT_S,
        ).returncode
    assert status == 0, output.with_suffix(".log").read_text()[-4000:]
    return json.loads((output / "result.json").read_text())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_accuracy_rises(tmp_path: Path, seed: int) -> None:
    result = _quickstart(tmp_path / "out", "--seed", str(seed))
    assert result["gain"] >= 0.20
    assert (tmp_path / "out" / "curve.png").stat().st_size > 10_000
    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "hf")


def test_random_rewards_do_not_raise_accuracy(tmp_path: Path) -> None:
    assert _quickstart(tmp_path / "out", "--seed", "0", "--rm-type", "random")["gain"] <= 0.05


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(quickstart.QuickstartError, match=r"thesis\.tex"):
        quickstart.clear(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "mine"
