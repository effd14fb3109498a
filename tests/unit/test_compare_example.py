"""examples/reproducibility: what its comparison says of two runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from examples.reproducibility import compare

NUM_GPUS = 0


def write(run: Path, change: Callable[[dict[str, Any]], None] = lambda what: None) -> Path:
    """The files of a run of two rollouts, after ``change`` of what is in them."""
    what: dict[str, Any] = {
        "samples": [{"tokens": [1, 2, n], "reward": float(n % 2), "rollout_log_probs": [-0.5, -n]} for n in range(4)],
        "metrics": [{"train/step": 0, "train/loss": 0.25, "train/grad_norm": 1.5}, {"rollout/raw_reward": 0.5}],
        "weights": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)},
    }
    change(what)
    (run / "hf").mkdir(parents=True)
    for rollout in range(2):
        torch.save({"samples": what["samples"][2 * rollout :][:2]}, run / f"samples_{rollout}.pt")
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in what["metrics"]))
    save_file(what["weights"], run / "hf" / "model.safetensors")
    return run


def at(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change of one thing."""

    def change(what: Any) -> None:
        for key in path[:-1]:
            what = what[key]
        what[path[-1]] = value

    return change


NUDGED = torch.arange(6.0).reshape(2, 3) + 2**-20


@pytest.mark.parametrize(
    ("change", "tolerance", "status", "says"),
    [
        (lambda what: None, "0", 0, "final weights                 2 of 2 the same\nthe two runs agree\n"),
        (at("weights", "a", value=NUDGED), "0", 1, "the others 9.5e-07 apart at most\nthe two runs do NOT"),
        (at("weights", "a", value=NUDGED), "1e-5", 0, "the others 9.5e-07 apart at most\nthe two runs agree"),
        (at("weights", "a", value=NUDGED + 1), "1e-5", 1, "the others 1 apart at most\nthe two runs do NOT"),
        (at("metrics", 0, "train/loss", value=0.26), "1e-5", 1, "0 of 1 the same, the others 0.01 apart"),
        (at("samples", 3, "tokens", value=[1, 2, 4]), "1e-5", 1, "tokens                        3 of 4 the same, the"),
        (at("samples", 3, "tokens", value=[1, 2]), "1e-5", 1, "tokens                        3 of 4 the same, and"),
        (at("samples", 0, "reward", value=1e-9), "1e-5", 1, "3 of 4 the same, the others 1e-09 apart"),
    ],
)  # fmt: skip
def test_two_runs(
    change: Callable[[dict[str, Any]], None],
    tolerance: str,
    status: int,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = [str(write(tmp_path / "first")), str(write(tmp_path / "second", change))]
    assert compare.main([*runs, "--tolerance", tolerance]) == status
    assert says in capsys.readouterr().out


def test_a_step_that_was_taken_again_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, killed = write(tmp_path / "first"), write(tmp_path / "killed")
    metrics = killed / "metrics.jsonl"
    before = {"train/step": 0, "train/loss": 0.5, "train/grad_norm": 1.5}
    metrics.write_text(json.dumps(before) + "\n" + metrics.read_text())
    assert compare.main([str(first), str(killed)]) == 0
    assert "losses                        1 of 1 the same" in capsys.readouterr().out


def test_a_run_that_has_not_ended_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = write(tmp_path / "first")
    assert compare.main([str(whole), str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == (
        f"compare.py: {tmp_path / 'none'} has no samples_*.pt: is it the directory of a run that ended well?\n"
    )
