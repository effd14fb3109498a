"""How many requests this process sent, and how often it sent one again, by server and cause."""

from __future__ import annotations

import threading
from collections import Counter

_lock = threading.Lock()
_sent: Counter[str] = Counter()
_resent: dict[str, Counter[str]] = {}


def count_request(origin: str) -> None:
    """One request to the server at ``origin``, however often it is sent."""
    with _lock:
        _sent[origin] += 1


def count_resend(origin: str, cause: str) -> None:
    """One further try, because of ``cause``, a word for the name of a metric."""
    with _lock:
        _resent.setdefault(origin, Counter())[cause] += 1


def take_counts(origin: str) -> tuple[int, Counter[str]]:
    """The requests to ``origin`` since the last call, and the further tries by cause."""
    with _lock:
        return _sent.pop(origin, 0), _resent.pop(origin, Counter())
