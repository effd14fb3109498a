"""Which groups of the buffer are handed out again, for ``--buffer-filter-path``.

A filter takes what it returns out of ``buffer``; what it takes out besides is thrown away, and counted as dropped.
"""

from __future__ import annotations

from argparse import Namespace

from slime.data import Group
from slime.data.sample import begun_anew
from slime.data.source.data_source import pop_first
from slime.rollout.engine.versions import oldest_version
from slime.rollout.runtime import pushed_version

__all__ = ["pop_first", "pop_fresh", "pop_longest"]

_NOT_BEGUN = float("inf")


def pop_longest(args: Namespace, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    """Those with the most tokens generated first: they need the least to be finished, or the longest to go on."""
    buffer.sort(key=lambda group: -sum(sample.response_length for sample in group))
    return pop_first(args, rollout_id, buffer, num_samples)


def pop_fresh(args: Namespace, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    """Groups that were begun first, those of the newest weights before others; in train_async.py groups that are older
    than ``--max-weight-staleness`` begin anew, before they cost an engine more time."""
    present = pushed_version() if rollout_id is None else rollout_id
    for group in buffer if args.asynchronous else []:
        if present - _oldest_version(group) > args.max_weight_staleness:
            group[:] = begun_anew(group)
    begun = [group for group in buffer if _oldest_version(group) < _NOT_BEGUN]
    begun.sort(key=lambda group: -_oldest_version(group))
    buffer[:] = begun + [group for group in buffer if _oldest_version(group) == _NOT_BEGUN]
    return pop_first(args, rollout_id, buffer, num_samples)


def _oldest_version(group: Group) -> float:
    found = oldest_version(group)
    return _NOT_BEGUN if found is None else found
