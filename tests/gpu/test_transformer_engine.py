"""``--transformer-impl transformer_engine`` against torch's layers; skipped where that package is not installed."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.utils import device
from tests.gpu.test_loop import Record, check, run
from tests.gpu.test_passes import check_same_bits, micro_batch, outputs, trained_model
from tests.integration.harness import series
from tests.integration.tiny_run import Value
from tests.parallel import tiny
from tests.parallel.conftest import layout_errors

NUM_GPUS = 1
_KINDS = ("qwen2", "qwen3", "glm4", "qwen3_moe")
_TE = "transformer_engine"
_FUSED = {"attention_backend": "fused"}
"""As options set it with `_TE`; Megatron wants the same of all models of a process."""

pytestmark = pytest.mark.skipif(importlib.util.find_spec(_TE) is None, reason="needs Transformer Engine")


@pytest.mark.parametrize(("heads", "groups", "channels"), [(8, 2, 128), (4, 4, 64), (6, 3, 24)])
@pytest.mark.parametrize(("cp_size", "cp_rank"), [(1, 0), (2, 0), (2, 1)])
def test_attention(
    *,
    heads: int,
    groups: int,
    channels: int,
    cp_size: int,
    cp_rank: int,
    megatron: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Outputs and gradients are as near to float32 as those of torch's kernel; the seed is in the message."""
    from slime.backends.megatron.layers import attention, kernels, te

    for kind, allowed in (("FLASH", "0"), ("FUSED", "1"), ("UNFUSED", "0")):  # as by --attention-backend fused
        monkeypatch.setenv(f"NVTE_{kind}_ATTN", allowed)
    rng = random.Random(seed := torch.seed())
    lengths = [4 * rng.randint(1, 300) for _ in range(rng.randint(1, 9))]
    plan = attention.AttentionPlan(lengths, cp_size, cp_rank, device.current_device())
    shapes = [(sum(plan.queries), heads), (sum(plan.keys), groups), (sum(plan.keys), groups)]
    inputs = [torch.randn(*shape, channels, device=plan.device).bfloat16() for shape in shapes]
    gathered = cp_size > 1  # keys and values are then views of one tensor
    coefficients = torch.randn(shapes[0][0], heads, channels, device=plan.device)

    def computed(kernel: attention.Kernel, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        query, key, value = leaves
        if gathered:
            key, value = torch.cat((key, value), dim=-1).split(channels, dim=-1)
        out = kernel(query, key, value, plan, channels**-0.5)
        (out * coefficients).sum().backward()
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    exact = computed(kernels.packed_attention, torch.float32)
    ours, theirs = (computed(k, torch.bfloat16) for k in (te.packed_attention, kernels.packed_attention))
    for mine, other, true in zip(ours, theirs, exact, strict=True):
        assert distance(mine, true) < 1.5 * distance(other, true) + 1e-4, f"seed {seed}, lengths {lengths}"


@pytest.mark.parametrize("kind", _KINDS)
def test_as_near_to_float32_as_torchs_layers(kind: str, megatron: None, tmp_path: Path) -> None:
    from slime.backends.megatron import model
    from slime.backends.megatron.layers import te

    tiny.save(kind, tmp_path / "model")
    engine, plain = (trained_model(tmp_path / "model", transformer_impl=name, **_FUSED) for name in (_TE, "local"))
    (exact,) = model.build_model(tiny.arguments(tmp_path / "model", **_FUSED))
    assert any(isinstance(module, te.ColumnLinear) for module in engine.modules())
    names = [name for name, _ in engine.named_parameters()]
    assert names == [name for name, _ in plain.named_parameters()]
    assert engine.state_dict().keys() == plain.state_dict().keys()
    exact.load_state_dict(model.unwrap(engine).state_dict())
    batch = micro_batch(random.Random(torch.seed()), 9)
    true, mine, other = (log_probs_and_gradients(module, batch) for module in (exact, engine, plain))
    for name, *tensors in zip(["log-probs", *names], mine, other, true, strict=True):
        ours, theirs = (distance(x, tensors[2]) for x in tensors[:2])
        assert ours < 2 * theirs + 1e-3, f"{name}: {ours:.2e}, torch's {theirs:.2e}"


def test_all_else_is_as_without_it(megatron: None) -> None:
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.transformer.moe import moe_utils

    assert (optimizer.Adam, optimizer.SGD) == (torch.optim.AdamW, torch.optim.SGD)
    assert not distrib_optimizer.HAVE_APEX_OR_TE
    assert moe_utils.te_general_gemm is None


def log_probs_and_gradients(module: torch.nn.Module, batch: tuple[list[int], Tensor]) -> list[Tensor]:
    """Gradients of the log-probs' sum in float32, wherever they were collected."""
    add_main_gradients(module)
    found = [outputs(module, *batch)["log-probs"]]
    for parameter in module.parameters():
        if not parameter.grad_added_to_main_grad:  # type: ignore[attr-defined]
            parameter.main_grad += parameter.grad  # type: ignore[attr-defined]
        found.append(parameter.main_grad)  # type: ignore[attr-defined]
    return found


def add_main_gradients(module: torch.nn.Module) -> None:
    """What Megatron's DistributedDataParallel gives parameters, and Transformer Engine adds their gradients to."""
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
        parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]


def distance(x: Tensor, true: Tensor) -> float:
    """Of two tensors, relative to the second's norm."""
    return float((x.float() - true).norm() / true.norm())


@pytest.mark.parametrize("kind", _KINDS)
def test_passes_with_and_without_gradients_have_the_same_bits(kind: str, megatron: None, tmp_path: Path) -> None:
    tiny.save(kind, tmp_path / "model")
    module = trained_model(tmp_path / "model", transformer_impl=_TE, **_FUSED)
    add_main_gradients(module)
    check_same_bits(module)


def test_the_loop_sleeps_and_resumes_with_either(workspace: Path, record_property: Record) -> None:
    """Checkpoints are the same: the third rollout resumes with Transformer Engine, the fourth without. The first step
    of every run is on policy (``--ci-test``)."""
    saved = str(workspace / "te-saved")
    options: dict[str, Value] = {"save": saved, "save_interval": 1, "transformer_impl": _TE, "ci_test": True}
    run_dir = run(workspace, "te", num_rollout=2, **options)
    options["load"] = saved
    run(workspace, "te", num_rollout=3, **options)
    run(workspace, "te", num_rollout=4, **options | {"transformer_impl": "local"})
    check(run_dir, 4, record_property)
    record_property("GiB asleep", f"{max(series(run_dir, 'perf/asleep_gib')):.2f}")


@pytest.mark.gpus(2)
@pytest.mark.parametrize(
    "layout",
    [{"tensor_model_parallel_size": 2, "sequence_parallel": True}, {"context_parallel_size": 2}],
    ids=["tp2_sp", "cp2"],
)
def test_two_gpus(layout: dict[str, Any], tmp_path: Path, record_property: Record) -> None:
    """Logits and gradients are as near to Hugging Face's in float32 as those of torch's layers, cut alike."""
    kinds = [kind for kind in _KINDS if "moe" not in kind]  # whose rounded tokens may take other experts
    for kind in kinds:
        tiny.save(kind, tmp_path / kind)
    errors = {}
    for name in ("local", _TE):
        (work := tmp_path / name).mkdir()
        options = {**layout, **_FUSED, "params_dtype": "bfloat16", "bf16": True, "transformer_impl": name}
        errors[name] = layout_errors(2, options, [tmp_path / kind for kind in kinds], work)
        record_property(name, " ".join(f"{logits:.3f} {gradients:.3f}" for logits, gradients in errors[name].values()))
    for kind in kinds:
        for mine, other in zip(errors[_TE][kind], errors["local"][kind], strict=True):
            assert 0 < mine < 3 * other, kind
