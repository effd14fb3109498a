"""Telling of samples that failed without flooding the console: a bug of a hook is the same in every one of them."""

from __future__ import annotations

import logging
from collections import Counter

logger = logging.getLogger(__name__)

_SHOWN = 4
"""Messages of one kind that have a line each where they differ; then only `should_log` decides."""
_COUNTED = 8
"""Failures of one kind that are told of by their number."""


def should_log(count: int) -> bool:
    """Whether the ``count``-th time of something is told of: at powers of two, so that it floods nothing."""
    return count & (count - 1) == 0


class FailureLog:
    """Warns of failures: the first of a kind in full, other messages in a line, and of many how many they are."""

    def __init__(self) -> None:
        self._count: Counter[tuple[str, str, str]] = Counter()
        self._heads: dict[tuple[str, str, str], set[str]] = {}

    def warn(self, what: str, reason: str, error: Exception) -> None:
        """Warn of a failed try, or only count it.

        Args:
            what: sample and try.
            reason: by which failures are counted in metrics.
            error: whose message is the story, the traceback of a user's function included.
        """
        message = str(error)
        head = message.splitlines()[0] if message else ""
        where = head.partition(" raised ")[0] if " raised " in head else ""
        kind = (reason, where, type(error.__cause__ or error).__name__)
        self._count[kind] += 1
        count = self._count[kind]
        heads = self._heads.setdefault(kind, set())
        if count == 1:
            logger.warning("%s: %s: %s", what, reason, message)
        elif head not in heads and len(heads) < _SHOWN:
            logger.warning("%s: %s: %s", what, reason, head)
        elif count >= _COUNTED and should_log(count):
            logger.warning("%s: %s by the same kind of error as above, in %d tries by now", what, reason, count)
        if len(heads) < _SHOWN:
            heads.add(head)
