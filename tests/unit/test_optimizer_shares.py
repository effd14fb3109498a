"""Who has what of a parameter that a distributed optimizer cuts; its layouts are in tests/parallel/test_shares.py."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from slime.backends.megatron.weights.checkpoint import unpin_mixed
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
    """The largest first: of its holders who stores the least until then, of those who has the most."""
    parameters = [torch.nn.Parameter(torch.empty(size)) for size in (5, 7)]
    places = dict(zip(parameters, [(0, 5, 0), (5, 12, 0)], strict=True))
    found = shared_out([buffer_of([(0, 12)], places)], 3)
    assert [shared.parameter is parameter for shared, parameter in zip(found, parameters, strict=True)] == [True] * 2
    assert [shared.storer for shared in found] == [0, 2]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("in_buckets", [False, True])
def test_each_rank_stores_about_its_share(ranks: int, in_buckets: bool) -> None:
    """Of a model whose embedding comes last, as gradients do, in one bucket or, as with --overlap-grad-reduce, in one
    for each large matrix, of which all ranks have a part."""
    sizes = [8000, *[4096, 1024, 256, 1024, 8, 12288, 12288, 8] * 24, 8000]
    parameters = [torch.nn.Parameter(torch.empty(size)) for size in sizes]
    starts = list(accumulate(sizes, initial=0))
    places = {
        parameter: (start, start + size, number if in_buckets else 0)
        for number, (parameter, start, size) in enumerate(zip(parameters, starts, sizes, strict=False))
    }
    buckets = list(zip(starts, sizes, strict=False)) if in_buckets else [(0, starts[-1])]
    stored = [0] * ranks
    for shared in shared_out([buffer_of(buckets, places)], ranks):
        stored[shared.storer] += shared.parameter.numel()
    assert sum(stored) == sum(sizes)
    assert max(stored) <= 1.05 * sum(sizes) / ranks + (0 if in_buckets else max(sizes))


def test_layers_that_are_stored_as_one_tensor_are_pinned_together_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned = [torch.tensor([1.0]), torch.tensor([2.0])]
    pageable = torch.tensor([3.0])
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: any(self is one for one in pinned))
    layers = [
        ShardedTensor.from_rank_offsets("layers", data, (0, number, 2), prepend_axis_num=1)
        for number, data in enumerate((pinned[0], pageable))
    ]
    alone = ShardedTensor.from_rank_offsets("alone", pinned[1])
    unpin_mixed({"optimizer": {0: layers[0], 1: layers[1], 2: alone}})
    assert not any(stored.data.is_pinned() for stored in layers)
    assert [float(stored.data) for stored in layers] == [1.0, 3.0]
    assert layers[1].data is pageable
    assert alone.data is pinned[1]
