"""Rollouts written to files, and read back to be trained on again."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from slime.options.debug import kept_groups
from slime.utils.errors import BadInputError
from slime.utils.plain import load_plain, save_plain
from slime.utils.types import Sample


def save_samples(args: Namespace, rollout_id: int, samples: list[Sample]) -> None:
    """Write ``--save-debug-rollout-data``."""
    content = {"rollout_id": rollout_id, "samples": [sample.to_dict() for sample in samples]}
    path = Path(args.save_debug_rollout_data.format(rollout_id=rollout_id))
    save_plain(path, content, "--save-debug-rollout-data")


def load_samples(args: Namespace, rollout_id: int) -> list[Sample]:
    """What ``--load-debug-rollout-data`` has of a rollout; of each of its groups all samples, or none.

    Raises:
        BadInputError: no such file, or no samples in it.
    """
    flag = "--load-debug-rollout-data"
    path = Path(args.load_debug_rollout_data.format(rollout_id=rollout_id))
    content = load_plain(path, f"{flag}, rollout {rollout_id}")
    try:
        samples = [Sample.from_dict(entry) for entry in content["samples"]]
    except (KeyError, TypeError, ValueError) as error:
        raise BadInputError(
            f"{flag}: {path} holds no samples as --save-debug-rollout-data writes them: {error!r}"
        ) from error
    share = args.load_debug_rollout_data_subsample
    if share is None:
        return samples
    groups = list(dict.fromkeys(sample.group_index for sample in samples))
    kept = {groups[position] for position in kept_groups(len(groups), share)}
    return [sample for sample in samples if sample.group_index in kept]
