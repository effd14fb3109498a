"""The deadline of a rollout: it runs for the one that is first in line, and stands still for those behind it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class _Clock:
    """What is left of a deadline, on the running event loop."""

    def __init__(self, rank: int, seconds: float | None, limit: asyncio.Timeout) -> None:
        self.rank = rank
        self._left, self._limit = seconds, limit
        self._since: float | None = None
        """When it began to run, unless it stands."""

    def run(self, runs: bool) -> None:
        """Run on, or stand still."""
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
        """`asyncio.timeout` that counts only the time in which nobody of a smaller rank is in line.

        Requests of older rollouts, and of evaluations before these, get their places first: how long a rollout waits
        behind them says nothing of itself. Each of them has a deadline, so that the time in line is bounded as well.

        Args:
            seconds: None for who keeps its deadline by itself, and is in line for others to see.
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
