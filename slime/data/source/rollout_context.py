"""Which rollout the running code belongs to: several may be under way at the same time."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar

from slime.utils.user_functions import setting

_current: ContextVar[int | None] = ContextVar("rollout_id", default=None)


def rollout_context(rollout_id: int) -> contextlib.AbstractContextManager[None]:
    """Within the block, and in coroutines and hook threads that it starts, `current_rollout` is ``rollout_id``."""
    return setting(_current, rollout_id)


def current_rollout() -> int | None:
    """The rollout that asks; None outside of one, as in threads that a user's code keeps of its own."""
    return _current.get()
