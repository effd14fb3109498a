"""Attention whose keys and values are gathered from context-parallel ranks, and again for the gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from slime.backends.megatron.layers import context
from slime.backends.megatron.layers.attention import AttentionPlan
from slime.backends.megatron.layers.kernels import packed_attention
from slime.training.packing import zigzag_index
from tests.ranks import run_ranks
from tests.unit.test_attention import dense, inputs, with_gradients
from tests.waiting import wait_for

NUM_GPUS = 0
CPU = torch.device("cpu")
LENGTHS = [16, 4, 40]
SCALE = 0.3


class _Keeps(torch.autograd.Function):
    """Attention that keeps its inputs for the gradient as they are, as kernels of GPUs do."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> Tensor:
        ctx.save_for_backward(query, key, value, key)
        ctx.plan = plan
        return packed_attention(query, key, value, plan, SCALE)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *kept, key = ctx.saved_tensors
        assert torch.equal(key, kept[1])
        own = [x.detach().requires_grad_() for x in kept]
        with torch.enable_grad():
            out = packed_attention(own[0], own[1], own[2], ctx.plan, SCALE)
        return *torch.autograd.grad(out, own, grad), None


def attend_on(rank: int, directory: Path, ranks: int, value_channels: int) -> None:
    """One rank's part against the whole, and that what was gathered is not kept."""
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    query, key, value = whole = inputs(sum(LENGTHS), value_channels)
    upstream = torch.randn(sum(LENGTHS), 6, value_channels, dtype=torch.float64)
    mine = torch.as_tensor(zigzag_index(LENGTHS, ranks, rank))
    own = [x.detach()[mine].requires_grad_() for x in whole]
    plan = AttentionPlan(LENGTHS, ranks, rank, CPU)
    assert plan.key_index is not None
    gathered: list[StorageWeakRef] = []
    gather = context._gathered

    def noted(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        result = gather(x, group)
        gathered.append(StorageWeakRef(result.untyped_storage()))
        return result

    def attend(key: Tensor, value: Tensor) -> Tensor:
        gathered.extend(StorageWeakRef(x.untyped_storage()) for x in (key, value))
        return _Keeps.apply(own[0], key, value, plan)

    context._gathered = noted
    assert dist.group.WORLD is not None
    for again in (True, False):  # a graph that is kept gathers once more
        if again:
            out = context.attend_in_context(attend, own[1], own[2], plan.key_index, dist.group.WORLD)
            wait_for(lambda: all(storage.expired() for storage in gathered), "the end of what was gathered")
            assert len(gathered) == 3
        grads = torch.autograd.grad(out, own, upstream[mine], retain_graph=again)
        # A thread of gloo may hold it for a moment.
        wait_for(lambda: all(storage.expired() for storage in gathered), "the end of what was gathered again")
        want = with_gradients(dense(query, key, value, LENGTHS, SCALE), whole, upstream)
        for a, b in zip([out.detach(), *grads], want, strict=True):
            torch.testing.assert_close(a, b[mine], rtol=0, atol=1e-10)
    assert len(gathered) == 5
    kept = context.attend_in_context(attend, own[1], own[2], plan.key_index, dist.group.WORLD, again=False)
    assert torch.equal(kept, out)
    for a, b in zip(torch.autograd.grad(kept, own, upstream[mine]), grads, strict=True):
        assert torch.equal(a, b)
    assert len(gathered) == 8
    dist.destroy_process_group()


@pytest.mark.parametrize(("ranks", "value_channels"), [(2, 16), (2, 10)])
def test_what_is_gathered_is_gathered_again(ranks: int, value_channels: int, tmp_path: Path) -> None:
    run_ranks(attend_on, (tmp_path, ranks, value_channels), ranks)
