"""The user's own conversion of a rollout's samples: a dict of columns under upstream's names, checked and read."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.data import Sample, Status
from slime.data.columns import COLUMNS, ROUTES
from slime.data.source.numbers import numbers_kept
from slime.options.checks.hook_paths import columns_of
from slime.utils.errors import BadInputError
from slime.utils.misc import refusing
from slime.utils.user_functions import call_user_function

FLAG = "--custom-convert-samples-to-train-data-path"
REQUIRED = ("tokens", "response_lengths", "rewards", "raw_reward", "truncated", "sample_indices", "loss_masks")
OPTIONAL = ("rollout_ids", "rollout_mask_sums", "rollout_log_probs", "metadata")
"""The first two follow from the samples where they are missing."""
_RAGGED = ("tokens", "loss_masks", "rollout_log_probs")


@dataclass(frozen=True)
class Converted:
    """The rows as samples, and what does not follow from them."""

    samples: list[Sample]
    raw_rewards: list[float]
    rewards: list[float]
    rollout_mask_sums: list[int] | None


def convert(args: Namespace, samples: list[Sample]) -> Converted:
    """What ``--custom-convert-samples-to-train-data-path`` makes of the samples: any number of rows, in any order. A
    row belongs to the sample that ``sample_indices`` names, and has its group, rollout and segments. BadInputError
    where a key is missing or unknown, or a column has another length; HookError where it raised."""
    where = f"{FLAG} {args.custom_convert_samples_to_train_data_path}"
    with numbers_kept(samples, where):
        returned = call_user_function(
            FLAG, args.custom_convert_samples_to_train_data_path, {"args": args, "samples": samples}
        )
    declared = {column.name_for_users: column.name for column in columns_of(args) if column not in COLUMNS}
    columns = _columns(returned, tuple(declared), where)
    origins = _origins(columns["sample_indices"], samples, where)
    rows = []
    for row, origin in enumerate(origins):
        values = {name: column[row] for name, column in columns.items()}
        sample = _sample(values, samples[origin], f"{where}: row {row} (sample {values['sample_indices']})")
        own = {name: values[key] for key, name in declared.items() if key in values}
        routes = own.pop(ROUTES, None)
        same = sample.tokens == samples[origin].tokens
        sample.rollout_routed_experts = samples[origin].rollout_routed_experts if routes is None and same else routes
        sample.teacher_log_probs = samples[origin].teacher_log_probs if same else None
        sample.columns = samples[origin].columns | own
        rows.append(sample)
    sums = columns.get("rollout_mask_sums")
    if sums is not None:
        _check_sums(sums, rows, where)
    return Converted(rows, columns["raw_reward"], columns["rewards"], sums)


def _columns(returned: Any, declared: tuple[str, ...], where: str) -> dict[str, list[Any]]:
    """The dict's columns as lists of one length; of ``declared`` ones an entry may be an array."""
    if not isinstance(returned, Mapping):
        raise BadInputError(f"{where}: it must return a dict of columns, not {type(returned).__name__}")
    given = {name: column for name, column in returned.items() if column is not None}
    missing = [name for name in REQUIRED if name not in given]
    if missing:
        raise BadInputError(f"{where}: the dict lacks {', '.join(missing)}; it has {', '.join(map(str, given))}")
    known = (*REQUIRED, *OPTIONAL, *declared)
    unknown = [str(name) for name in given if name not in known]
    if unknown:
        raise BadInputError(
            f"{where}: nobody reads {', '.join(unknown)}; there are {', '.join(known)} (metadata, a "
            "dict a row, is for functions in the trainer)"
        )
    columns = {}
    for name, column in given.items():
        if name in declared:
            with refusing(f"{where}: {name}: going through it raised"):
                columns[name] = list(column)
        else:
            columns[name] = _list(column, f"{where}: {name}")
    rows = len(columns["tokens"])
    for name, column in columns.items():
        if len(column) != rows:
            raise BadInputError(f"{where}: {name} has {len(column)} entries for the {rows} rows of tokens")
        if name in _RAGGED:
            columns[name] = [None if row is None else _list(row, f"{where}: {name}") for row in column]
        elif name != "metadata" and name not in declared:
            with refusing(f"{where}: {name}: an entry of it raised"):
                columns[name] = [value.item() if hasattr(value, "item") else value for value in column]
    if not rows:
        raise BadInputError(f"{where}: the dict has no rows")
    return columns


def _list(values: Any, what: str) -> list[Any]:
    with refusing(f"{what} raised"):
        values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)):
        raise BadInputError(f"{what} must be of lists, arrays or tensors, not {type(values).__name__}")
    return list(values)


def _origins(indices: list[Any], samples: list[Sample], where: str) -> list[int]:
    """The position in ``samples`` of every row's own; parts of one rollout may share an index."""
    own = [position if sample.index is None else sample.index for position, sample in enumerate(samples)]
    if indices == own:
        return list(range(len(own)))
    positions = {index: position for position, index in reversed(list(enumerate(own)))}
    wrong = [index for index in indices if index not in positions]
    if wrong:
        raise BadInputError(f"{where}: sample_indices has {wrong[0]!r}, which is the index of none of the samples")
    return [positions[index] for index in indices]


def _sample(row: dict[str, Any], origin: Sample, where: str) -> Sample:
    length, mask, log_probs = row["response_lengths"], row["loss_masks"], row.get("rollout_log_probs")
    if row["tokens"] is None or not isinstance(length, int):
        raise BadInputError(f"{where}: tokens must be a list and response_lengths an int, not {length!r}")
    for name, column in (("loss_masks", mask), ("rollout_log_probs", log_probs)):
        if column is None and name == "loss_masks":
            raise BadInputError(f"{where}: it has no {name}")
        if column is not None and len(column) != length:
            raise BadInputError(f"{where}: {name} has {len(column)} entries for {length} response tokens")
    return Sample(
        group_index=origin.group_index,
        index=row["sample_indices"],
        rollout_id=row.get("rollout_ids", origin.rollout_id),
        tokens=row["tokens"],
        response_length=length,
        loss_mask=mask,
        rollout_log_probs=log_probs,
        status=Status.TRUNCATED if row["truncated"] else Status.COMPLETED,
        remove_sample=origin.remove_sample,
        train_metadata=row.get("metadata", origin.train_metadata),
        weight_versions=origin.weight_versions,
        segment_starts=origin.segment_starts,
        segment_lengths=origin.segment_lengths,
    )


def _check_sums(sums: list[Any], rows: list[Sample], where: str) -> None:
    for row, (total, sample) in enumerate(zip(sums, rows, strict=True)):
        if not isinstance(total, int) or total < (1 if any(sample.loss_mask or ()) else 0):
            raise BadInputError(
                f"{where}: row {row} (sample {sample.index}): rollout_mask_sums is {total!r}, and must be the number "
                "of trained tokens of its whole rollout"
            )
