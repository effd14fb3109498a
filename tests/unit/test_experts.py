"""Grouped experts against each expert by itself, and against megatron-core's SequentialMLP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from slime.backends.megatron import model
from slime.backends.megatron.layers import experts
from slime.backends.megatron.layers.experts import Groups, grouped_linear
from tests.parallel import tiny
from tests.ranks import run_ranks
from tests.shipped import CONFIGS

NUM_GPUS = 0
COUNTS = {
    "uneven": [5, 0, 17, 1, 0, 9],
    "one expert": [23],
    "all to one": [0, 31, 0],
    "no tokens": [0, 0, 0],
}
WIDTHS = [(24, 40), (7, 5)]
"""Inputs and outputs: of rows that are multiples of 16 bytes, and not."""
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
HIDDEN, FFN, EXPERTS = 32, 24, 4
LAYERS = "linear_fc1", "linear_fc2"
TOKENS_PER_EXPERT = {"uneven": [6, 0, 25, 2], "even": [8] * EXPERTS, "none": [0] * EXPERTS}


class Router(torch.nn.Module):
    """What of megatron-core's router has a type."""

    def __init__(self) -> None:
        super().__init__()
        self.config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, bf16=True)
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.register_buffer("expert_bias", torch.tensor([1.0001, 1.0002]))
        self.register_buffer("local_tokens_per_expert", torch.tensor([257.0, 1.0]), persistent=False)


def test_biases_of_routers_are_not_rounded() -> None:
    """bfloat16 has no numbers between 1 and 1.0078."""
    router = Router()
    (wrapped,) = model.wrap([router])  # type: ignore[list-item]
    assert wrapped.module is router
    assert router.weight.dtype == torch.bfloat16
    assert torch.equal(router.expert_bias, torch.tensor([1.0001, 1.0002]))
    assert torch.equal(router.local_tokens_per_expert, torch.tensor([257.0, 1.0]))
    assert set(router.state_dict()) == {"weight", "expert_bias"}


@pytest.mark.parametrize(("dispatcher", "with_deepep"), [("alltoall", False), ("allgather", False), ("flex", True)])
def test_tokens_are_dispatched_by_alltoall(dispatcher: str, with_deepep: bool) -> None:
    directory = CONFIGS / "qwen3-30B-A3B"
    options = {"moe_token_dispatcher_type": dispatcher, "moe_enable_deepep": with_deepep}
    config = model.transformer_config(tiny.arguments(directory, **options))
    assert (config.moe_token_dispatcher_type, config.moe_enable_deepep) == ("alltoall", False)


def one_by_one(rows: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    parts = zip(rows.split(counts), weight, strict=True)
    return torch.cat([F.linear(own, matrix) for own, matrix in parts])


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> bool:
    scale = float(want.detach().abs().max()) if want.numel() else 0.0
    return got.shape == want.shape and bool(((got.double() - want).abs() <= TOLERANCE[dtype] * (scale + 1e-3)).all())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_grouped_linear(counts: list[int], widths: tuple[int, int], dtype: torch.dtype) -> None:
    check_grouped_linear(counts, widths, dtype, torch.device("cpu"))


def check_grouped_linear(counts: list[int], widths: tuple[int, int], dtype: torch.dtype, where: torch.device) -> None:
    """Results and gradients, against each expert by itself in float64."""
    rows = torch.randn(sum(counts), widths[0], dtype=dtype, device=where, requires_grad=True)
    weight = torch.randn(len(counts), widths[1], widths[0], dtype=dtype, device=where, requires_grad=True)
    upstream = torch.randn(sum(counts), widths[1], dtype=dtype, device=where)
    out = grouped_linear(rows, weight, Groups.of(torch.tensor(counts), rows.device))
    got = [out, *torch.autograd.grad(out, (rows, weight), upstream)]
    exact = [x.detach().double().requires_grad_() for x in (rows, weight)]
    out = one_by_one(exact[0], exact[1], counts)
    want = [out, *torch.autograd.grad(out, exact, upstream.double())]
    assert all(close(a, b, dtype) for a, b in zip(got, want, strict=True))
    assert not got[2][torch.tensor(counts) == 0].any()


def test_strided_rows_and_expanded_gradient() -> None:
    rows = torch.randn(16, 10).t()[:, :8].requires_grad_()
    weight = torch.randn(2, 4, 8, requires_grad=True)
    grouped_linear(rows, weight, Groups.of(torch.tensor([3, 7]), rows.device)).sum().backward()
    got = rows.grad, weight.grad
    rows.grad = weight.grad = None
    one_by_one(rows, weight, [3, 7]).sum().backward()
    for a, b in zip(got, (rows.grad, weight.grad), strict=True):
        torch.testing.assert_close(a, b)


def test_torch_is_asked_only_for_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    kernel = experts._grouped_mm
    monkeypatch.setattr(experts, "_grouped_mm", lambda *args, **kwargs: calls.append(args) or kernel(*args, **kwargs))
    for dtype, width in ((torch.bfloat16, 8), (torch.float32, 4), (torch.bfloat16, 4), (torch.float64, 8)):
        rows, weight = torch.randn(9, width, dtype=dtype), torch.randn(2, width, width, dtype=dtype)
        grouped_linear(rows, weight, Groups.of(torch.tensor([4, 5]), rows.device))
    assert [args[0].dtype for args in calls] == [torch.bfloat16, torch.float32]


# ---- the module, in a process of its own: Megatron's shim is for the whole process


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("experts")
    run_ranks(run_rank, (str(directory),), 1)
    return json.loads((directory / "report.json").read_text())


@pytest.mark.parametrize("tokens", TOKENS_PER_EXPERT)
@pytest.mark.parametrize("variant", ["plain", "fused", "recomputed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_as_sequential(report: dict[str, Any], dtype: str, variant: str, tokens: str) -> None:
    """Outputs and the gradients of tokens, probabilities and weights, in units of the largest entry."""
    errors = report[f"{dtype}, {variant}, {tokens}"]
    assert len(errors) == 5
    assert max(errors) < (1e-5 if dtype == "float32" else 2e-2)


def test_reads_checkpoints_of_sequential(report: dict[str, Any]) -> None:
    assert report["equal after"] is True
    assert report["equal before"] is False


def test_dispatcher_adds_up_in_one_order(report: dict[str, Any]) -> None:
    assert report["dispatcher"] == ["slime.backends.megatron.layers.permutation"] * 2


def test_random_weights(report: dict[str, Any]) -> None:
    """Megatron's: a fixed deviation, and for the second layer one by the number of layers, here of one layer."""
    first, second = report["random weights"]
    assert first == pytest.approx(0.02, rel=0.05)
    assert second == pytest.approx(0.02 / 2**0.5, rel=0.05)


def run_rank(rank: int, directory: str) -> None:
    from slime.backends.megatron import patches

    patches.install()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.moe import token_dispatcher

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    functions = token_dispatcher.permute, token_dispatcher.unpermute
    report: dict[str, Any] = {"dispatcher": [function.__module__ for function in functions]}
    for dtype in (torch.float32, torch.bfloat16):
        for variant in ("plain", "fused", "recomputed"):
            grouped, sequential = both(dtype, variant)
            for name, counts in TOKENS_PER_EXPERT.items():
                report[f"{str(dtype)[6:]}, {variant}, {name}"] = compare(grouped, sequential, counts)
    Path(directory, "checkpoint").mkdir()
    check_checkpoints(report, Path(directory))
    Path(directory, "report.json").write_text(json.dumps(report))
    dist.destroy_process_group()


def both(dtype: torch.dtype, variant: str) -> tuple[Any, Any]:
    """Grouped and sequential experts with the same random weights."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP

    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, ffn_hidden_size=2 * FFN, moe_ffn_hidden_size=FFN,
        num_moe_experts=EXPERTS, moe_router_topk=2, moe_grouped_gemm=True, add_bias_linear=False,
        gated_linear_unit=True, activation_func=F.silu, bias_activation_fusion=variant != "plain", params_dtype=dtype,
        bf16=dtype == torch.bfloat16, recompute_granularity="selective" if variant == "recomputed" else None,
        recompute_modules=["moe_act"],
    )  # fmt: skip
    groups = ProcessGroupCollection.use_mpu_process_groups(["ep", "expt_tp", "expt_dp"])
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    sequential = SequentialMLP(EXPERTS, config, parts, groups)
    grouped = experts.Experts(EXPERTS, config, groups)
    with torch.no_grad():
        for name in LAYERS:
            for i, expert in enumerate(sequential.local_experts):
                weight = getattr(expert, name).weight
                weight.normal_(std=0.3)
                getattr(grouped, name).weight[i] = weight
    return grouped, sequential


def compare(grouped: Any, sequential: Any, counts: list[int]) -> list[float]:
    dtype = grouped.linear_fc1.weight.dtype
    where = grouped.linear_fc1.weight.device
    hidden, upstream = (torch.randn(sum(counts), HIDDEN, dtype=dtype, device=where) for _ in range(2))
    probs = torch.rand(sum(counts), device=where)
    results = []
    for module in (grouped, sequential):
        inputs = [hidden.clone().requires_grad_(), probs.clone().requires_grad_()]
        module.zero_grad()
        out, bias = module(inputs[0], torch.tensor(counts), inputs[1])
        assert bias is None
        out.backward(upstream)
        results.append([out.detach(), inputs[0].grad, inputs[1].grad, *weight_gradients(module)])
    return [
        float((got - want).abs().max() / (want.abs().max() + 1e-9)) if got.numel() else 0.0
        for got, want in zip(*results, strict=True)
    ]


def weight_gradients(module: Any) -> list[Tensor]:
    if isinstance(module, experts.Experts):
        return [getattr(module, name).weight.grad for name in LAYERS]
    return [torch.stack([getattr(expert, name).weight.grad for expert in module.local_experts]) for name in LAYERS]


def weights(module: Any) -> list[Tensor]:
    """[experts, outputs, inputs] of both layers."""
    if isinstance(module, experts.Experts):
        return [getattr(module, name).weight for name in LAYERS]
    return [torch.stack([getattr(expert, name).weight for expert in module.local_experts]) for name in LAYERS]


def check_checkpoints(report: dict[str, Any], directory: Path) -> None:
    from megatron.core import dist_checkpointing

    def state(module: Any) -> dict[str, Any]:
        """As in the only layer of a model."""
        return module.sharded_state_dict("mlp.experts.", ((0, 0, 1),))

    _, sequential = both(torch.float32, "plain")
    grouped, _ = both(torch.float32, "plain")
    report["equal before"] = all(map(torch.equal, weights(sequential), weights(grouped)))
    dist_checkpointing.save(state(sequential), str(directory / "checkpoint"))
    loaded = dist_checkpointing.load(state(grouped), str(directory / "checkpoint"))
    grouped.load_state_dict({key.removeprefix("mlp.experts."): value for key, value in loaded.items()})
    report["equal after"] = all(map(torch.equal, weights(sequential), weights(grouped)))
    fresh = experts.Experts(EXPERTS, grouped.config)
    report["random weights"] = [getattr(fresh, name).weight.std().item() for name in LAYERS]
