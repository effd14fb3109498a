"""The advantages of a rollout: micro-batches become padded responses, go through an estimator, and back."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime.algorithms.advantages import distilled, gae, group_relative, reinforce_plus_plus, whiten, whitening_sums
from slime.algorithms.losses import kl_estimate
from slime.data import TrainBatch
from slime.data.columns import LOSS_MASK
from slime.training.micro_batch import MicroBatch
from slime.training.rollout_data import response_parts, response_rows, rollout_data
from slime.utils.device import from_host
from slime.utils.user_functions import call_user_function


@dataclass(frozen=True)
class Padded:
    """Responses of all micro-batches, one a row, as [R, N] tensors."""

    lengths: Tensor
    """int64 [R]"""
    valid: Tensor
    """bool [R, N], true but behind a response's end."""
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
    lengths = torch.tensor([length for m in micro_batches for length in m.response_lengths])
    device = micro_batches[0].mask.device
    valid = from_host(torch.arange(int(lengths.max())) < lengths[:, None], device)

    def padded(name: str) -> Tensor:
        return _pad(torch.cat([m.responses.gather(cast(Tensor, m.get(name))) for m in micro_batches]), valid)

    kl = None
    if args.kl_coef != 0:
        kl = kl_estimate(padded("old_log_probs"), padded("ref_log_probs"), args.kl_loss_type)
    rows = np.concatenate([m.rows for m in micro_batches])
    inputs = Padded(
        lengths=lengths,
        valid=valid,
        mask=padded(LOSS_MASK),
        rewards=from_host(torch.from_numpy(batch.rewards[rows]), device),
        kl=kl,
        values=padded("values") if args.use_critic else None,
    )
    if args.custom_advantage_function_path is not None:
        advantages, returns = _custom(args, micro_batches, inputs)
    else:
        advantages, returns = ESTIMATORS[args.advantage_estimator](args, inputs)
    if args.use_opd and not args.opd_top_k:  # which is in the loss
        advantages = distilled(advantages, inputs.mask, _reverse_kl(args, micro_batches, padded), args.opd_kl_coef)
    if args.normalize_advantages:
        sums = whitening_sums(advantages, inputs.mask)
        if group is not None and group.size() > 1:
            dist.all_reduce(sums, group=group)
        advantages = whiten(advantages, inputs.mask, sums)
    for name, values in (("advantages", advantages), ("returns", returns)):
        for m, part in response_parts(micro_batches, values[valid]) if values is not None else ():
            m.put(name, m.responses.scatter(part))


def _reverse_kl(args: Namespace, micro_batches: list[MicroBatch], padded: Callable[[str], Tensor]) -> Tensor:
    """The student's log-probs less the teacher's, which becomes a column, too. [R, N]."""
    student = "rollout_log_probs" if args.use_rollout_logprobs else "old_log_probs"
    for m in micro_batches:
        m.opd_reverse_kl = cast(Tensor, m.get(student)) - m.teacher_log_probs
    return padded("opd_reverse_kl")


def _custom(args: Namespace, micro_batches: list[MicroBatch], inputs: Padded) -> tuple[Tensor, Tensor | None]:
    """Advantages of ``--custom-advantage-function-path``, which gets and sets lists with one tensor a sample.

    They are this data-parallel rank's samples, any part of a group: statistics over groups are in their ``rewards``,
    which the data side has made of all samples of the rollout.
    """
    flag, path = "--custom-advantage-function-path", args.custom_advantage_function_path
    lengths = inputs.lengths.tolist()
    data = rollout_data(micro_batches)
    call_user_function(flag, path, {"args": args, "rollout_data": data})
    results: list[Tensor | None] = []
    for key in ("advantages", "returns"):
        if key == "returns" and data.get(key) is None and not args.use_critic:
            results.append(None)
            continue
        rows = response_rows(data, key, lengths, inputs.mask, f"{flag} {path}")
        results.append(_pad(torch.cat(rows), inputs.valid))
    assert results[0] is not None
    return results[0], results[1]


def _pad(flat: Tensor, valid: Tensor) -> Tensor:
    """Response vectors as [R, N], 0 behind each response."""
    return flat.new_zeros(valid.shape).masked_scatter(valid, flat)
