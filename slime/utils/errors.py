"""Errors whose message is the whole story: users see it without a traceback."""

from __future__ import annotations

from collections.abc import Iterable

_SHOWN = 3


class SlimeError(Exception):
    """Base class: the message alone tells a user what failed, where, and with which flag to help it."""


class BadInputError(SlimeError, ValueError):
    """Something that was given to us, a file, a row, a flag or what a hook returned, cannot be used."""


class SettingError(BadInputError):
    """The run's settings cannot be right for any sample: no further try can mend it, so that it ends the run."""


class DeadlineError(SlimeError, TimeoutError):
    """A deadline passed; the message names who was waited for, and the deadline's flag."""


class HookError(SlimeError):
    """A user's function failed; the message names its flag and path, and holds its own traceback."""


def some(names: Iterable[str]) -> str:
    """The first few of many names, sorted, for a message."""
    several = sorted(names)
    shown = ", ".join(several[:_SHOWN])
    return f"{shown} and {len(several) - _SHOWN} more" if len(several) > _SHOWN else shown
