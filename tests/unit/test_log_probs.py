"""Log-probs and entropy against softmax in float64, forward and backward, in chunks and over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slime.training.loss.log_probs import token_terms
from tests.rank_threads import Ranks

NUM_GPUS = 0
VOCAB, HIDDEN = 29, 11


def expected(
    hidden: Tensor, weight: Tensor, labels: Tensor, vocab_size: int, temperature: float
) -> tuple[Tensor, Tensor]:
    every = torch.log_softmax(hidden @ weight[:vocab_size].t() / temperature, dim=-1)
    return every.gather(1, labels[:, None])[:, 0], -(every.exp() * every).sum(-1)


class Case:
    """Random tokens; ``upstream`` are the gradients of log-probs and of entropies."""

    def __init__(self, tokens: int, padded: int, temperature: float, dtype: torch.dtype = torch.float32) -> None:
        self.hidden = torch.randn(tokens, HIDDEN).to(dtype).requires_grad_()
        self.weight = torch.randn(padded, HIDDEN).to(dtype).requires_grad_()
        self.labels = torch.randint(0, VOCAB, (tokens,))
        self.upstream = torch.randn(2, tokens)
        self.options: dict[str, Any] = {"vocab_size": VOCAB, "temperature": temperature}

    def expected(self) -> tuple[list[Tensor], list[Tensor]]:
        hidden, weight = (t.detach().double().requires_grad_() for t in (self.hidden, self.weight))
        values = expected(hidden, weight, self.labels, VOCAB, self.options["temperature"])
        return self.close(values, hidden, weight)

    def got(self, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
        values = token_terms(self.hidden, self.weight, self.labels, **self.options, **options)
        return self.close(values, self.hidden, self.weight)

    def close(self, values: tuple[Tensor, Tensor], *leaves: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Values and gradients."""
        total = sum(((v * u).sum() for v, u in zip(values, self.upstream, strict=True)), torch.zeros(()))
        return [v.detach() for v in values], list(torch.autograd.grad(total, leaves))


def assert_close(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    """Within ``tolerance`` of each tensor's largest entry; a tiny one is what cancellation left of terms near 1."""
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), two, rtol=0, atol=tolerance * max(float(two.abs().max()), 0.1))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("padded", [VOCAB, 32])
@pytest.mark.parametrize(("tokens", "chunk_size"), [(37, None), (37, 1), (37, 8), (37, 37), (37, 100), (36, 9), (1, 4)])
def test_equals_softmax(tokens: int, chunk_size: int | None, padded: int, temperature: float) -> None:
    case = Case(tokens, padded, temperature)
    for of_log_prob, of_entropy in [(1.0, 0.0), (0.0, 1.0), (1.0, -0.3)]:
        case.upstream = torch.randn(2, tokens) * torch.tensor([[of_log_prob], [of_entropy]])
        values, gradients = case.got(chunk_size=chunk_size, wants_entropy_gradient=True)
        want_values, want_gradients = case.expected()
        assert_close(values, want_values, 2e-5)
        assert_close(gradients, want_gradients, 2e-5)
        assert gradients[1][VOCAB:].count_nonzero() == 0


@pytest.mark.parametrize("chunk_size", [None, 10])
def test_entropy_without_gradient(chunk_size: int | None) -> None:
    case = Case(37, 32, 0.7)
    log_probs, entropy = token_terms(case.hidden, case.weight, case.labels, **case.options, chunk_size=chunk_size)
    assert log_probs.requires_grad
    assert not entropy.requires_grad
    case.upstream[1] = 0
    assert_close(case.got(chunk_size=chunk_size)[1], case.expected()[1], 2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_size", [None, 8])
def test_same_bits_with_and_without_gradient(chunk_size: int | None, dtype: torch.dtype) -> None:
    case = Case(37, 32, 0.9, dtype)
    passes = [case.got(chunk_size=chunk_size, wants_entropy_gradient=True)[0]]
    # What Float16Module returns, and what a log-prob pass computes from it.
    passes.append([t.detach() for t in token_terms(*inputs(case), **case.options, chunk_size=chunk_size)])
    with torch.no_grad():
        passes.append(list(token_terms(*inputs(case), **case.options, chunk_size=chunk_size)))
    for other in passes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(passes[0], other, strict=True))


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    return case.hidden.float(), case.weight, case.labels


@pytest.mark.parametrize("chunk_size", [None, 8])
def test_sixteen_bit_weights(chunk_size: int | None) -> None:
    case = Case(37, 32, 0.8, torch.bfloat16)
    values, gradients = case.got(chunk_size=chunk_size, wants_entropy_gradient=True)
    assert [t.dtype for t in values + gradients] == [torch.float32] * 2 + [torch.bfloat16] * 2
    want_values, want_gradients = case.expected()
    assert_close(values, want_values, 2e-2)
    assert_close(gradients, want_gradients, 4e-2)


def test_frozen_weight_or_hidden() -> None:
    case = Case(20, 32, 1.0)
    both = case.got(chunk_size=6)[1]
    for frozen, other, gradient in ((case.weight, case.hidden, both[0]), (case.hidden, case.weight, both[1])):
        frozen.requires_grad_(False)
        log_probs, _ = token_terms(case.hidden, case.weight, case.labels, **case.options, chunk_size=6)
        assert torch.equal(torch.autograd.grad(log_probs, other, case.upstream[0])[0], gradient)
        frozen.requires_grad_(True)


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]], requires_grad=True)
    labels = torch.tensor([1, 0])
    log_probs, entropy = token_terms(hidden, torch.eye(3), labels, vocab_size=3, wants_entropy_gradient=True)
    torch.testing.assert_close(log_probs, torch.tensor([-2e4, -torch.tensor(3.0).log()]))
    torch.testing.assert_close(entropy, torch.tensor([0.0, torch.tensor(3.0).log()]))
    (log_probs + entropy).sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("chunk_size", [0, -1])
def test_impossible_chunk_size(chunk_size: int) -> None:
    with pytest.raises(ValueError, match=f"chunk_size is {chunk_size}"):
        Case(3, VOCAB, 1.0).got(chunk_size=chunk_size)


@pytest.mark.parametrize("chunk_size", [None, 9])
@pytest.mark.parametrize(("ranks", "width"), [(2, 15), (4, 8), (3, 15)], ids=["even", "padded", "last-all-padding"])
def test_split_vocabulary(ranks: int, width: int, chunk_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Ranks(ranks, monkeypatch)
    case = Case(37, ranks * width, 0.7)
    with torch.no_grad():
        case.weight[:width] *= 3  # so that the ranks' largest logits are far apart
    want_values, (want_hidden, want_weight) = case.expected()

    def work(rank: int) -> Any:
        hidden = case.hidden.detach().requires_grad_()
        shard = case.weight.detach()[rank * width : (rank + 1) * width].clone().requires_grad_()
        options = {**case.options, "group": group, "chunk_size": chunk_size, "wants_entropy_gradient": True}
        return case.close(token_terms(hidden, shard, case.labels, **options), hidden, shard)

    results = group.run(work)
    for values, _ in results:
        assert_close(values, want_values, 2e-5)
    parts, shards = zip(*(gradients for _, gradients in results), strict=True)
    assert_close([sum(parts, torch.zeros(())), torch.cat(shards)], [want_hidden, want_weight], 2e-5)
