"""Who comes first: the bound on requests in flight, the pause for a push, deadlines that stand still in line."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import threading
from collections.abc import AsyncIterator

FIRST = -1
"""The rank of an evaluation, which the trainer waits for: before that of any rollout."""


class Gate:
    """Lets so many in at a time; who waits gets in by rank (of the rollout, then the group), then by time of coming."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._inside = 0
        self._waiting: list[tuple[tuple[int, int], int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    def set_capacity(self, capacity: int) -> None:
        """Let so many in from now on; those inside stay, also where they are more."""
        self._capacity = capacity
        self._admit()

    async def enter(self, rank: tuple[int, int]) -> None:
        """Wait for a place, which is kept until `leave`."""
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
                self.leave()
            raise

    def leave(self) -> None:
        """Give one place to who is next."""
        self._inside -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._inside < self._capacity:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                self._inside += 1


class PauseSwitch:
    """While it is paused, requests wait, on whatever event loop. Any thread may pause and resume."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paused = False
        self._waiting: list[asyncio.Future[None]] = []

    def pause(self) -> None:
        """From now on everyone waits."""
        with self._lock:
            self._paused = True

    def resume(self) -> None:
        """Let everyone go on, in the order of their coming."""
        with self._lock:
            self._paused, waiting, self._waiting = False, self._waiting, []
        for turn in waiting:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                turn.get_loop().call_soon_threadsafe(_give, turn)

    async def wait_until_resumed(self) -> None:
        """Return at once unless it is paused."""
        while True:
            with self._lock:
                if not self._paused:
                    return
                turn = asyncio.get_running_loop().create_future()
                self._waiting.append(turn)
            await turn


def _give(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)


class _Clock:
    def __init__(self, rank: int, seconds: float | None, limit: asyncio.Timeout) -> None:
        self.rank = rank
        self._left, self._limit = seconds, limit
        self._since: float | None = None
        """When it began to run, unless it stands."""

    def run(self, runs: bool) -> None:
        if self._left is None or self._limit.expired() or runs == (self._since is not None):
            return
        now = asyncio.get_running_loop().time()
        if self._since is None:
            self._since = now
            self._limit.reschedule(now + self._left)
        else:
            self._left -= now - self._since
            self._since = None
            self._limit.reschedule(None)


class Line:
    """Those whose deadlines depend on each other, on one event loop."""

    def __init__(self) -> None:
        self._clocks: list[_Clock] = []

    def _arrange(self) -> None:
        first = min((clock.rank for clock in self._clocks), default=0)
        for clock in self._clocks:
            clock.run(clock.rank == first)

    @contextlib.asynccontextmanager
    async def waiting(self, rank: int, seconds: float | None) -> AsyncIterator[None]:
        """`asyncio.timeout` that counts only the time in which nobody of a smaller rank is in line; without ``seconds``
        for who keeps its deadline by itself, and is in line for others to see.

        Requests of older rollouts, and of evaluations before these, get their places first: how long a rollout waits
        behind them says nothing of itself. Each of them has a deadline, so that the time in line is bounded as well.
        """
        async with asyncio.timeout(None) as limit:
            clock = _Clock(rank, seconds, limit)
            self._clocks.append(clock)
            self._arrange()
            try:
                yield
            finally:
                self._clocks.remove(clock)
                self._arrange()
