"""Tokens to the ranks of their experts and back, once a rank, against Megatron's dispatcher, which sends more."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from slime.utils import device
from tests.ranks import run_ranks

NUM_GPUS = 0

HIDDEN, FFN, LOCAL, TOPK = 12, 10, 4, 3
ROUTINGS = (
    *("uneven", "one expert more", "idle ranks", "one rank each", "nothing shared"),
    *("no tokens", "probabilities of 0", "probabilities of nan"),
)
SETTINGS: dict[str, tuple[bool, dict[str, Any]]] = {
    "plain": (True, {}),
    "shared experts": (True, {"moe_shared_expert_intermediate_size": FFN}),
    "capacity": (False, {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}),
    "padded": (False, {"moe_router_padding_for_quantization": True}),
    "overlap": (False, {"moe_shared_expert_intermediate_size": FFN, "moe_shared_expert_overlap": True}),
    "all gathered": (False, {"moe_token_dispatcher_type": "allgather"}),
    "graphs": (False, {"cuda_graph_impl": "transformer_engine"}),
}
"""Whether the dispatcher takes Megatron's place."""

full = pytest.mark.full


@pytest.mark.parametrize(
    ("ranks", "tensor", "experts"),
    [
        pytest.param(2, 1, 2, id="ep2"),
        pytest.param(2, 2, 2, id="tp2-ep2"),
        pytest.param(4, 1, 4, id="ep4", marks=full),
        pytest.param(4, 2, 2, id="tp2-ep2-dp2", marks=full),
    ],
)
def test_same_as_megatron(ranks: int, tensor: int, experts: int, tmp_path: Path) -> None:
    """Results and gradients in float64: given routings through the dispatcher, and whole layers with their routers."""
    if device.is_cuda() and device.count() < ranks:
        pytest.skip(f"needs {ranks} GPUs, {device.count()} are here")
    run_ranks(run_rank, (str(tmp_path), ranks, tensor, experts), ranks)
    for rank in range(ranks):
        report = json.loads((tmp_path / f"{rank}.json").read_text())
        assert report.pop("replaced") == {name: replaced for name, (replaced, _) in SETTINGS.items()}
        assert report.keys() == {*ROUTINGS, *(f"layer, {variant}" for variant in VARIANTS)}
        assert all(error < 1e-13 for errors in report.values() for error in errors.values()), report


VARIANTS: dict[str, dict[str, Any]] = {
    "softmax": {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "aux_loss"},
    "biased": {
        **{"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        **{"moe_shared_expert_intermediate_size": FFN, "moe_router_topk": LOCAL + 2},
    },
    "groups": {
        **{"moe_router_score_function": "sigmoid", "moe_router_topk": 2},
        **{"moe_router_num_groups": 4, "moe_router_group_topk": 2},
    },
    "one expert": {"moe_router_topk": 1},
    "recomputed": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


def run_rank(rank: int, directory: str, ranks: int, tensor: int, experts: int) -> None:
    from slime.backends.megatron import patches

    patches.install()
    from megatron.core import parallel_state, tensor_parallel

    from slime.backends.megatron.layers import dispatch

    torch.set_num_threads(1)
    device.bind_local_device(rank)
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    store = f"file://{directory}/store"
    dist.init_process_group(device.collective_backend(), init_method=store, rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor, expert_model_parallel_size=experts, expert_tensor_parallel_size=1
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    report: dict[str, Any] = {"replaced": {}}
    for name, (_, options) in SETTINGS.items():
        report["replaced"][name] = replaced(layer_of(**options))
    for size, value in (("tp_size", 2), ("ep_size", 1)):
        layer = layer_of(own=False)
        setattr(layer.token_dispatcher, size, value)
        dispatch.attach(layer)
        assert not replaced(layer)
    for name in ROUTINGS:
        report[name] = check_routing(name)
    for name, options in VARIANTS.items():
        report[f"layer, {name}"] = check_layer(options)
    check_roundings()
    Path(directory, f"{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


def layer_of(*, own: bool = True, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """A layer in training, with the same weights each time and our dispatcher if asked for and possible."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from slime.backends.megatron import releases
    from slime.backends.megatron.layers import dispatch
    from slime.backends.megatron.layers.experts import Experts

    ep = parallel_state.get_expert_model_parallel_world_size()
    tp = parallel_state.get_tensor_model_parallel_world_size()
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, ffn_hidden_size=FFN, moe_ffn_hidden_size=FFN,
        num_moe_experts=ep * LOCAL, moe_router_topk=TOPK, moe_grouped_gemm=True, add_bias_linear=False,
        gated_linear_unit=True, activation_func=F.silu, bias_activation_fusion=False, params_dtype=dtype,
        gradient_accumulation_fusion=False, tensor_model_parallel_size=tp, sequence_parallel=tp > 1,
        expert_model_parallel_size=ep, expert_tensor_parallel_size=1, moe_token_dispatcher_type="alltoall",
        moe_router_dtype="fp64",
    )  # fmt: skip
    vars(config).update(options)  # some are refused without Transformer Engine
    spec = get_moe_module_spec(use_te=False, num_experts=ep * LOCAL, moe_grouped_gemm=True)
    _, submodules = releases.of_module(spec)
    submodules.experts = Experts
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    layer = MoELayer(config, submodules).to(device.current_device())
    layer.set_layer_number(1)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    if own:
        dispatch.attach(layer)
    return layer


def replaced(layer: Any) -> bool:
    return type(layer.token_dispatcher).__name__ == "DedupDispatcher"


def randoms(*shape: int, seed: int = 0) -> Tensor:
    """Other numbers on each rank."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(device.current_device())


def routing(name: str, ep: int) -> tuple[Tensor, Tensor]:
    """bool and float64 [tokens, experts]: which experts tokens take, and with what probabilities."""
    tokens = 7 + 5 * dist.get_rank()
    if name == "no tokens" and dist.get_rank() == 0:
        tokens = 0
    scores = randoms(tokens, ep * LOCAL, seed=3).view(tokens, ep, LOCAL)
    home = torch.arange(tokens, device=scores.device) % ep
    if name == "uneven":
        scores[:, :, 1] -= 10  # an expert of each rank has no tokens
        scores[:, 0] += 1
    elif name == "one expert more":
        scores[:, 0, 0] += 100
    elif name == "idle ranks":
        scores[:, -1] += 100
    elif name == "one rank each":
        scores[torch.arange(tokens), home] += 100
    elif name == "nothing shared":
        scores[:, :, 0] += 100
    scores = scores.flatten(1)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(TOPK).indices, True)
    probs = torch.where(chosen, scores.sigmoid(), 0)
    if name == "probabilities of 0":
        probs[chosen & (scores > 0.5)] = 0
    elif name == "probabilities of nan":
        probs[chosen & (scores > 1.5)] = torch.nan
    return chosen, probs


def check_routing(name: str) -> dict[str, float]:
    """Both dispatchers with the same experts; the largest differences relative to the largest entry."""
    from slime.backends.megatron.layers.dispatch import Copies

    results = []
    for own in (True, False):
        layer = layer_of(own=own)
        chosen, probs = routing(name, layer.ep_group.size())
        hidden, upstream = (randoms(len(chosen), 1, HIDDEN, seed=i).requires_grad_() for i in (1, 2))
        probs.requires_grad_()
        sent, of_sent = layer.preprocess(hidden, probs, chosen)
        if own:
            places = chosen.unflatten(1, (-1, LOCAL)).any(2).sum(0).tolist()
            assert layer.token_dispatcher.input_splits == places
            assert len(sent) == sum(places)
        arrived, of_arrived = layer.dispatch(sent, of_sent)
        rows, counts, of_rows = layer.token_dispatcher.dispatch_postprocess(arrived, of_arrived)
        output, _ = layer.experts(rows, counts, of_rows)
        output = layer.postprocess(layer.combine(layer.token_dispatcher.combine_preprocess(output)), None)
        output.backward(upstream.detach())
        if own:
            kept = {n for n, v in vars(layer.token_dispatcher).items() if isinstance(v, (Tensor, Copies))}
            assert kept == {"_rows_per_expert"}
        experts = {n: p.grad for n, p in layer.experts.named_parameters()}
        tensors = {"output": output, "hidden": hidden.grad, "probs": probs.grad, **experts}
        results.append({"counts": counts, "rows": rows, "of rows": of_rows, **tensors})
    return differences(*results)


def check_layer(options: dict[str, Any]) -> dict[str, float]:
    """Whole layers, from hidden states to gradients of all weights and what routers count, twice."""
    results = []
    for own in (True, True, False):
        layer = layer_of(own=own, **options)
        assert replaced(layer) is own
        hidden = randoms(9, 1, HIDDEN, seed=5).requires_grad_()
        output, _ = layer(hidden)
        output.backward(randoms(9, 1, HIDDEN, seed=6))
        gradients = {n: p.grad for n, p in layer.named_parameters()}
        counts = {n: b for n, b in layer.named_buffers() if b is not None}
        results.append({"output": output, "hidden": hidden.grad, **gradients, **counts})
    first, second, megatrons = results
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    return differences(first, megatrons)


def differences(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    assert got.keys() == want.keys()
    errors = {}
    for name in got:
        a, b = got[name].detach(), want[name].detach()
        assert a.shape == b.shape, (name, a.shape, b.shape)
        assert torch.equal(a.isnan(), b.isnan()), name
        if a.numel():
            a, b = a.nan_to_num(), b.nan_to_num()
            errors[name] = float((a.double() - b).abs().max() / (b.double().abs().max() + 1e-9))
    return errors


def check_roundings() -> None:
    """bfloat16: a token's rows on a rank are added in float32 and rounded, then those sums of the ranks, in order."""
    layer = layer_of(dtype=torch.bfloat16)
    ep = layer.ep_group.size()
    chosen, probs = routing("uneven", ep)
    hidden = randoms(len(chosen), HIDDEN, seed=1).bfloat16()
    factors = probs.float()
    arrived = layer.dispatch(*layer.preprocess(hidden, factors, chosen))
    rows, _, of_rows = layer.token_dispatcher.dispatch_postprocess(*arrived)
    output = (rows * of_rows[:, None]).bfloat16()
    output = layer.postprocess(layer.combine(layer.token_dispatcher.combine_preprocess(output)), None)
    total = torch.zeros(len(chosen), HIDDEN, device=hidden.device)
    for of_rank in factors.split(LOCAL, dim=1):
        on_rank = torch.zeros_like(total)
        for share in of_rank.unbind(1):
            on_rank += (hidden * share[:, None]).bfloat16()
        total += on_rank.bfloat16()
    assert torch.equal(output, total.bfloat16())
