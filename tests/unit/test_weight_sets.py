"""Sets of weights that take turns in one model."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from slime.training.memory.weight_sets import CURRENT, REFERENCE, TEACHER, WeightSets

NUM_GPUS = 0


def model() -> torch.nn.Module:
    """Of several dtypes and shapes, a scalar and an empty tensor among them."""
    made = torch.nn.Module()
    for name, dtype, shape in (("a", torch.float32, (3, 5)), ("b", torch.bfloat16, (7,)), ("c", torch.float32, ())):
        setattr(made, name, torch.nn.Parameter(torch.randn(shape).to(dtype)))
    made.frozen = torch.nn.Parameter(torch.randn(2), requires_grad=False)
    made.register_buffer("mask", torch.tensor([True, False, True]))
    made.register_buffer("nothing", torch.empty(0))
    return made


def values(chunk: torch.nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in (*chunk.parameters(), *chunk.buffers())]


def change(chunk: torch.nn.Module) -> None:
    with torch.no_grad():
        for tensor in chunk.parameters():
            tensor += 1 + torch.rand_like(tensor)
        chunk.mask.logical_not_()


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_sets_take_turns() -> None:
    """The trained one goes on from where it was, the others are what they were kept as, however often they come."""
    chunks = [model(), model()]
    sets = WeightSets(chunks, CURRENT)
    reference = [values(chunk) for chunk in chunks]
    sets.keep(REFERENCE)
    sets.keep_loaded(TEACHER, lambda: [change(chunk) for chunk in chunks] and None)
    assert sets.current == CURRENT
    assert all(map(same, map(values, chunks), reference))
    with sets.switched(TEACHER):
        teacher = [values(chunk) for chunk in chunks]
    assert not any(map(same, teacher, reference))
    for _ in range(2):
        for chunk in chunks:
            change(chunk)
        trained = [values(chunk) for chunk in chunks]
        for name, expected in ((REFERENCE, reference), (TEACHER, teacher)):
            with sets.switched(name):
                assert all(map(same, map(values, chunks), expected))
                change(chunks[0])  # what a pass writes into a buffer, of a router for one, is of no set
            assert all(map(same, map(values, chunks), trained))


def test_a_set_is_one_piece_of_memory() -> None:
    chunks = [model()]
    sets = WeightSets(chunks, CURRENT)
    sets.keep(REFERENCE)
    copies = [copy for copy in sets._copies[REFERENCE] if copy.numel()]
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1
    places = sorted((copy.data_ptr(), copy.data_ptr() + copy.nbytes) for copy in copies)
    assert all(end <= start for (_, end), (start, _) in pairwise(places))


def test_frozen_parameters_are_in_no_set() -> None:
    chunks = [model()]
    sets = WeightSets(chunks, CURRENT, only_trained=True)
    sets.keep(REFERENCE)
    before = chunks[0].frozen.clone()
    change(chunks[0])
    frozen, trained = chunks[0].frozen.clone(), chunks[0].a.clone()
    with sets.switched(REFERENCE):
        assert torch.equal(chunks[0].frozen, frozen)
        assert not torch.equal(chunks[0].a, trained)
    assert torch.equal(chunks[0].a, trained)
    assert not torch.equal(frozen, before)


def test_a_set_that_never_was() -> None:
    sets = WeightSets([model()], CURRENT)
    with pytest.raises(KeyError, match="no weights named 'ref' were loaded, only \\['current'\\]"):
        sets.switch(REFERENCE)
    sets.keep(REFERENCE)
    sets.drop(REFERENCE)
    assert not sets.has(REFERENCE)
    with pytest.raises(KeyError):
        sets.switch(REFERENCE)


def test_a_dropped_set_leaves_its_memory_to_one_other() -> None:
    chunks = [model()]
    sets = WeightSets(chunks, CURRENT)
    sets.keep("v1")
    memory = sets._copies["v1"][0].data_ptr()
    sets.drop("v1")
    change(chunks[0])
    second = values(chunks[0])
    sets.keep("v2")
    change(chunks[0])
    sets.keep("v3")
    assert sets._copies["v2"][0].data_ptr() == memory
    assert sets._copies["v3"][0].data_ptr() != memory
    with sets.switched("v2"):
        assert same(values(chunks[0]), second)
