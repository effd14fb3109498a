"""What all rollouts under way and evaluations share: the bound on requests in flight, and the pause for a push."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator
from weakref import WeakKeyDictionary

from slime.rollout.versions import note_push

FIRST = -1
"""The rank of an evaluation, which the trainer waits for: before that of any rollout."""


class Gate:
    """Lets so many in at a time; whoever waits gets in by rank, those of one rank in the order of their coming.

    A rank is a pair: of the rollout, and of the group within it.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._inside = 0
        self._waiting: list[tuple[tuple[int, int], int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    def set_capacity(self, capacity: int) -> None:
        """Let so many in from now on; those inside stay, also where they are more."""
        self._capacity = capacity
        self._admit()

    @contextlib.asynccontextmanager
    async def passing(self, rank: tuple[int, int]) -> AsyncIterator[None]:
        """Wait for a place, and keep it until the end of the block."""
        await self._enter(rank)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, rank: tuple[int, int]) -> None:
        if self._inside < self._capacity:
            self._inside += 1
            return
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (rank, next(self._arrivals), turn))
        try:
            await turn
        except asyncio.CancelledError:
            # It may have been given a place in the moment in which it was cancelled.
            if turn.done() and not turn.cancelled():
                self._leave()
            raise

    def _leave(self) -> None:
        self._inside -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._inside < self._capacity:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                self._inside += 1


_gates: WeakKeyDictionary[asyncio.AbstractEventLoop, Gate] = WeakKeyDictionary()


def shared_gate(capacity: int) -> Gate:
    """The running event loop's one gate, which has this capacity from now on."""
    gate = _gates.setdefault(asyncio.get_running_loop(), Gate(capacity))
    gate.set_capacity(capacity)
    return gate


_doors: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Event] = WeakKeyDictionary()


def _door() -> asyncio.Event:
    """Of the running event loop; open while it is set, as it is at first."""
    loop = asyncio.get_running_loop()
    if loop not in _doors:
        _doors[loop] = asyncio.Event()
        _doors[loop].set()
    return _doors[loop]


async def hold_requests(hold: bool, version: int | None = None) -> None:
    """Keep new requests from the engines while weights are pushed, or let them go on, under weights of ``version``.

    Engines hold them back as well, but a request that reaches SGLang 0.5.17 while it waits for the running ones to
    leave is turned away in the end, and makes it wait for another second.
    """
    if hold:
        _door().clear()
    else:
        if version is not None:
            await note_push(version)
        _door().set()


async def may_request() -> None:
    """Wait while requests are held: as long as a push takes, which has a deadline and whose failure ends the run."""
    await _door().wait()
