"""Log-probs and entropy against torch's softmax, forward and backward, whole and split over tensor-parallel ranks."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron.log_probs import log_probs_and_entropy

TOKENS, VOCAB = 37, 29


def expected(logits: Tensor, labels: Tensor, vocab_size: int, temperature: float) -> tuple[Tensor, Tensor]:
    every = torch.log_softmax(logits[:, :vocab_size].float() / temperature, dim=-1)
    return every.gather(1, labels[:, None])[:, 0], -(every.exp() * every).sum(-1)


def inputs(seed: int, columns: int = VOCAB) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(TOKENS, columns, generator=generator) * 5
    return logits.requires_grad_(), torch.randint(0, VOCAB, (TOKENS,), generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("columns", [VOCAB, 32])
@pytest.mark.parametrize(("of_log_prob", "of_entropy"), [(1.0, 0.0), (0.0, 1.0), (1.0, -0.3)])
def test_equals_softmax(temperature: float, columns: int, of_log_prob: float, of_entropy: float) -> None:
    logits, labels = inputs(1, columns)
    weights = torch.randn(TOKENS)
    got = log_probs_and_entropy(logits, labels, vocab_size=VOCAB, temperature=temperature)
    want = expected(logits, labels, VOCAB, temperature)
    gradients = []
    for log_prob, entropy in (got, want):
        total = torch.zeros(())
        if of_log_prob:
            total = total + of_log_prob * (log_prob * weights).sum()
        if of_entropy:
            total = total + of_entropy * (entropy * weights).sum()
        gradients += torch.autograd.grad(total, logits)
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)
    assert gradients[0][:, VOCAB:].count_nonzero() == 0


def test_logits_are_left_as_they_were() -> None:
    logits, labels = inputs(2)
    before = logits.detach().clone()
    log_prob, entropy = log_probs_and_entropy(logits, labels, vocab_size=VOCAB)
    (log_prob + entropy).sum().backward()
    assert torch.equal(logits.detach(), before)


def test_same_bits_with_and_without_gradient() -> None:
    logits, labels = inputs(3)
    with_gradient = log_probs_and_entropy(logits, labels, vocab_size=VOCAB, temperature=0.9)
    with torch.no_grad():
        without = log_probs_and_entropy(logits, labels, vocab_size=VOCAB, temperature=0.9)
    assert all(torch.equal(a, b) for a, b in zip(with_gradient, without, strict=True))


def test_sixteen_bit_logits_are_computed_in_float32() -> None:
    logits, labels = inputs(4)
    half = logits.detach().bfloat16().requires_grad_()
    log_prob, entropy = log_probs_and_entropy(half, labels, vocab_size=VOCAB)
    assert log_prob.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(log_prob, expected(half, labels, VOCAB, 1.0)[0], atol=1e-5, rtol=1e-5)
    log_prob.sum().backward()
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]], requires_grad=True)
    log_prob, entropy = log_probs_and_entropy(logits, torch.tensor([1, 0]), vocab_size=3)
    torch.testing.assert_close(log_prob, torch.tensor([-2e4, -torch.tensor(3.0).log()]))
    torch.testing.assert_close(entropy, torch.tensor([0.0, torch.tensor(3.0).log()]))
    (log_prob + entropy).sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


class _Ranks:
    """A group of threads: as much of a process group as vocabulary parallelism uses."""

    def __init__(self, size: int) -> None:
        self.barrier, self.slots, self.local = threading.Barrier(size), [torch.empty(0)] * size, threading.local()

    def rank(self) -> int:
        return self.local.rank

    def size(self) -> int:
        return len(self.slots)

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        self.slots[self.rank()] = tensor.clone()
        self.barrier.wait()
        every = torch.stack(self.slots)
        self.barrier.wait()
        tensor.copy_(every.amax(0) if op == dist.ReduceOp.MAX else every.sum(0))


@pytest.mark.parametrize(("ranks", "width"), [(2, 15), (4, 8), (3, 15)], ids=["even", "padded", "last-all-padding"])
def test_split_vocabulary(ranks: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    group = _Ranks(ranks)
    monkeypatch.setattr(dist, "all_reduce", group.all_reduce)
    logits, labels = inputs(5, ranks * width)
    weights = torch.randn(2, TOKENS)
    want = expected(logits, labels, VOCAB, 0.7)
    (gradient,) = torch.autograd.grad((want[0] * weights[0] + want[1] * weights[1]).sum(), logits)
    results: list[Any] = [None] * ranks

    def work(rank: int) -> None:
        group.local.rank = rank
        shard = logits.detach()[:, rank * width : (rank + 1) * width].clone().requires_grad_()
        got = log_probs_and_entropy(shard, labels, vocab_size=VOCAB, temperature=0.7, group=group)  # type: ignore[arg-type]
        (shard_gradient,) = torch.autograd.grad((got[0] * weights[0] + got[1] * weights[1]).sum(), shard)
        results[rank] = (*got, shard_gradient)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for rank, (log_prob, entropy, shard_gradient) in enumerate(results):
        torch.testing.assert_close(log_prob, want[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(entropy, want[1], atol=1e-5, rtol=1e-5)
        wanted = gradient[:, rank * width : (rank + 1) * width]
        torch.testing.assert_close(shard_gradient, wanted, atol=1e-5, rtol=1e-5)
