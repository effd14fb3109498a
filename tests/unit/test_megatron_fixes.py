"""What can be tried of the fixes from outside without megatron-core's own objects."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from slime.backends.megatron.patches import swiglu_grad

NUM_GPUS = 0


def test_optimizers_are_torchs_whatever_else_is_installed(tmp_path: Path) -> None:
    """Apex could be imported, as it and Transformer Engine can in many images; others still get it."""
    for name in ("apex/optimizers", "apex/multi_tensor_apply", "amp_C"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text(
            "FusedAdam = FusedSGD = multi_tensor_applier = multi_tensor_l2norm = multi_tensor_scale = object\n"
        )
    check = """
        from slime.backends.megatron import patches
        patches.install()
        import torch
        from megatron.core import optimizer
        from megatron.core.optimizer import clip_grads, distrib_optimizer
        from megatron.core.utils import local_multi_tensor_applier
        assert (optimizer.Adam, optimizer.SGD) == (torch.optim.AdamW, torch.optim.SGD)
        assert optimizer.USING_PYTORCH_OPTIMIZER and not distrib_optimizer.HAVE_APEX_OR_TE
        assert clip_grads.multi_tensor_applier is local_multi_tensor_applier
        from apex.optimizers import FusedAdam
        assert FusedAdam is object
    """
    found = run_beside(tmp_path, check)
    assert found.returncode == 0, found.stderr


def test_half_an_installation_of_transformer_engine_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").touch()
    (tmp_path / "transformer_engine" / "pytorch.py").write_text("raise RuntimeError('no core library')")
    found = run_beside(tmp_path, "from slime.backends.megatron import patches; patches.install()")
    assert found.returncode == 1
    assert "installed, but cannot be imported (RuntimeError: no core library): complete it as docs" in found.stderr


def run_beside(packages: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run Python where further packages are found."""
    environment = {
        "PYTHONPATH": f"{Path(__file__).parents[2]}:{packages}",
        "PATH": "/usr/bin:/bin",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", [(7, 24), (3, 5, 64), (0, 8)])
def test_the_gradient_of_swiglu_is_that_of_float64(
    shape: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    y, grad = torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype), torch.randn(shape).to(dtype)
    exact = y.double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    (want,) = torch.autograd.grad(torch.nn.functional.silu(gate) * up, exact, grad.double())
    found = swiglu_grad(grad, y)
    assert found.dtype == dtype
    largest = max(1.0, float(want.abs().max())) if y.numel() else 1.0
    torch.testing.assert_close(found.double(), want, rtol=0, atol=tolerance * largest)
