"""True on-policy mode in bfloat16: by the engine's kernels, whose log-probs are then the engine's, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.megatron.layers.attention import AttentionPlan
from slime.backends.megatron.layers.kernels import packed_attention
from slime.backends.megatron.layers.same_kernels import attend
from tests.gpu.test_loop import Record, run
from tests.integration.harness import ROOT, series
from tests.integration.tiny_run import Value

NUM_GPUS = 1
PROBE = "rollout/push_probe_abs_diff"
DIFFERENCES = ("train/train_rollout_logprob_abs_diff", "train/train_rollout_logprob_abs_diff_max", PROBE)
TWO_TURNS = f"{ROOT / 'tests/integration/two_turns.py'}:generate"


def test_the_engines_attention_has_our_gradients() -> None:
    lengths, where = [70, 1, 300], torch.device("cuda")
    plan = AttentionPlan(lengths, 1, 0, where)
    inputs = [torch.randn(sum(lengths), heads, 128, device=where, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    out = torch.randn(sum(lengths), 4, 128, device=where)
    results = []
    for kernel in (attend, packed_attention):
        own = [x.clone().requires_grad_() for x in inputs]
        (kernel(*own, plan, 0.1).float() * out).sum().backward()
        results.append([kernel(*inputs, plan, 0.1), *(x.grad for x in own)])
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-2, atol=2e-2)
    alone = AttentionPlan([300], 1, 0, where)
    assert torch.equal(attend(*(x[71:] for x in inputs), alone, 0.1), results[0][0][71:])


@pytest.mark.parametrize(("arch", "temperature", "generate"), [("qwen3", "1.0", TWO_TURNS), ("qwen2", "0.8", None)])
def test_log_probs_are_the_engines(
    arch: str, temperature: str, generate: str | None, workspace: Path, record_property: Record
) -> None:
    """Over turns, and with biases at another temperature."""
    name = f"true_on_policy_{arch}"
    make = [sys.executable, str(ROOT / "tools/make_tiny_model.py"), str(workspace / name / "model"), "--arch", arch]
    make += ["--hidden-size", "512", "--num-heads", "4", "--num-kv-heads", "2", "--dtype", "bfloat16"]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL, timeout=120)
    model = str(workspace / name / "model")
    changes: dict[str, Any] = {"hf_checkpoint": model, "ref_load": model}
    options: dict[str, Value] = {"rollout_temperature": temperature, "custom_generate_function_path": generate}
    run_dir = run(
        workspace,
        name,
        num_rollout=2,
        true_on_policy_mode=True,
        sglang_attention_backend=None,
        **{**changes, **options},
    )
    for metric in DIFFERENCES:
        found = series(run_dir, metric)
        record_property(metric, max(found))
        assert found
        assert set(found) == {0.0}
    assert min(series(run_dir, "train/grad_norm")) > 0
