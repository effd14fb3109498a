"""A data-parallel rank's samples as users see them: lists with one entry a sample, under upstream's names."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime.data import OptimizerStep, TrainBatch
from slime.data.columns import LOSS_MASK, METADATA
from slime.files.safe_dump import save_safe
from slime.training.micro_batch import MicroBatch
from slime.training.parallel import gathered
from slime.utils.errors import BadInputError
from slime.utils.user_functions import call_user_function


def rollout_data(micro_batches: list[MicroBatch]) -> dict[str, Any]:
    """The samples in the order of the micro-batches, with whole responses under every layout.

    Collective over the context-parallel ranks.
    """
    return {
        "total_lengths": [length for m in micro_batches for length in m.lengths],
        "response_lengths": [length for m in micro_batches for length in m.response_lengths],
    } | known_columns(micro_batches)


def known_columns(micro_batches: Sequence[MicroBatch], without: Container[str] = ()) -> dict[str, list[Any]]:
    """What is known of every sample, under the names for users' functions, in lists with an entry a sample.

    Of columns with an entry a token that is a tensor with those of the sample's response, or of all its tokens, under
    every layout; columns ``without`` are left out. Collective over the context-parallel ranks.
    """
    data: dict[str, list[Any]] = {}
    for column in micro_batches[0].columns:
        if column.shown and column.name not in without:
            parts = [micro_batch.whole(column) for micro_batch in micro_batches]
            if parts[0] is not None:
                data[column.name_for_users] = [entry for part in parts for entry in part or []]
    return data


def response_rows(data: Mapping[str, Any], key: str, lengths: list[int], like: Tensor, where: str) -> list[Tensor]:
    """``data[key]``, after a user's function, as one tensor of ``like``'s type and device a sample; BadInputError where
    it is not one value for every token of every response."""
    rows = data.get(key)
    try:
        tensors = [torch.as_tensor(row).to(like) for row in rows or []]
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInputError(f"{where}: rollout_data[{key!r}] is not made of numbers: {error}") from error
    if [list(row.shape) for row in tensors] != [[length] for length in lengths]:
        got = "nothing" if rows is None else f"shapes {[tuple(row.shape) for row in tensors][:8]}"
        raise BadInputError(
            f"{where}: rollout_data[{key!r}] must be a list with one tensor a sample, of the lengths of its response "
            f"({lengths[:8]}...); it has {got}"
        )
    return tensors


def postprocess(
    args: Namespace,
    rollout_id: int,
    batch: TrainBatch,
    micro_batches: list[MicroBatch],
    group: dist.ProcessGroup | None,
) -> None:
    """Let ``--rollout-data-postprocess-path`` change a rollout's per-token columns, which are then trained on.

    Last pipeline stage only, where these columns are; collective over the data- and context-parallel ranks, of which
    ``group`` has the former. BadInputError where it changed a length or what is for reading only, HookError where it
    raised.
    """
    flag, path = "--rollout-data-postprocess-path", args.rollout_data_postprocess_path
    where, data = f"{flag} {path}", rollout_data(micro_batches)
    changeable = {column.name_for_users: column for column in micro_batches[0].columns if column.changeable}
    lengths, before = data["response_lengths"][:], _to_read(data, changeable)
    call_user_function(flag, path, {"args": args, "rollout_id": rollout_id, "rollout_data": data})
    for key, values in before.items():
        if not _same(values, data.get(key)):
            raise BadInputError(
                f"{where}: it changed rollout_data[{key!r}], which is not used again: change {', '.join(changeable)}"
            )
    for key, column in changeable.items():
        if key not in data and column.name != LOSS_MASK:
            continue
        changed = torch.cat(response_rows(data, key, lengths, micro_batches[0].mask, where))
        if column.name != LOSS_MASK:
            for m, part in response_parts(micro_batches, changed):
                _set_responses(m, column.name, part)
            continue
        if not ((changed == 0) | (changed == 1)).all():
            raise BadInputError(f"{where}: rollout_data[{key!r}] must be of 0 and 1")
        for m, part in response_parts(micro_batches, changed):
            m.set_mask(part)
    weigh(batch, micro_batches, group)


def weigh(batch: TrainBatch, micro_batches: list[MicroBatch], group: dist.ProcessGroup | None) -> None:
    """Weigh tokens in the loss by the denominators that the batch came with, in means by those of the present masks.

    These differ where a user's function has changed masks or given the ``rollout_mask_sums``. Last pipeline stage only;
    collective over the data-parallel ranks.
    """
    for m, sums, step in zip(micro_batches, *_trained(batch, micro_batches, group), strict=True):
        m.set_weights(batch.rollout_mask_sums[m.rows], sums, step)


def _trained(
    batch: TrainBatch, micro_batches: list[MicroBatch], group: dist.ProcessGroup | None
) -> tuple[list[np.ndarray], list[OptimizerStep]]:
    """What the masks of all ranks make of each micro-batch's ``rollout_mask_sums`` and of its step."""
    numbers: dict[int, int] = {}
    steps = [numbers.setdefault(id(m.step), len(numbers)) for m in micro_batches]
    rollouts = [
        [(step, rollout) for rollout in batch.rollout_ids[m.rows].tolist()]
        for m, step in zip(micro_batches, steps, strict=True)
    ]
    own: Counter[tuple[int, int]] = Counter()
    for m, keys in zip(micro_batches, rollouts, strict=True):
        for key, count in zip(keys, m.row_counts.tolist(), strict=True):
            own[key] += int(count)
    total: Counter[tuple[int, int]] = sum(
        gathered(own, group), Counter()
    )  # without rollouts that have no trained token
    counted = [[n for (step, _), n in total.items() if step == number] for number in range(len(numbers))]
    return (
        [np.array([total[key] for key in keys], dtype=np.int64) for keys in rollouts],
        [
            replace(m.step, num_tokens=sum(counted[step]), num_trained_rollouts=len(counted[step]))
            for m, step in zip(micro_batches, steps, strict=True)
        ],
    )


def response_parts(micro_batches: list[MicroBatch], values: Tensor) -> zip[tuple[MicroBatch, Tensor]]:
    """Each micro-batch with its part of a vector of all response tokens."""
    sizes = [sum(m.response_lengths) for m in micro_batches]
    return zip(micro_batches, values.split(sizes), strict=True)


def _set_responses(micro_batch: MicroBatch, name: str, values: Tensor) -> None:
    """Set a column at the response tokens; at others, log-probs stay what a pass made of them."""
    before, column = micro_batch.get(name), micro_batch.responses.scatter(values)
    if before is not None:
        is_response = micro_batch.responses.scatter(torch.ones_like(values)) != 0
        column = torch.where(is_response, column, before)
    micro_batch.put(name, column)


def _to_read(data: dict[str, Any], changeable: Container[str]) -> dict[str, list[Any]]:
    """Copies of the columns that changes would be lost in; metadata is the user's own."""
    kept = {key: values for key, values in data.items() if key not in changeable and key != METADATA}
    return {key: [v.clone() if isinstance(v, Tensor) else v for v in values] for key, values in kept.items()}


def _same(before: list[Any], after: Any) -> bool:
    if not isinstance(after, (list, tuple)) or len(after) != len(before):
        return False
    return all(_equal(a, b) for a, b in zip(before, after, strict=True))


def _equal(before: Any, after: Any) -> bool:
    """What is not a number is the same as another such."""
    if isinstance(before, Tensor):
        other = torch.as_tensor(after).to(before.device)
        if before.shape != other.shape or before.dtype != other.dtype:
            return False
        return bool(((before == other) | ((before != before) & (other != other))).all())
    return bool(before == after) or (before != before and after != after)


def save_train_data(
    args: Namespace,
    rollout_id: int,
    packed: list[list[MicroBatch]],
    ranks: Mapping[str, int],
) -> None:
    """Write ``--save-debug-train-data``: what this rank is about to train on.

    ``samples`` are the lists of `rollout_data`; each of ``steps`` has its denominators and, a list a micro-batch, the
    positions of its samples in these lists. Ranks before the last pipeline stage have no log-probs or advantages.
    """
    steps, position = [], 0
    for micro_batches in packed:
        members = []
        for m in micro_batches:
            members.append(list(range(position, position + len(m.rows))))
            position += len(m.rows)
        step = micro_batches[0].step
        steps.append({"num_rollouts": step.num_rollouts, "num_tokens": step.num_tokens, "micro_batches": members})
    samples = rollout_data([m for micro_batches in packed for m in micro_batches])
    content = {"rollout_id": rollout_id, **ranks, "samples": samples, "steps": steps}
    path = args.save_debug_train_data.format(rollout_id=rollout_id, rank=dist.get_rank())
    save_safe(Path(path), content, "--save-debug-train-data")
