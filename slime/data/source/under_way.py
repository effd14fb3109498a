"""Which rollout the running code belongs to: several may be under way at the same time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_current: ContextVar[int | None] = ContextVar("rollout_under_way", default=None)


@contextlib.contextmanager
def under_way(rollout_id: int) -> Iterator[None]:
    """Within the block, and in coroutines and hook threads that it starts, `current_rollout` is ``rollout_id``."""
    token = _current.set(rollout_id)
    try:
        yield
    finally:
        _current.reset(token)


def current_rollout() -> int | None:
    """The rollout that asks; None outside of one, as in threads that a user's code keeps of its own."""
    return _current.get()
