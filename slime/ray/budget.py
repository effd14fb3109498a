"""How often what was lost may be started again, and after which pause."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable

_HOUR_S = 3600.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 60.0


class Budget:
    """How often each of several may be started again within an hour."""

    def __init__(self, limit: int, clock: Callable[[], float] | None = None) -> None:
        self.limit, self._clock = limit, clock or time.monotonic
        self._taken: defaultdict[str, deque[float]] = defaultdict(deque)

    def take(self, name: str) -> bool:
        """Whether it may be started once more; then that is counted."""
        taken, now = self._taken[name], self._clock()
        while taken and taken[0] <= now - _HOUR_S:
            taken.popleft()
        if len(taken) >= self.limit:
            return False
        taken.append(now)
        return True


def pause_before(attempt: int) -> float:
    """Seconds to wait before the n-th start in a row that failed so far, from 0; the first one waits for nothing."""
    return min(_FIRST_PAUSE_S * 2 ** (attempt - 1), _LONGEST_PAUSE_S) if attempt else 0.0
