"""Which weights made which tokens: a version is the number of rollouts trained on.

``--mask-offpolicy-in-partial-rollout`` masks tokens of older weights.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable

from slime.data import Sample
from slime.data.source.rollout_context import current_rollout
from slime.rollout.runtime import pushed_version

MASKED_TOKENS = "rollout/offpolicy_tokens_masked"
OLDER_THAN_ANY = -1


def as_number(version: str) -> int:
    """A segment's version; `OLDER_THAN_ANY` of no number: a hook's, or "default" of an engine before the first push."""
    return int(version) if str(version).isdecimal() else OLDER_THAN_ANY


def versions(sample: Sample) -> list[int]:
    """Of the sample's segments, in order; without those that are no number."""
    return [number for number in map(as_number, sample.weight_versions or ()) if number != OLDER_THAN_ANY]


def oldest_version(samples: Iterable[Sample]) -> int | None:
    """The oldest weights that made any of their tokens; None where no sample tells."""
    return min((version for sample in samples for version in versions(sample)), default=None)


def staleness(sample: Sample, rollout_id: int) -> int | None:
    """``rollout_id`` less the oldest version; None where the sample has none. Rollout k trains weights of version k."""
    oldest = oldest_version([sample])
    return None if oldest is None else rollout_id - oldest


def newest_version(args: Namespace, rollout_id: int | None = None) -> int:
    """The newest weights at the engines while a rollout, by default the one under way, is collected: tokens of older
    ones are off-policy. The driver of train_async.py tells of its pushes; train.py pushes k before rollout k."""
    rollout_id = current_rollout() if rollout_id is None else rollout_id
    return pushed_version() if args.asynchronous or rollout_id is None else rollout_id


def note_version(sample: Sample, version: int, *, as_segment: bool = False) -> None:
    """Give a response that a user's function filled by hand, and so has no versions, this one; ``as_segment`` as that
    of all tokens there are, so that those to come are told from them."""
    if sample.response_length and not sample.weight_versions:
        sample.weight_versions = [str(version)]
        if as_segment:
            sample.segment_starts, sample.segment_lengths = [0], [sample.response_length]


def mask_older_tokens(samples: Iterable[Sample], version: int) -> int:
    """Take tokens that weights older than ``version`` generated out of the loss; how many that are.

    A token whose weights are not known, as where a hook wrote the versions by hand, counts as made by the sample's
    oldest. A version that is not a number is older than any; in a sample that has no other, nothing is masked.
    """
    masked = 0
    for sample in samples:
        oldest = min(map(as_number, sample.weight_versions), default=version)
        if oldest < version and versions(sample):
            before = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
            made = (oldest if by is None else as_number(by) for by in sample.token_versions())
            sample.loss_mask = [0 if by < version else mask for by, mask in zip(made, before, strict=True)]
            masked += sum(before) - sum(sample.loss_mask)
    return masked
