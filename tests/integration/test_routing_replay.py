"""Engines' routes replayed by the trainer: real Ray, Megatron and SGLang on a CPU, a tiny mixture of experts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slime.files.safe_dump import load_safe
from tests.integration.harness import ROOT, RUN_S, TrainProcess, series
from tests.integration.tiny_run import Value, flags, make_workspace

NUM_GPUS = 0
pytestmark = [pytest.mark.integration, pytest.mark.full]
PERTURBED = f"{Path(__file__).parent / 'perturbed_router.py'}:perturb"
DIFFERENCE = "train/train_rollout_logprob_abs_diff"
EXPERTS, TOPK, LAYERS = 8, 2, 3


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_workspace(tmp_path_factory.mktemp("replay"))
    size = ["--arch", "qwen3_moe", "--num-layers", str(LAYERS), "--hidden-size", "64", "--intermediate-size", "64"]
    size += ["--num-experts", str(EXPERTS), "--experts-per-token", str(TOPK), "--overwrite"]
    make = [sys.executable, str(ROOT / "tools/make_tiny_model.py"), str(path / "model"), *size]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL, timeout=120)
    return path


BOUND = 1e-3
"""Of --ci-test, for the difference of log-probs: between those of the same experts and those of others."""


def run(workspace: Path, name: str, status: int = 0, **options: Value) -> Path:
    """No reference: with a router that is perturbed, and with replay, it would have other experts than the policy."""
    run_dir = workspace / name
    samples = str(run_dir / "samples_{rollout_id}.pt")
    options = {"num_rollout": 1, "num_steps_per_rollout": 2, "save_debug_rollout_data": samples} | options
    options |= dict.fromkeys(("use_kl_loss", "kl_loss_coef", "kl_loss_type", "ref_load"))
    line = flags(workspace, run_dir, ci_train_rollout_logprob_abs_diff_threshold=BOUND, **options)
    with TrainProcess(line, workspace / f"{name}.log") as process:
        assert process.wait(2 * RUN_S) == status, process.tail()
        process.assert_no_process_left()
    return run_dir


def stopped_at(log: Path) -> float:
    """The difference of log-probs for which --ci-test has ended a run."""
    found = re.search(
        rf"--ci-test: rollout 0, step 1 of 2, actor: {DIFFERENCE} is (\S+), not at most {BOUND}", log.read_text()
    )
    assert found, log.read_text()[-2000:]
    return float(found[1])


def test_a_perturbed_router_is_put_right_by_the_engines_routes(workspace: Path) -> None:
    """Of the same samples: with routes the log-probs are as near to the engine's as those of an unperturbed router;
    without, --ci-test ends the run."""
    replay: dict[str, Value] = {"use_rollout_routing_replay": True}
    right = run(workspace, "right", **replay)
    replayed = run(workspace, "replayed", custom_megatron_init_path=PERTURBED, **replay)
    run(workspace, "perturbed", status=1, custom_megatron_init_path=PERTURBED)
    differences = [series(run_dir, DIFFERENCE)[0] for run_dir in (replayed, right)]
    differences.append(stopped_at(workspace / "perturbed.log"))
    print(differences)
    assert differences[0] < 1.2 * differences[1]
    assert differences[0] < differences[2] / 10
    assert series(right, "rollout/routed_ratio") == [1.0]
    check_samples(workspace, right)


def test_turns_have_the_routes_of_all_their_tokens(workspace: Path) -> None:
    """Each request asks for those that are not known yet."""
    turns = f"{Path(__file__).parent / 'two_turns.py'}:generate"
    options: dict[str, Value] = {"rollout_max_response_len": 32, "custom_generate_function_path": turns}
    run_dir = run(workspace, "turns", use_rollout_routing_replay=True, **options)
    assert series(run_dir, "rollout/routed_ratio") == [1.0]
    assert max(series(run_dir, DIFFERENCE)) < 2e-6
    check_samples(workspace, run_dir)


def check_samples(workspace: Path, run_dir: Path) -> None:
    """What the engine says is what Hugging Face's model chooses, for each token but the last one."""
    model = AutoModelForCausalLM.from_pretrained(workspace / "model", dtype=torch.float32)
    samples = load_safe(run_dir / "samples_0.pt", "")["samples"]
    assert len(samples) == 16
    for sample in samples:
        with torch.no_grad():
            logits = model(torch.tensor(sample["tokens"])[None], output_router_logits=True).router_logits
        chosen = torch.stack([layer.view(-1, EXPERTS).topk(TOPK).indices for layer in logits], dim=1)[:-1]
        routes = sample["rollout_routed_experts"]
        assert (routes.dtype, routes.shape) == (np.uint8, (len(sample["tokens"]) - 1, LAYERS, TOPK))
        assert np.array_equal(np.sort(routes, -1), np.sort(chosen.numpy(), -1))
