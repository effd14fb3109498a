"""From what each micro-batch reports to one dict of numbers a step, equal on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from slime.training.loss.token_loss import MAXIMUM


def step_metrics(reports: list[dict[str, Tensor]], counts: dict[str, float]) -> dict[str, float]:
    """Sums and maxima of the micro-batches over all ranks, and ``counts``, likewise summed.

    Args:
        reports: of `slime.training.loss.token_loss.reduce_tokens`, one a micro-batch; none before the last stage.
        counts: of this rank's rows, under names that no report has.
    """
    metrics = _reduce(reports, counts) if parallel_state.is_pipeline_last_stage() else {}
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        box = [metrics]
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(box, src=last, group=parallel_state.get_pipeline_model_parallel_group())
        metrics = box[0]
    return metrics


def _reduce(reports: list[dict[str, Tensor]], counts: dict[str, float]) -> dict[str, float]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    names = _names(reports, group)
    zero = torch.zeros_like(next(iter(reports[0].values())))
    table = torch.stack([torch.stack([report.get(name, zero) for name in names]) for report in reports])
    is_maximum = torch.tensor([name.startswith(MAXIMUM) for name in names], device=table.device)
    maxima = table.amax(0)
    # Context-parallel ranks share rows.
    own = [count * (parallel_state.get_context_parallel_rank() == 0) for count in counts.values()]
    sums = torch.cat([table.double().sum(0), torch.tensor(own, dtype=torch.float64, device=table.device)])
    if group.size() > 1:
        dist.all_reduce(sums, group=group)
        if is_maximum.any():
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
    sums[: len(names)] = torch.where(is_maximum, maxima.double(), sums[: len(names)])
    shown = [f"{name.removeprefix(MAXIMUM)}_max" if name.startswith(MAXIMUM) else name for name in names]
    return dict(zip([*shown, *counts], sums.tolist(), strict=True))


def _names(reports: list[dict[str, Tensor]], group: dist.ProcessGroup) -> list[str]:
    """Of all micro-batches of all ranks, in the same order on each: a user's loss may report what only some have."""
    names = dict.fromkeys(name for report in reports for name in report)
    of_ranks: list[Any] = [names]
    if group.size() > 1:
        of_ranks = [None] * group.size()
        dist.all_gather_object(of_ranks, names, group)
    return list(dict.fromkeys(name for each in of_ranks for name in each))
