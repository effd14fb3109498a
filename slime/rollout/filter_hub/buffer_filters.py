"""Which groups of the buffer are handed out again, for ``--buffer-filter-path``.

A filter takes what it returns out of ``buffer``; what it takes out besides is thrown away, and counted as dropped.
"""

from __future__ import annotations

from argparse import Namespace

from slime.rollout.versions import versions
from slime.utils.types import Group, Sample


def pop_first(args: Namespace, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    """First in, first out."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


def pop_longest(args: Namespace, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    """Those with the most tokens generated first: they need the least to be finished, or the longest to go on."""
    buffer.sort(key=lambda group: -sum(sample.response_length for sample in group))
    return pop_first(args, rollout_id, buffer, num_samples)


def pop_fresh(args: Namespace, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    """The newest weights first; groups begun more than ``--max-weight-staleness`` rollouts ago start anew."""
    for group in buffer:
        oldest = min((_oldest_version(sample) for sample in group), default=0)
        if rollout_id is not None and rollout_id - oldest > args.max_weight_staleness:
            for sample in group:
                sample.reset_response()
    buffer.sort(key=lambda group: -min(_oldest_version(sample) for sample in group))
    return pop_first(args, rollout_id, buffer, num_samples)


def _oldest_version(sample: Sample) -> float:
    return min(versions(sample), default=float("inf"))
