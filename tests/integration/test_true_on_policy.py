"""True on-policy mode: the trainer's log-probs are the engine's, bit for bit, with real Ray, Megatron and SGLang."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.harness import ROOT, RUN_S, TrainProcess, series
from tests.integration.tiny_run import Value, flags, make_workspace

NUM_GPUS = 0
pytestmark = [pytest.mark.integration, pytest.mark.full]
DIFFERENCES = ("train/train_rollout_logprob_abs_diff", "train/train_rollout_logprob_abs_diff_max")
PROBE = "rollout/push_probe_abs_diff"


TWO_TURNS = f"{Path(__file__).parent / 'two_turns.py'}:generate"


@pytest.mark.parametrize(
    ("arch", "temperature", "generate"), [("qwen3", "1.0", TWO_TURNS), ("qwen3", "1.0", None), ("qwen2", "0.8", None)]
)
def test_log_probs_are_the_engines(arch: str, temperature: str, generate: str | None, tmp_path: Path) -> None:
    """Of samples of all lengths, in each rollout, with weights that change; and those of the probe's prompt. MKL keeps
    its promise on Intel's processors alone: elsewhere the run checks that the difference is small."""
    workspace, run_dir = make_workspace(tmp_path), tmp_path / "run"
    make = [sys.executable, str(ROOT / "tools/make_tiny_model.py"), str(workspace / "model"), "--arch", arch]
    make += ["--num-layers", "3", "--hidden-size", "128", "--overwrite"]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL, timeout=120)
    options: dict[str, Value] = {"rollout_temperature": temperature, "rollout_max_response_len": 32}
    options |= {"num_steps_per_rollout": 2, "custom_generate_function_path": generate}
    line = flags(workspace, run_dir, true_on_policy_mode=True, sglang_enable_deterministic_inference=None, **options)
    with TrainProcess(line, tmp_path / "log") as process:
        assert process.wait(2 * RUN_S) == 0, process.tail()
        process.assert_no_process_left()
    norms = series(run_dir, "train/grad_norm")
    assert min(norms) > 0
    for name in DIFFERENCES:
        assert len(series(run_dir, name)) == len(norms)
        if "GenuineIntel" in Path("/proc/cpuinfo").read_text():
            assert set(series(run_dir, name)) == {0.0}
    if "GenuineIntel" in Path("/proc/cpuinfo").read_text():
        assert set(series(run_dir, PROBE)) == {0.0}
