"""Packed attention against attention written out in full, forward and backward, on every context-parallel rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from slime.backends.megatron.layers import kernels
from slime.backends.megatron.layers.attention import AttentionPlan, is_recomputed, packed_params, plan_of
from slime.backends.megatron.layers.kernels import packed_attention
from slime.training.packing import zigzag_index

NUM_GPUS = 0
CPU = torch.device("cpu")
HEADS, GROUPS, CHANNELS = 6, 2, 16


def inputs(tokens: int, value_channels: int = CHANNELS) -> list[Tensor]:
    """Query, key and value of random numbers."""
    sizes = ((HEADS, CHANNELS), (GROUPS, CHANNELS), (GROUPS, value_channels))
    return [torch.randn(tokens, *size, dtype=torch.float64, requires_grad=True) for size in sizes]


def dense(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float) -> Tensor:
    """Softmax attention, one matrix over the whole stream; what is later or in another sequence is masked."""
    key, value = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.arange(len(sequence))
    allowed = (sequence[:, None] == sequence[None]) & (position[:, None] >= position[None])
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), value)


def with_gradients(out: Tensor, of: list[Tensor], upstream: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, of, upstream)]


@pytest.mark.parametrize("lengths", [[7], [1, 1, 1], [5, 40, 3, 17, 33, 34, 120, 1], [64] * 4, [0, 9, 0, 4]])
def test_same_as_dense_attention(lengths: list[int]) -> None:
    qkv = inputs(sum(lengths))
    plan = AttentionPlan(lengths, 1, 0, CPU)
    upstream = torch.randn(sum(lengths), HEADS, CHANNELS, dtype=torch.float64)
    got = with_gradients(packed_attention(*qkv, plan, 0.3), qkv, upstream)
    want = with_gradients(dense(*qkv, lengths, 0.3), qkv, upstream)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("value_channels", [10, 24])
def test_values_may_have_a_width_of_their_own(value_channels: int) -> None:
    lengths = [5, 40, 3, 17, 33]
    qkv = inputs(sum(lengths), value_channels)
    upstream = torch.randn(sum(lengths), HEADS, value_channels, dtype=torch.float64)
    got = with_gradients(packed_attention(*qkv, AttentionPlan(lengths, 1, 0, CPU), 0.3), qkv, upstream)
    want = with_gradients(dense(*qkv, lengths, 0.3), qkv, upstream)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("grouped", [True, False], ids=["torch-2.12", "torch-2.11"])
@pytest.mark.parametrize("value_channels", [10, CHANNELS])
def test_a_kernel_with_one_width_gets_padded_values(
    monkeypatch: pytest.MonkeyPatch, value_channels: int, grouped: bool
) -> None:
    """What is called on a GPU, with torch's function, or the operator beneath, written out."""
    lengths = [5, 40, 3, 17, 33]

    def kernel(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, _: Tensor, scale: float, *longest: int) -> Tensor:
        assert q.size(-1) == k.size(-1) == v.size(-1)
        assert k.size(1) == v.size(1) == GROUPS
        assert offsets.diff().tolist() == lengths
        assert longest == (40, 40)
        return dense(q, k, v, lengths, scale)

    def varlen_attn(*inputs: Any, scale: float, window_size: tuple[int, int], enable_gqa: bool = False) -> Tensor:
        assert (window_size, enable_gqa) == ((-1, 0), True)
        return kernel(*inputs[:5], scale, *inputs[5:])

    def operator(*inputs: Any, scale: float) -> tuple[Tensor]:
        assert inputs[7:] == (0.0, True, False), "dropout, causal, debug mask"
        return (kernel(*inputs[:5], scale, *inputs[5:7]),)

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn if grouped else lambda: None)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", operator)
    kernels._varlen.cache_clear()
    qkv = inputs(sum(lengths), value_channels)
    upstream = torch.randn(sum(lengths), HEADS, value_channels, dtype=torch.float64)
    got = with_gradients(kernels.flash(*qkv, AttentionPlan(lengths, 1, 0, CPU), 0.3), qkv, upstream)
    kernels._varlen.cache_clear()
    want = with_gradients(dense(*qkv, lengths, 0.3), qkv, upstream)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_context_parallel_ranks_together_give_the_whole(cp_size: int) -> None:
    """Ranks side by side in one process: what a rank gathers is the local streams one after the other."""
    lengths = [2 * cp_size * n for n in (1, 5, 2, 9)]
    qkv = inputs(sum(lengths))
    upstream = torch.randn(sum(lengths), HEADS, CHANNELS, dtype=torch.float64)
    indices = [zigzag_index(lengths, cp_size, rank) for rank in range(cp_size)]
    gathered = torch.cat(indices)
    assert torch.equal(gathered.sort().values, torch.arange(sum(lengths)))
    local = []
    for rank in range(cp_size):
        plan = AttentionPlan(lengths, cp_size, rank, CPU)
        assert plan.key_index is not None
        key, value = (x[gathered].index_select(0, plan.key_index) for x in qkv[1:])
        local.append(packed_attention(qkv[0][indices[rank]], key, value, plan, 0.25))
    whole = torch.zeros_like(upstream).index_copy(0, gathered, torch.cat(local))
    got = with_gradients(whole, qkv, upstream)
    want = with_gradients(dense(*qkv, lengths, 0.25), qkv, upstream)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_padding_is_bounded() -> None:
    lengths = [*torch.randint(20, 60, (32,)).tolist(), 2000, 300, 290]
    groups, query_slots, _ = AttentionPlan(lengths, 1, 0, CPU).padded
    rows = sum(group.query_rows for group in groups)
    assert len(query_slots) == len(query_slots.unique()) == sum(lengths)
    assert rows <= sum(n + 8 for n in lengths)
    assert len(groups) <= 8


def test_the_plan_is_made_once_for_a_micro_batch() -> None:
    params = packed_params([8, 16, 4])
    assert params.cu_seqlens_q.tolist() == [0, 8, 24, 28]
    assert params.max_seqlen_q == 16
    plan = plan_of(params, 2, 1, CPU)
    assert plan_of(params, 2, 1, CPU) is plan
    assert plan.queries == [2, 2, 4, 4, 1, 1]
    assert plan.keys == [4, 6, 8, 12, 2, 3]


def test_lengths_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 4, not 6"):
        AttentionPlan([8, 6], 2, 0, CPU)
    with pytest.raises(ValueError, match="multiples of 4, not 6"):
        zigzag_index([8, 6], 2, 0)


@pytest.mark.parametrize(
    ("granularity", "method", "modules", "expected"),
    [
        (None, None, ["core_attn"], False),
        ("full", "uniform", ["core_attn"], True),
        ("full", "block", ["core_attn"], False),
        ("selective", None, ["core_attn", "mlp"], True),
        ("selective", None, ["mlp"], False),
    ],
)
def test_where_every_layer_computes_attention_again(
    granularity: str | None, method: str | None, modules: list[str], expected: bool
) -> None:
    config = SimpleNamespace(recompute_granularity=granularity, recompute_method=method, recompute_modules=modules)
    assert is_recomputed(cast(Any, config)) == expected
