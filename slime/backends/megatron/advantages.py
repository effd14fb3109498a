"""The advantages of a rollout: micro-batches become padded responses, go through an estimator, and back."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime.algorithms.advantages import gae, group_relative, reinforce_plus_plus, whiten, whitening_sums
from slime.algorithms.losses import kl_estimate
from slime.backends.megatron.batch import MicroBatch, known_columns
from slime.utils.misc import load_function
from slime.utils.types import TrainBatch


@dataclass(frozen=True)
class Padded:
    """Responses of all micro-batches, one a row, as [R, N] tensors."""

    lengths: Tensor
    """int64 [R]"""
    mask: Tensor
    """float32 [R, N]"""
    rewards: Tensor
    """float32 [R]"""
    kl: Tensor | None
    values: Tensor | None


Estimator = Callable[[Namespace, Padded], tuple[Tensor, Tensor | None]]


def _group_relative(args: Namespace, inputs: Padded) -> tuple[Tensor, None]:
    return group_relative(inputs.rewards, inputs.mask, inputs.kl, args.kl_coef), None


def _reinforce_plus_plus(args: Namespace, inputs: Padded) -> tuple[Tensor, None]:
    advantages = reinforce_plus_plus(inputs.rewards, inputs.mask, inputs.kl, kl_coef=args.kl_coef, gamma=args.gamma)
    return advantages, None


def _ppo(args: Namespace, inputs: Padded) -> tuple[Tensor, Tensor]:
    assert inputs.values is not None
    discounts = {"kl_coef": args.kl_coef, "gamma": args.gamma, "lambd": args.lambd}
    return gae(inputs.rewards, inputs.values, inputs.mask, inputs.kl, **discounts)


ESTIMATORS: dict[str, Estimator] = {
    "grpo": _group_relative,
    "gspo": _group_relative,
    "cispo": _group_relative,
    "rloo": _group_relative,
    "reinforce_plus_plus_baseline": _group_relative,
    "reinforce_plus_plus": _reinforce_plus_plus,
    "ppo": _ppo,
}


def set_advantages(
    args: Namespace, batch: TrainBatch, micro_batches: list[MicroBatch], group: dist.ProcessGroup | None
) -> None:
    """Fill ``advantages``, and with a critic ``returns``, of every micro-batch of a rollout; last pipeline stage only.

    Collective over data- and context-parallel ranks. Whole responses are put together first, so that no estimator
    knows of context parallelism.

    Args:
        batch: this data-parallel rank's rows.
        micro_batches: with the log-probs and values that the estimator needs.
        group: the data-parallel ranks, over which advantages are whitened.
    """
    lengths = torch.cat([m.responses.lengths for m in micro_batches])
    device = micro_batches[0].mask.device

    def padded(name: str) -> Tensor:
        return _pad(torch.cat([m.responses.gather(getattr(m, name)) for m in micro_batches]), lengths)

    kl = None
    if args.kl_coef != 0:
        kl = kl_estimate(padded("old_log_probs"), padded("ref_log_probs"), args.kl_loss_type)
    rows = np.concatenate([m.rows for m in micro_batches])
    inputs = Padded(
        lengths=lengths,
        mask=padded("mask"),
        rewards=torch.from_numpy(batch.rewards[rows]).to(device),
        kl=kl,
        values=padded("values") if args.use_critic else None,
    )
    if args.custom_advantage_function_path is not None:
        advantages, returns = _custom(args, batch, rows, micro_batches, inputs)
    else:
        advantages, returns = ESTIMATORS[args.advantage_estimator](args, inputs)
    if args.normalize_advantages:
        sums = whitening_sums(advantages, inputs.mask)
        if group is not None and group.size() > 1:
            dist.all_reduce(sums, group=group)
        advantages = whiten(advantages, inputs.mask, sums)
    _put(micro_batches, "advantages", advantages, lengths)
    if returns is not None:
        _put(micro_batches, "returns", returns, lengths)


def _custom(
    args: Namespace, batch: TrainBatch, rows: np.ndarray, micro_batches: list[MicroBatch], inputs: Padded
) -> tuple[Tensor, Tensor | None]:
    """Advantages of ``--custom-advantage-function-path``, which gets and sets lists with one tensor a sample.

    They are this data-parallel rank's samples, any part of a group: statistics over groups are in their ``rewards``,
    which the data side has made of all samples of the rollout.
    """
    flag, path = "--custom-advantage-function-path", args.custom_advantage_function_path
    lengths = inputs.lengths.tolist()
    data: dict[str, Any] = {
        "tokens": [torch.from_numpy(batch.tokens[row].astype(np.int64)) for row in rows.tolist()],
        "total_lengths": batch.tokens.lengths[rows].tolist(),
        "response_lengths": lengths,
        "loss_masks": _unpad(inputs.mask, inputs.lengths),
        "rewards": batch.rewards[rows].tolist(),
        "raw_reward": batch.raw_rewards[rows].tolist(),
        "rollout_ids": batch.rollout_ids[rows].tolist(),
        "group_indices": batch.group_indices[rows].tolist(),
    }
    data |= known_columns(micro_batches)
    load_function(path, flag=flag)(args, data)
    results: list[Tensor | None] = []
    for key in ("advantages", "returns"):
        rows_of_key = data.get(key)
        if key == "returns" and rows_of_key is None and not args.use_critic:
            results.append(None)
            continue
        tensors = [torch.as_tensor(row).to(inputs.mask) for row in rows_of_key or []]
        if [list(row.shape) for row in tensors] != [[length] for length in lengths]:
            got = "nothing" if rows_of_key is None else f"shapes {[tuple(row.shape) for row in tensors][:8]}"
            raise ValueError(
                f"{flag} {path}: rollout_data[{key!r}] must be a list with one tensor a sample, of the lengths of "
                f"its response ({lengths[:8]}...); it has {got}"
            )
        results.append(_pad(torch.cat(tensors), inputs.lengths))
    assert results[0] is not None
    return results[0], results[1]


def _valid(lengths: Tensor) -> Tensor:
    return torch.arange(int(lengths.max())) < lengths[:, None]


def _pad(flat: Tensor, lengths: Tensor) -> Tensor:
    """Response vectors as [R, N], 0 behind each response."""
    valid = _valid(lengths).to(flat.device)
    return flat.new_zeros(valid.shape).masked_scatter(valid, flat)


def _unpad(padded: Tensor, lengths: Tensor) -> list[Tensor]:
    return [row[:length] for row, length in zip(padded, lengths.tolist(), strict=True)]


def _put(micro_batches: list[MicroBatch], name: str, padded: Tensor, lengths: Tensor) -> None:
    flat = padded[_valid(lengths).to(padded.device)]
    for micro_batch, part in zip(
        micro_batches, flat.split([int(m.responses.lengths.sum()) for m in micro_batches]), strict=True
    ):
        setattr(micro_batch, name, micro_batch.responses.scatter(part))
