"""How old the weights are that generated a rollout, and what becomes of groups that are too old to be trained.

A weight version is the number of rollouts that the weights were trained on, and rollout k is trained by those of
version k: the *staleness* of a sample is k less the oldest version among its segments.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import numpy as np

from slime.rollout.base_types import flatten_samples
from slime.rollout.data_source import RolloutDataSource
from slime.rollout.prompts import draw_groups
from slime.rollout.sglang_rollout import generate_groups
from slime.utils.types import Group, Sample


def staleness(sample: Sample, rollout_id: int) -> int | None:
    """Of a sample that rollout ``rollout_id`` trains on; None where it has no versions."""
    versions = _versions(sample)
    return rollout_id - min(versions) if versions else None


def _versions(sample: Sample) -> list[int]:
    return [int(version) for version in sample.weight_versions if version.isdigit()]


def renew_stale(
    args: Namespace, rollout_id: int, samples: list[Sample], source: Any
) -> tuple[list[Sample], dict[str, float]]:
    """Replace groups with a sample that is staler than ``--max-weight-staleness``, under the engines' present weights.

    slime's own rollout is never too stale: it begins when the engines' weights are new enough. A rollout function that
    keeps a pool of samples may be. What the data source has handed out is generated anew, by slime's own rollout; any
    other group is dropped and a new one generated in its place.

    Returns:
        The samples to train on, and how many groups were ``regenerated`` and ``dropped``.
    """
    too_old = [s for s in samples if (staleness(s, rollout_id) or 0) > args.max_weight_staleness]
    stale = {sample.group_index for sample in too_old}
    anew = [group for index in stale if (group := _prompts(source, index)) is not None]
    counts = {
        "rollout/stale_groups_regenerated": float(len(anew)),
        "rollout/stale_groups_dropped": float(len(stale) - len(anew)),
    }
    if not stale:
        return samples, counts
    if len(anew) < len(stale):
        anew += draw_groups(args, source, len(stale) - len(anew))
    kept = [sample for sample in samples if sample.group_index not in stale]
    renewed = generate_groups(args, rollout_id, source, anew, wanted=len(anew))
    return kept + flatten_samples(renewed.samples), counts


def _prompts(source: Any, group_index: int | None) -> Group | None:
    """A group without responses; None where the data source does not have it in flight."""
    group = source.as_handed_out(group_index) if isinstance(source, RolloutDataSource) else None
    for sample in group or ():
        sample.reset_response()
    return group


def staleness_metrics(rollout_id: int, samples: list[Sample]) -> dict[str, float]:
    """Of samples that have versions: how stale they are, and how many of their tokens older weights generated."""
    ages = [age for sample in samples if (age := staleness(sample, rollout_id)) is not None]
    if not ages:
        return {}
    return {
        "rollout/weight_staleness_mean": float(np.mean(ages)),
        "rollout/weight_staleness_max": float(max(ages)),
        "rollout/older_version_tokens": float(sum(_older_tokens(sample, rollout_id) for sample in samples)),
        "rollout/multi_version_samples": float(sum(len(set(_versions(sample))) > 1 for sample in samples)),
    }


def _older_tokens(sample: Sample, rollout_id: int) -> int:
    if len(sample.segment_lengths) != len(sample.weight_versions):
        return 0  # a hook wrote the versions by itself
    parts = zip(sample.weight_versions, sample.segment_lengths, strict=True)
    return sum(length for version, length in parts if version.isdigit() and int(version) < rollout_id)
