"""KL divergence over a teacher's likeliest ids against its definition in float64, in chunks and split vocabularies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slime.training.loss.divergence import reverse_kl, top_log_probs
from tests.rank_threads import Ranks

NUM_GPUS = 0
VOCAB, HIDDEN, TOKENS, TEMPERATURE = 29, 11, 37, 0.7
OPTIONS: dict[str, Any] = {"vocab_size": VOCAB, "temperature": TEMPERATURE}


def log_probs(hidden: Tensor, weight: Tensor) -> Tensor:
    return torch.log_softmax(hidden.double() @ weight.double()[:VOCAB].t() / TEMPERATURE, dim=-1)


def expected(student: Tensor, teacher: Tensor, count: int) -> Tensor:
    """The sum over bins, one by one."""
    values = []
    for ours, theirs in zip(student.exp(), teacher.exp(), strict=True):
        top = theirs.topk(count).indices.tolist()
        others = [i for i in range(VOCAB) if i not in top]
        bins = [*zip(ours[top], theirs[top], strict=True)] + [(ours[others].sum(), theirs[others].sum())] * bool(others)
        values.append(sum(q * (q / p).log() for q, p in bins))
    return torch.stack(values)


def made(padded: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states and output layers of a student, which want gradients, and of a teacher."""
    torch.manual_seed(0)
    hidden, weight, others, head = (torch.randn(n, HIDDEN) for n in (TOKENS, padded, TOKENS, padded))
    weight, head = weight * 0.3, head * 0.3  # so that no bin is so small that it is taken for larger
    return hidden.requires_grad_(), weight.requires_grad_(), others, head


@pytest.mark.parametrize("count", [1, 5, VOCAB])
@pytest.mark.parametrize("chunk_size", [None, 8])
def test_equals_the_definition(count: int, chunk_size: int | None) -> None:
    hidden, weight, others, head = made(32)
    want = expected(log_probs(hidden, weight), log_probs(others, head), count)
    ids, teacher = top_log_probs(others, head, count, **OPTIONS, chunk_size=chunk_size)
    top = log_probs(others, head).topk(count)
    assert torch.equal(ids, top.indices)
    torch.testing.assert_close(teacher.double(), top.values, rtol=0, atol=2e-6)
    found = reverse_kl(hidden, weight, ids, teacher, **OPTIONS, chunk_size=chunk_size)
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=2e-6)
    assert (found > 0).all()
    scale = torch.randn(TOKENS)
    got = torch.autograd.grad((found * scale).sum(), (hidden, weight))
    for one, two in zip(got, torch.autograd.grad((want * scale).sum(), (hidden, weight)), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=2e-5 * float(two.abs().max()))


def test_more_ids_tell_more_and_the_teacher_itself_nothing() -> None:
    hidden, weight, others, head = made(VOCAB)
    of_counts = [reverse_kl(hidden, weight, *top_log_probs(others, head, n, **OPTIONS), **OPTIONS) for n in (1, 8, 29)]
    assert (of_counts[0] < of_counts[1] + 1e-6).all()
    assert (of_counts[1] < of_counts[2] + 1e-6).all()
    itself = reverse_kl(hidden, weight, *top_log_probs(hidden.detach(), weight, 8, **OPTIONS), **OPTIONS)
    assert itself.abs().max() < 1e-6
    for gradient in torch.autograd.grad(itself.sum(), (hidden, weight)):
        assert gradient.abs().max() < 1e-5


def test_what_the_teacher_thinks_impossible_has_a_bound() -> None:
    hidden, weight = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True), torch.eye(3)
    ids, teacher = torch.tensor([[1]]), torch.zeros(1, 1)
    found = reverse_kl(hidden, weight, ids, teacher, vocab_size=3)
    assert found.tolist() == pytest.approx([4 * 2.302585])
    found.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("chunk_size", [None, 9])
@pytest.mark.parametrize(("ranks", "width"), [(2, 15), (4, 8), (3, 15)], ids=["even", "padded", "last-all-padding"])
def test_split_vocabulary(ranks: int, width: int, chunk_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, others, head = made(ranks * width)
    with torch.no_grad():
        weight[:width] *= 2  # so that the ranks' largest logits are far apart
    want = expected(log_probs(hidden, weight), log_probs(others, head), 20)
    scale = torch.randn(TOKENS)
    gradients = torch.autograd.grad((want * scale).sum(), (hidden, weight))
    group = Ranks(ranks, monkeypatch)

    def work(rank: int) -> Any:
        own = slice(rank * width, (rank + 1) * width)
        options = {**OPTIONS, "group": group, "chunk_size": chunk_size}
        top = top_log_probs(others, head[own], 20, **options)
        leaves = hidden.detach().requires_grad_(), weight.detach()[own].clone().requires_grad_()
        found = reverse_kl(*leaves, *top, **options)
        return found.detach(), torch.autograd.grad((found * scale).sum(), leaves)

    results = group.run(work)
    for found, _ in results:
        torch.testing.assert_close(found.double(), want.detach(), rtol=1e-5, atol=2e-6)
    parts, shards = zip(*(gradients for _, gradients in results), strict=True)
    for one, two in zip([sum(parts), torch.cat(shards)], gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=2e-5 * float(two.abs().max()))
