"""What becomes of groups that are too old to be trained, and how old a rollout is."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import numpy as np

from slime.data import Sample
from slime.data.sample import begun_anew
from slime.data.source.data_source import RolloutDataSource
from slime.data.source.prompts import count_dropped, draw_groups
from slime.rollout.base_types import flatten_samples
from slime.rollout.engine.versions import as_number, staleness, versions
from slime.rollout.sglang_rollout import generate_groups


def renew_stale(
    args: Namespace, rollout_id: int, samples: list[Sample], source: Any
) -> tuple[list[Sample], dict[str, float]]:
    """The samples to train on, and counts of groups that were ``regenerated`` and ``dropped`` as a sample of theirs was
    staler than ``--max-weight-staleness``, under the engines' present weights.

    slime's own rollout begins when the engines' weights are new enough, and is only too stale where it goes on with
    responses of earlier ones; a rollout function that keeps a pool of samples may be. What the data source has handed
    out is generated anew, by slime's own rollout; any other group is dropped and a new one generated in its place.
    """
    too_old = [s for s in samples if (staleness(s, rollout_id) or 0) > args.max_weight_staleness]
    stale = {sample.group_index for sample in too_old}
    handed_out = map(source.as_handed_out, stale) if isinstance(source, RolloutDataSource) else ()
    anew = [begun_anew(group) for group in handed_out if group is not None]
    known = {group[0].group_index for group in anew}
    for unknown in stale - known:
        count_dropped(source, [sample for sample in samples if sample.group_index == unknown], "stale")
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


def staleness_metrics(rollout_id: int, samples: list[Sample]) -> dict[str, float]:
    """Of samples that have versions: how stale they are, and how many of their tokens older weights generated."""
    ages = [age for sample in samples if (age := staleness(sample, rollout_id)) is not None]
    if not ages:
        return {}
    return {
        "rollout/weight_staleness_mean": float(np.mean(ages)),
        "rollout/weight_staleness_max": float(max(ages)),
        "rollout/older_version_tokens": float(sum(_older_tokens(sample, rollout_id) for sample in samples)),
        "rollout/multi_version_samples": float(sum(len(set(versions(sample))) > 1 for sample in samples)),
    }


def _older_tokens(sample: Sample, rollout_id: int) -> int:
    if len(sample.segment_lengths) != len(sample.weight_versions):
        return 0  # a hook wrote the versions by itself
    parts = zip(sample.weight_versions, sample.segment_lengths, strict=True)
    return sum(length for version, length in parts if as_number(version) < rollout_id)
