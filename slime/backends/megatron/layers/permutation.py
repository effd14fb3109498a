"""Tokens to the rows that experts compute and back: for `dispatch`, and in the place of two functions of Megatron's.

On a GPU Megatron's add up a token's experts by atomic additions, in an order that differs from run to run and rounding
after each: a second pass does not give the first one's log-probs, and the ratio of an on-policy step is not 1. Here
every token fetches its rows, in the order of experts, and rounds their sum once. Megatron's also wait for the device
to count rows whose number is known.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils
from torch import Tensor

from slime.backends.megatron import releases
from slime.utils import device

_megatron_permute, _megatron_unpermute = moe_utils.permute, moe_utils.unpermute


def permute(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: Any = None,
    fused: bool = False,
    drop_and_pad: bool = False,
    **padding: Any,
) -> tuple[Any, ...]:
    """A row for each expert of each token, sorted by expert; their probabilities, and of which token each is, and what
    the installed release returns besides.

    Args:
        tokens: [t, h]
        routing_map: bool [t, experts]; of every row equally many are set, unless tokens may be dropped.
        probs: [t, experts]
        num_out_tokens: how many are set in all; a tensor, or None, where that differs between tokens.
        padding: what a later release has for float8.
    """
    exact = isinstance(num_out_tokens, int) and num_out_tokens > 0
    if not exact or fused or drop_and_pad or probs is None or padding:
        own: tuple[Any, ...] = _megatron_permute(
            tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad, **padding
        )
        return own
    chosen = torch.nonzero_static(routing_map.t().reshape(-1), size=num_out_tokens)[:, 0]
    token_of_row: Any = chosen % len(tokens)
    # `unpermute` gets nothing else of what was found here.
    token_of_row.rows_of_token = token_of_row.argsort(stable=True).view(len(tokens), -1)
    rows = to_rows(tokens, token_of_row, token_of_row.rows_of_token)
    return releases.permuted(rows, probs.t().reshape(-1).gather(0, chosen), token_of_row)


def unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: torch.Size,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
    **padding: Any,
) -> Tensor:
    """The sum of each token's rows: [rows, h] and which token each is of, as `permute` has returned it -> [t, h]."""
    rows_of_token = getattr(sorted_indices, "rows_of_token", None)
    if rows_of_token is None or probs is not None:
        own = permuted_tokens, sorted_indices
        return _megatron_unpermute(*own, restore_shape, probs, routing_map, fused, drop_and_pad, **padding)
    return to_tokens(permuted_tokens, sorted_indices, rows_of_token)


def to_rows(tokens: Tensor, token_of_row: Tensor, rows_of_token: Tensor) -> Tensor:
    """A copy of its token for each row: [t, h] -> [rows, h]; the gradient of a token is the sum of its rows'.

    Args:
        token_of_row: int64 [rows]
        rows_of_token: int64 [t, k], in the order in which they are added up; -1 in the place of those that it lacks.
    """
    return _ToRows.apply(tokens, token_of_row, rows_of_token)


def to_tokens(rows: Tensor, token_of_row: Tensor, rows_of_token: Tensor) -> Tensor:
    """The sum of each token's rows, rounded once: [rows, h] -> [t, h]; the indices as for `to_rows`."""
    return _ToTokens.apply(rows, token_of_row, rows_of_token)


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, token_of_row: Tensor, rows_of_token: Tensor) -> Tensor:
        ctx.save_for_backward(rows_of_token)
        return tokens.index_select(0, token_of_row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (rows_of_token,) = ctx.saved_tensors
        return device.fused(_added)(grad, rows_of_token), None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, token_of_row: Tensor, rows_of_token: Tensor) -> Tensor:
        ctx.save_for_backward(token_of_row)
        return device.fused(_added)(rows, rows_of_token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (token_of_row,) = ctx.saved_tensors
        return grad.index_select(0, token_of_row), None, None


def _added(rows: Tensor, rows_of_token: Tensor) -> Tensor:
    """[rows, h] and [t, k] -> [t, h]; sums of 16-bit rows are float32."""
    wide = torch.promote_types(rows.dtype, torch.float32)

    def rows_number(i: int) -> Tensor:
        row = rows_of_token[:, i]
        return torch.where((row >= 0)[:, None], rows[row.clamp(min=0)], 0).to(wide)

    total = rows_number(0)
    for i in range(1, rows_of_token.size(1)):
        total = total + rows_number(i)
    return total.to(rows.dtype)
