"""Grouped experts, rotary embedding and optimizer step on a GPU, whose kernels are others than a CPU's."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from slime.utils import device
from tests.parallel import test_dispatch
from tests.unit import test_experts as on_cpu
from tests.unit import test_norm, test_optimizer

NUM_GPUS = 1

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not device.is_cuda(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", on_cpu.TOLERANCE)
@pytest.mark.parametrize("widths", [*on_cpu.WIDTHS, (2048, 1536)])
@pytest.mark.parametrize("counts", [*on_cpu.COUNTS.values(), [0, 700, 1, 0, 129, 0]])
def test_grouped_linear(
    counts: list[int], widths: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    on_cpu.check_grouped_linear(counts, widths, dtype, device.current_device())


@pytest.mark.parametrize("tokens", on_cpu.TOKENS_PER_EXPERT)
@pytest.mark.parametrize("variant", ["plain", "fused", "recomputed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_as_sequential(megatron: None, dtype: torch.dtype, variant: str, tokens: str) -> None:
    errors = on_cpu.compare(*on_cpu.both(dtype, variant), on_cpu.TOKENS_PER_EXPERT[tokens])
    assert max(errors) < (1e-5 if dtype == torch.float32 else 2e-2)


def test_same_bits_again(megatron: None) -> None:
    """The ratio of an on-policy step is 1 only if a second pass gives what the first gave."""
    torch._dynamo.reset()  # the cases before have used up the number of compilations, after which it runs uncompiled
    grouped, _ = on_cpu.both(torch.bfloat16, "fused")
    counts = torch.tensor([300, 0, 1000, 51])
    hidden = torch.randn(1351, on_cpu.HIDDEN, dtype=torch.bfloat16, device=device.current_device())
    probs = torch.rand(1351, device=hidden.device)
    with torch.no_grad():
        first = grouped(hidden, counts, probs)[0]
    for _ in range(5):
        assert torch.equal(grouped(hidden, counts, probs)[0], first)


def test_nothing_waits_for_the_device(megatron: None, monkeypatch: pytest.MonkeyPatch) -> None:
    grouped, _ = on_cpu.both(torch.bfloat16, "fused")
    hidden = torch.randn(33, on_cpu.HIDDEN, dtype=torch.bfloat16, device=device.current_device())
    probs, counts = torch.rand(33, device=hidden.device), torch.tensor([6, 0, 25, 2])
    grouped(hidden, counts, probs)[0].sum().backward()  # compiles
    device.synchronize()
    accelerator = torch.get_device_module(hidden.device)
    accelerator.set_sync_debug_mode("error")
    try:
        grouped(hidden, counts, probs)[0].sum().backward()
    finally:
        accelerator.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_the_eager_one(dtype: torch.dtype, interleaved: bool) -> None:
    """Of slices of one tensor, as attention gets them, of queries and of keys, and of two lengths."""
    from slime.backends.megatron.layers.attention import AttentionPlan
    from slime.backends.megatron.layers.rotary import Rotary, _rotated, rotate

    args = Namespace(kv_channels=128, rotary_percent=1.0, rotary_base=1e6, use_rope_scaling=False)
    without = {
        "multi_latent_attention": False,
        "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": None,
    }
    rotary = Rotary(Namespace(**vars(args), **without, rope_scaling_factor=8.0))
    for lengths in ([700, 33, 1], [2000, 48]):
        plan = AttentionPlan(lengths, 1, 0, device.current_device())
        cos, sin = rotary.angles(plan)
        together = torch.randn(sum(lengths), 24, 128, dtype=dtype, device=cos.device, requires_grad=True)
        for x in together.split((16, 8), dim=1):
            out = rotate(x, cos, sin, interleaved)
            eager = _rotated(x, cos, sin, interleaved)
            rtol = 1e-2 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(out, eager, rtol=rtol, atol=1e-5)
            upstream = torch.randn_like(out)
            (got,), (want,) = (torch.autograd.grad(o, x, upstream, retain_graph=True) for o in (out, eager))
            torch.testing.assert_close(got, want, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("shape", [(1000, 1, 16, 128), (3, 1, 5, 64), (4096, 1, 256)])
def test_norm_is_torchs(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    test_norm.check_norm(shape, dtype, device.current_device(), tolerance)


def test_values_narrower_than_keys() -> None:
    """The widths of DeepSeek V3; the kernel of 16-bit types against what float32 takes."""
    from slime.backends.megatron.layers.attention import AttentionPlan
    from slime.backends.megatron.layers.kernels import packed_attention

    where, lengths = device.current_device(), [700, 33, 1]
    plan = AttentionPlan(lengths, 1, 0, where)
    exact = [torch.randn(sum(lengths), 4, width, device=where) for width in (192, 192, 128)]
    exact = [x.bfloat16().float().requires_grad_() for x in exact]
    rounded = [x.detach().bfloat16().requires_grad_() for x in exact]
    upstream = torch.randn(sum(lengths), 4, 128, device=where).bfloat16()
    results = []
    for qkv in (rounded, exact):
        out = packed_attention(*qkv, plan, 0.1)
        assert out.shape == upstream.shape
        results.append([out, *torch.autograd.grad(out, qkv, upstream.to(out.dtype))])
    for got, want in zip(*results, strict=True):
        assert (got.float() - want).norm() < 0.01 * want.norm()


@pytest.mark.parametrize("kind", test_optimizer.KINDS)
@pytest.mark.parametrize("saved_by_fused", [True, False])
def test_fused_optimizer(saved_by_fused: bool, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from a checkpoint of the loop, whose ``step`` is in host memory."""
    where = device.current_device()
    sizes = test_optimizer.SIZES
    monkeypatch.setattr(
        test_optimizer, "parameters", lambda: [torch.nn.Parameter(torch.randn(n, device=where)) for n in sizes]
    )
    test_optimizer.test_fused_steps_are_those_of_the_loop(kind, monkeypatch)
    test_optimizer.test_either_continues_from_the_other(saved_by_fused, kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_to_experts_and_back(dtype: torch.dtype) -> None:
    """As on a CPU, to the bit in sums of one order, and without waiting for the device."""
    from slime.backends.megatron.layers import permutation

    for tokens, hidden, experts, topk in ((300, 64, 16, 4), (1000, 256, 128, 8)):
        chosen = torch.zeros(tokens, experts, dtype=torch.bool)
        chosen.scatter_(1, torch.rand(tokens, experts).topk(topk).indices, True)
        x, upstream = (torch.randn(tokens, hidden, dtype=dtype) for _ in range(2))
        probs = torch.rand(tokens, experts)
        results = []
        for where in (device.current_device(), torch.device("cpu")):
            own, own_probs = x.detach().to(where).requires_grad_(), probs.to(where).requires_grad_()
            rows, of_rows, index = permutation.permute(
                own, chosen.to(where), probs=own_probs, num_out_tokens=tokens * topk
            )
            assert of_rows is not None
            out = permutation.unpermute(rows, index, restore_shape=own.shape)
            torch.autograd.backward(
                [out, of_rows], [upstream.to(where), torch.arange(len(of_rows), device=where).float()]
            )
            results.append([rows, of_rows, index, out, own.grad, own_probs.grad])
        assert all(torch.equal(a.cpu(), b) for a, b in zip(*results, strict=True))


def test_dispatcher_waits_for_its_counts_only(megatron: None) -> None:
    """Of one rank, both passes: every other wait is an error. What returns is each token times its experts."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    from slime.backends.megatron.layers.dispatch import DedupDispatcher

    tokens, experts, topk, where = 300, 16, 4, device.current_device()
    groups = ProcessGroupCollection.use_mpu_process_groups(["ep", "expt_tp", "tp_ep"])
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=1, num_moe_experts=experts, moe_router_topk=topk
    )
    dispatcher = DedupDispatcher(config, groups)
    chosen = torch.zeros(tokens, experts, dtype=torch.bool, device=where)
    chosen.scatter_(1, torch.rand(tokens, experts, device=where).topk(topk).indices, True)
    hidden = torch.randn(tokens, 1, 64, device=where, requires_grad=True)
    probs = chosen.float().requires_grad_()

    def both_passes() -> torch.Tensor:
        sent = dispatcher.dispatch_preprocess(hidden, chosen, probs)
        rows, _, of_rows = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*sent))
        back = dispatcher.token_combine(dispatcher.combine_preprocess(rows * of_rows[:, None]))
        output = dispatcher.combine_postprocess(back)
        output.sum().backward()
        return output

    both_passes()  # compiles, and makes NCCL's communicator
    device.synchronize()
    accelerator = torch.get_device_module(where)
    accelerator.set_sync_debug_mode("error")
    try:
        output = both_passes()
    finally:
        accelerator.set_sync_debug_mode("default")
    torch.testing.assert_close(output, topk * hidden)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("tensor", [1, 2])
def test_dispatcher_is_megatrons(tensor: int, tmp_path: Path) -> None:
    test_dispatch.test_same_as_megatron(2, tensor, 2, tmp_path)
