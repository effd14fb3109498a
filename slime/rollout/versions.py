"""Which weights generated a sample, and which the engines have: a version is the number of rollouts trained on."""

from __future__ import annotations

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
