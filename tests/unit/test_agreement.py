"""What ranks tell each other of a push, with threads for ranks and a store in memory."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from slime.backends.sglang.client import EngineError
from slime.weights import agreement
from slime.weights.agreement import Agreement, OtherRankError

NUM_GPUS = 0

RANKS = 3
Ranks = list[Agreement]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    return store


@pytest.fixture
def ranks(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    made = []
    for rank in range(RANKS):
        monkeypatch.setattr(agreement, "_numbers", itertools.count())  # each is the first of its process
        made.append(Agreement(rank, RANKS))
    for each in made:
        each.begin()
    return made


def together(ranks: Ranks, call: Callable[[Agreement], object]) -> list[object]:
    """What the call returned or raised, of each rank."""

    def caught(each: Agreement) -> object:
        try:
            return call(each)
        except EngineError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(caught, ranks))


def test_ranks_agree_that_all_is_well(ranks: Ranks) -> None:
    for _ in range(3):
        assert together(ranks, lambda each: each.settle(None, 60)) == [None] * RANKS


def test_the_first_rank_knows_what_each_has_said_beside(ranks: Ranks) -> None:
    for push in range(3):
        assert together(ranks, lambda each: each.settle(None, 60)) == [None] * RANKS
        together(ranks, lambda each, push=push: each.settle(None, 60, f"{push} of {each._rank}"))  # type: ignore[misc]
        assert ranks[0].words == {rank: f"{push} of {rank}" for rank in range(RANKS)}
        for each in ranks:
            each.begin()
    assert [each.words for each in ranks[1:]] == [{}, {}]


@pytest.mark.parametrize("failing", range(RANKS))
def test_every_rank_hears_of_a_failure(ranks: Ranks, failing: int) -> None:
    own = ValueError("no room")
    found = together(ranks, lambda each: each.settle(own if each is ranks[failing] else None, 60))
    assert found.pop(failing) is own
    assert [(type(each), str(each)) for each in found] == [(OtherRankError, "no room")] * (RANKS - 1)


@pytest.mark.parametrize("missing", range(RANKS))
def test_a_rank_that_says_nothing_is_named_at_the_deadline(ranks: Ranks, missing: int) -> None:
    others = [each for rank, each in enumerate(ranks) if rank != missing]
    started = time.monotonic()
    found = together(others, lambda each: each.settle(None, 1.0 if each is ranks[0] else 2.0))
    assert time.monotonic() - started < 30
    # Where rank 0 is there, it is the first to give up, and the others are then left to their own deadline.
    assert str(found[0]) == f"no word within {1 if missing else 2} s from training rank {missing}"
    assert all(isinstance(each, EngineError) for each in found)


@pytest.mark.parametrize("failing", range(RANKS))
def test_a_rank_that_leaves_says_why(ranks: Ranks, failing: int) -> None:
    ranks[failing].tell(RuntimeError("the gather failed"))
    others = [each for rank, each in enumerate(ranks) if rank != failing]
    assert [str(each) for each in together(others, lambda each: each.settle(None, 60))] == ["the gather failed"] * 2
    for each in ranks:
        each.begin()
    assert together(ranks, lambda each: each.settle(None, 60)) == [None] * RANKS, "the next push starts afresh"


def test_nothing_is_left_of_pushes_that_are_over(ranks: Ranks, store: dist.TCPStore) -> None:
    counts = []
    for _ in range(5):
        together(ranks, lambda each: each.settle(None, 60))
        counts.append(store.num_keys())
        for each in ranks:
            each.begin()
    assert len(set(counts[1:])) == 1
