"""Which weights generated a sample, and which the engines have: a version is the number of rollouts trained on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from slime.data import Sample

OLDER_THAN_ANY = -1


def as_number(version: str) -> int:
    """A version of a segment; `OLDER_THAN_ANY` of one that is no number.

    A hook may write such a one, and an engine says "default" until weights have been pushed to it.
    """
    return int(version) if str(version).isdecimal() else OLDER_THAN_ANY


def versions(sample: Sample) -> list[int]:
    """Of the sample's segments, in order; without those that are no number."""
    return [number for number in map(as_number, sample.weight_versions) if number != OLDER_THAN_ANY]


def staleness(sample: Sample, rollout_id: int) -> int | None:
    """``rollout_id`` less the oldest version, of a sample that this rollout trains on; None where it has no versions.

    Rollout k is trained by weights of version k.
    """
    found = versions(sample)
    return rollout_id - min(found) if found else None


_pushed = 0
_listeners: list[Callable[[], Awaitable[None]]] = []


async def note_push(version: int) -> None:
    """Weights of ``version`` are at the engines, and those that asked for it are told so."""
    global _pushed
    _pushed = version
    for listener in _listeners:
        await listener()


def pushed_version() -> int:
    """The newest weights at the engines, where the driver tells: that of train_async.py does."""
    return _pushed


def on_push(listener: Callable[[], Awaitable[None]]) -> None:
    """Have ``listener`` called, on the event loop of rollouts, after every push."""
    _listeners.append(listener)


def forget_listener(listener: Callable[[], Awaitable[None]]) -> None:
    """Take back `on_push`."""
    _listeners.remove(listener)
