"""Rollouts written to files, and read back to be trained on again."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.data import Sample
from slime.files.safe_dump import load_safe, save_safe
from slime.options.debug import kept_groups
from slime.utils.errors import BadInputError


def save_samples(args: Namespace, rollout_id: int, samples: list[Sample]) -> None:
    """Write ``--save-debug-rollout-data``."""
    content = {"rollout_id": rollout_id, "samples": [sample.to_dict() for sample in samples]}
    path = Path(args.save_debug_rollout_data.format(rollout_id=rollout_id))
    save_safe(path, content, "--save-debug-rollout-data")


class _OfEvaluation(int):
    """A number that a template of file names is filled with as ``eval_7``."""

    def __format__(self, spec: str) -> str:
        return f"eval_{int(self):{spec}}"


def save_evaluation(args: Namespace, rollout_id: int, data: dict[str, Any]) -> None:
    """Write the samples of an evaluation, ``data`` of `RolloutFnEvalOutput`, as `save_samples` does those of a rollout:
    ``eval_7`` is its id after 7 rollouts, ``metadata["eval_dataset"]`` a sample's dataset, and groups are numbered
    through all of them. No file where a user's function gave no samples."""
    entries: list[dict[str, Any]] = []
    for name, result in data.items():
        groups = 1 + max((entry["group_index"] or 0 for entry in entries), default=-1)
        for sample in (isinstance(result, Mapping) and result.get("samples")) or ():
            if isinstance(sample, Sample):
                entry = sample.to_dict()
                index = groups + (entry["group_index"] or 0)
                metadata = (entry["metadata"] or {}) | {"eval_dataset": name}
                entries.append(entry | {"group_index": index, "metadata": metadata})
    if entries:
        path = Path(args.save_debug_rollout_data.format(rollout_id=_OfEvaluation(rollout_id)))
        save_safe(path, {"rollout_id": f"eval_{rollout_id}", "samples": entries}, "--save-debug-rollout-data")


def check_recorded(args: Namespace) -> None:
    """Raise BadInputError unless a replay's rollouts are there; of a resumed one, wherever it goes on, the last."""
    last = args.num_rollout - 1
    first = last if args.load is not None else args.start_rollout_id or 0
    for rollout_id in range(max(first, 0), args.num_rollout):
        path = Path(args.load_debug_rollout_data.format(rollout_id=rollout_id))
        if not os.path.isfile(path):
            raise BadInputError(
                f"--load-debug-rollout-data: there is no file {path} for rollout {rollout_id}, counted from 0, of "
                f"--num-rollout {args.num_rollout}"
            )


def load_samples(args: Namespace, rollout_id: int) -> list[Sample]:
    """A rollout of ``--load-debug-rollout-data``, of each of its groups all samples or none; BadInputError without."""
    flag = "--load-debug-rollout-data"
    path = Path(args.load_debug_rollout_data.format(rollout_id=rollout_id))
    content = load_safe(path, f"{flag}, rollout {rollout_id}")
    try:
        samples = [Sample.from_dict(entry) for entry in content["samples"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadInputError(
            f"{flag}: {path} holds no samples as --save-debug-rollout-data writes them: {error!r}"
        ) from error
    if not samples:
        raise BadInputError(f"{flag}: {path} has no samples in it")
    share = args.load_debug_rollout_data_subsample
    if share is None:
        return samples
    groups = list(dict.fromkeys(sample.group_index for sample in samples))
    kept = {groups[position] for position in kept_groups(len(groups), share)}
    return [sample for sample in samples if sample.group_index in kept]
