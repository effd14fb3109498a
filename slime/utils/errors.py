"""Errors whose message is the whole story: users see it without a traceback."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable

_SHOWN = 3


class SlimeError(Exception):
    """Base class: the message alone tells a user what failed, where, and with which flag to help it."""

    exit_status = 1
    """Of a program that it ends."""


class BadInputError(SlimeError, ValueError):
    """Something that was given to us, a file, a row, a flag or what a hook returned, cannot be used."""

    exit_status = 2


class SettingError(BadInputError):
    """The run's settings cannot be right for any sample: no further try can mend it, so that it ends the run."""


class DeadlineError(SlimeError, TimeoutError):
    """A deadline passed; the message names who was waited for, and the deadline's flag."""


class CancelledRolloutError(SlimeError):
    """Whoever asked for a rollout or an evaluation has had it cancelled."""


class HookError(SlimeError):
    """A user's function failed; the message names its flag and path, and holds its own traceback."""


class CommandError(SlimeError, subprocess.CalledProcessError):
    """A command ended with another status than 0; the message says which, without its secrets."""

    def __init__(self, message: str, status: int, command: str, output: str | None = None, errors: str | None = None):
        """``status`` is its exit status, or the number of the signal that ended it, below 0; ``command`` as it may be
        shown; ``output`` and ``errors`` what it printed, where that was kept."""
        super().__init__(status, command, output, errors)
        self.message = message

    def __str__(self) -> str:
        return self.message


def abbreviate(names: Iterable[str]) -> str:
    """The first few of many names, sorted, for a message."""
    several = sorted(names)
    shown = ", ".join(several[:_SHOWN])
    return f"{shown} and {len(several) - _SHOWN} more" if len(several) > _SHOWN else shown
