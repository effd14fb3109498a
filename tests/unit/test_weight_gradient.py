"""Gradients that products add to ``main_grad``, under the rule by which Megatron adds what autograd brings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slime.training.loss.divergence import reverse_kl
from slime.training.loss.log_probs import logits, token_terms
from slime.training.loss.weight_gradient import add_product

NUM_GPUS = 0
VOCAB, PADDED, HIDDEN, TOKENS = 29, 32, 11, 37
MICRO_BATCHES = 3


def trained_with_others(weight: Tensor) -> Any:
    """The weight as Megatron's data parallelism has it, its buffer dirty with a gradient of 1."""
    parameter: Any = torch.nn.Parameter(weight)
    parameter.main_grad = torch.ones(weight.shape, dtype=torch.float32)
    parameter.grad_added_to_main_grad = False
    parameter.came = 0

    def hook(own: Any) -> None:
        if not own.grad_added_to_main_grad or getattr(own, "zero_out_wgrad", False):
            own.main_grad.add_(own.grad)
        own.grad = None
        own.came += 1

    parameter.register_post_accumulate_grad_hook(hook)
    return parameter


def loss_of(kind: str, hidden: Tensor, weight: Tensor, labels: Tensor, upstream: Tensor, **options: Any) -> Tensor:
    if kind == "both, and logits":
        parts = (loss_of(each, hidden, weight, labels, upstream, **options) for each in ("log-probs", "reverse KL"))
        return sum(parts, logits(hidden, weight).square().mean())
    if kind == "log-probs":
        return (token_terms(hidden, weight, labels, vocab_size=VOCAB, **options)[0] * upstream).sum()
    ids, teacher = labels[:, None], torch.full((TOKENS, 1), -3.0)
    return (reverse_kl(hidden, weight, ids, teacher, vocab_size=VOCAB, **options) * upstream).sum()


@pytest.mark.parametrize("chunk_size", [None, 8])
@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
@pytest.mark.parametrize("kind", ["log-probs", "reverse KL", "both, and logits"])
def test_micro_batches_add_up_to_the_sum_of_their_gradients(kind: str, tied: bool, chunk_size: int | None) -> None:
    start = torch.randn(PADDED, HIDDEN) * 0.3
    with_buffer, plain = trained_with_others(start.clone()), torch.nn.Parameter(start.clone())
    if tied:
        with_buffer.zero_out_wgrad = True
    for _ in range(MICRO_BATCHES):
        hidden, labels, upstream = torch.randn(TOKENS, HIDDEN), torch.randint(0, VOCAB, (TOKENS,)), torch.randn(TOKENS)
        read, factors = torch.randint(0, VOCAB, (TOKENS,)), torch.randn(TOKENS, HIDDEN)
        for weight in (with_buffer, plain):
            states = hidden + torch.nn.functional.embedding(read, weight) * factors if tied else hidden
            loss_of(kind, states, weight, labels, upstream, chunk_size=chunk_size).backward()
    assert plain.grad is not None
    torch.testing.assert_close(with_buffer.main_grad, plain.grad + 1, rtol=0, atol=2e-5 * float(plain.grad.abs().max()))
    assert with_buffer.came == MICRO_BATCHES  # what overlaps reductions counts them


@pytest.mark.parametrize("buffer", [torch.float32, torch.float16])
def test_many_chunks_of_a_16_bit_weight_are_not_rounded_one_by_one(buffer: torch.dtype) -> None:
    """In float32 not at all; in 16 bits once a micro-batch, as what is added to the buffer."""
    weight = trained_with_others((torch.randn(PADDED, HIDDEN) * 0.3).half())
    weight.main_grad = torch.zeros(PADDED, HIDDEN, dtype=buffer)
    tokens = 2048
    hidden, labels, upstream = (
        torch.randn(tokens, HIDDEN).half(),
        torch.randint(0, VOCAB, (tokens,)),
        torch.randn(tokens),
    )
    loss = token_terms(hidden, weight, labels, vocab_size=VOCAB, chunk_size=4)[0] * upstream
    loss.sum().backward()
    exact = weight.detach().double().requires_grad_()
    every = torch.log_softmax(hidden.double() @ exact[:VOCAB].t(), dim=-1)
    (every.gather(1, labels[:, None])[:, 0] * upstream).sum().backward()
    assert exact.grad is not None
    error = float((weight.main_grad.double() - exact.grad).norm() / exact.grad.norm())
    assert error < 5e-4, "rounding each of 512 chunks to 16 bits makes it 2e-3"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_added_in_place(dtype: torch.dtype) -> None:
    total, left, right = torch.randn(5, 7), torch.randn(5, 3).to(dtype), torch.randn(3, 7).to(dtype)
    want = total.double() + left.double() @ right.double()
    where = total.data_ptr()
    add_product(total, left, right)
    torch.testing.assert_close(total.double(), want, rtol=0, atol=5e-2 if dtype == torch.bfloat16 else 1e-5)
    assert total.data_ptr() == where
