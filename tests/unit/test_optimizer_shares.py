"""Who has what of a parameter that a distributed optimizer cuts; its layouts are in tests/parallel/test_shares.py."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from slime.backends.megatron.weights.optimizer_shares import Piece, _storer, pieces_of

NUM_GPUS = 0


def buffer_of(buckets: list[tuple[int, int]], places: dict[str, tuple[int, int, int]]) -> SimpleNamespace:
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


def test_who_has_the_most_stores_and_of_equals_the_first() -> None:
    assert _storer([Piece(0, 0, 1), Piece(1, 1, 4), Piece(2, 4, 7)]) == 1
