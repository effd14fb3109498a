"""A token drawn from each row of logits, and its log-prob, in one pass over them.

The token is the one with the largest logit, divided by its temperature, less the logarithm of a number drawn from the
exponential distribution (the Gumbel-max trick, https://arxiv.org/abs/1611.01144, section 2); its log-prob needs the sum
of all exponentials besides.

Imported by servers on GPUs only: Triton is not installed elsewhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDTH = 4096
"""Logits that one block of threads goes through; a multiple of 4."""
_MOST_SEEDS = 2**31 - 1


@triton.jit
def _best_of_block(
    logits: tl.tensor,
    temperatures: tl.tensor,
    seed: tl.tensor,
    stream: tl.tensor,
    figures: tl.tensor,
    tokens: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    row, block, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    place = block * WIDTH + tl.arange(0, WIDTH)
    inside = place < vocabulary
    logit = tl.load(logits + row.to(tl.int64) * stride + place, inside, float("-inf")).to(tl.float32)
    logit /= tl.load(temperatures + row)
    top = tl.max(logit, 0)
    total = tl.sum(tl.exp(logit - tl.where(top > float("-inf"), top, 0.0)), 0)
    # Four numbers of 32 bits at a time, by the place, the row and the stream.
    quarter = block * (WIDTH // 4) + tl.arange(0, WIDTH // 4)
    zero = quarter * 0
    a, b, c, d = tl.philox(tl.load(seed).to(tl.uint64), quarter, zero + row, zero + stream, zero)
    bits = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), (WIDTH,))
    u = (bits.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2**-32
    u = tl.minimum(u, 0.99999994)  # 1 - 2**-24: the largest would be rounded to 1, and never chosen
    # -log(1 - u), in which small u, which decide for unlikely tokens, keep their digits.
    drawn = tl.where(u < 0.01, u * (1.0 + u * (0.5 + u * 0.33333334)), -tl.log(1.0 - u))
    # What is not a number is not chosen; the sum tells of it.
    score = tl.where(logit == logit, logit - tl.log(drawn), float("-inf"))
    best, at = tl.max(score, 0, return_indices=True)
    here = figures + (row * blocks + block) * 4
    tl.store(here, top)
    tl.store(here + 1, total)
    tl.store(here + 2, best)
    tl.store(here + 3, tl.max(tl.where(tl.arange(0, WIDTH) == at, logit, float("-inf")), 0))
    tl.store(tokens + row * blocks + block, tl.minimum(block * WIDTH + at, vocabulary - 1))


@triton.jit
def _best_of_row(
    figures: tl.tensor,
    tokens: tl.tensor,
    token: tl.tensor,
    log_prob: tl.tensor,
    is_sound: tl.tensor,
    blocks: tl.tensor,
    BLOCKS: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    inside = block < blocks
    here = figures + (row * blocks + block) * 4
    tops = tl.load(here, inside, float("-inf"))
    totals = tl.load(here + 1, inside, 0.0)
    top = tl.max(tops, 0)
    total = tl.sum(totals * tl.exp(tops - tl.where(top > float("-inf"), top, 0.0)), 0)
    _, winner = tl.max(tl.load(here + 2, inside, float("-inf")), 0, return_indices=True)
    logit = tl.load(figures + (row * blocks + winner) * 4 + 3)
    tl.store(token + row, tl.load(tokens + row * blocks + winner))
    tl.store(log_prob + row, tl.maximum(logit - top - tl.log(total), -3.4028234663852886e38))
    tl.store(is_sound + row, (total > 0.0) & (total < float("inf")))


def sample(logits: Tensor, temperatures: Tensor, stream: int = 0) -> tuple[Tensor, Tensor]:
    """A token of each row, drawn from the softmax of ``logits / temperatures``, and its log-prob: int32 and float32
    [rows]. Ranks whose generators of random numbers are in the same state draw the same in the same stream. A row that
    has a NaN, or in which nothing is allowed, is the device's error, as with `torch.multinomial`.

    Args:
        logits: [rows, vocabulary], the vocabulary next to each other; -inf for what is not allowed.
        temperatures: float32 [rows, 1], positive.
        stream: which of numbers that have nothing to do with each other.
    """
    rows, vocabulary = logits.shape
    where = logits.device
    token = torch.empty(rows, dtype=torch.int32, device=where)
    log_prob = torch.empty(rows, dtype=torch.float32, device=where)
    seed = torch.randint(_MOST_SEEDS, (1,), device=where)
    blocks = triton.cdiv(vocabulary, _WIDTH)
    figures = torch.empty(rows, blocks, 4, dtype=torch.float32, device=where)
    tokens = torch.empty(rows, blocks, dtype=torch.int32, device=where)
    is_sound = torch.ones(rows, dtype=torch.bool, device=where)
    if rows:
        temperatures = temperatures.contiguous()
        _best_of_block[(rows, blocks)](
            logits,
            temperatures,
            seed,
            stream,
            figures,
            tokens,
            logits.stride(0),
            vocabulary,
            WIDTH=_WIDTH,
            num_warps=8,
        )
        width = triton.next_power_of_2(blocks)
        _best_of_row[(rows,)](figures, tokens, token, log_prob, is_sound, blocks, BLOCKS=width)
    torch._assert_async(is_sound.all(), "logits to sample from have a NaN, or nothing that is allowed")
    return token, log_prob
