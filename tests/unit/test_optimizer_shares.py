"""Who has what of a parameter that a distributed optimizer cuts; its layouts are in tests/parallel/test_shares.py."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from slime.backends.megatron.weights.optimizer_shares import Piece, pieces_of, shared_out

NUM_GPUS = 0


def buffer_of(buckets: list[tuple[int, int]], places: Mapping[Any, tuple[int, int, int]]) -> SimpleNamespace:
    """A gradient buffer: of buckets their beginning and length, of parameters their beginning, end and bucket."""
    made = [SimpleNamespace(offset=start, grad_data=torch.empty(length)) for start, length in buckets]
    return SimpleNamespace(buckets=made, param_index_map=places)


def test_who_has_what_of_buckets_that_end_in_padding() -> None:
    """Two buckets of 12, of four ranks three elements each: 10 and 5 of these are parameters."""
    found = pieces_of(
        buffer_of([(0, 12), (12, 12)], {"a": (0, 2, 0), "b": (2, 10, 0), "c": (12, 16, 1), "d": (16, 17, 1)}), 4
    )
    assert found == {
        "a": [Piece(0, 0, 2)],
        "b": [Piece(0, 0, 1), Piece(1, 1, 4), Piece(2, 4, 7), Piece(3, 7, 8)],
        "c": [Piece(0, 0, 3), Piece(1, 3, 4)],
        "d": [Piece(1, 0, 1)],
    }
    assert list(found) == ["a", "b", "c", "d"]


def test_a_parameter_ends_where_a_share_does() -> None:
    found = pieces_of(buffer_of([(8, 8)], {"a": (8, 12, 0), "b": (12, 16, 0)}), 2)
    assert found == {"a": [Piece(0, 0, 4)], "b": [Piece(1, 0, 4)]}


def test_who_stores() -> None:
    """Of the holders the one that stores the least until then, and of those the one that has the most."""
    parameters = [torch.nn.Parameter(torch.empty(size)) for size in (5, 7)]
    places = dict(zip(parameters, [(0, 5, 0), (5, 12, 0)], strict=True))
    assert [shared.storer for shared in shared_out([buffer_of([(0, 12)], places)], 3)] == [0, 2]


def test_buckets_that_all_have_a_share_of_are_stored_in_turns() -> None:
    """As with --overlap-grad-reduce, where a large matrix is a bucket of its own."""
    parameters = [torch.nn.Parameter(torch.empty(8)) for _ in range(8)]
    places = {parameter: (8 * i, 8 * i + 8, i) for i, parameter in enumerate(parameters)}
    buffer = buffer_of([(8 * i, 8) for i in range(8)], places)
    found = shared_out([buffer], 4)
    assert [shared.storer for shared in found] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert all(len(shared.pieces) == 4 for shared in found)
    assert [shared.parameter is parameter for shared, parameter in zip(found, parameters, strict=True)] == [True] * 8
