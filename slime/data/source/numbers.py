"""The numbers by which slime keeps account of samples, which a user's function may read and not change.

``group_index`` says of which prompt a sample is: what is in flight, trained or dropped is counted by it. ``index``
names the sample in messages, dumps and seeds. ``rollout_id`` is the rollout that parts of a sample share, and whose
mean the loss takes: one that two samples share would make one rollout of them. A function can know none of them better,
so that a change is a slip, and is put back.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from slime.data import Group, Sample
from slime.utils.user_functions import is_first

logger = logging.getLogger(__name__)

_NAMES = ("group_index", "index", "rollout_id")
CHANGED = "number changed"
"""Of warnings of this, for `is_first`; then flag and path of the function, and the number's name."""

Numbers = tuple[Any, ...]
"""Values of the three, in their order."""


def numbers_of(sample: Sample) -> Numbers:
    """The numbers that a sample has now."""
    return tuple(getattr(sample, name) for name in _NAMES)


def fill_numbers(group: Group, next_group: Callable[[], int], next_sample: Callable[[], int]) -> bool:
    """Give a group and its samples the numbers that they lack; whether the group lacked its own."""
    lacked = any(sample.group_index is None for sample in group)
    if lacked:
        number = next_group()
        for sample in group:
            sample.group_index = number
    for sample in group:
        if sample.index is None:
            sample.index = next_sample()
        if sample.rollout_id is None:
            sample.rollout_id = sample.index
    return lacked


def restore(sample: Sample, numbers: Numbers, where: str) -> None:
    """Give a sample its numbers back where they have changed, and say once of each whose function (``where``) changed
    it. A new sample without numbers gets those of group and rollout; it has no index of its own."""
    for name, own in zip(_NAMES, numbers, strict=True):
        present = getattr(sample, name)
        if own is None or same(present, own) or (present is None and name == "index"):
            continue
        setattr(sample, name, own)
        if present is not None and is_first(CHANGED, where, name):
            logger.warning(
                "%s set %s of sample %s to %r: slime counts by it, and has put %r back; what is yours to note goes "
                "into Sample.metadata",
                *(where, name, numbers[_NAMES.index("index")], present, own),
            )


def same(present: Any, own: Any) -> bool:
    """Whether two numbers are one; what a function has set may be anything."""
    try:
        return present is own or bool(present == own)
    except ValueError:  # an array
        return False


@contextlib.contextmanager
def numbers_kept(samples: Iterable[Sample], where: str) -> Iterator[None]:
    """Within the block a user's function, of ``where``, sees these samples; whatever becomes of it, `restore`."""
    before = [(sample, numbers_of(sample)) for sample in samples]
    try:
        yield
    finally:
        for sample, numbers in before:
            restore(sample, numbers, where)
