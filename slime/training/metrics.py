"""From what each micro-batch reports to one dict of numbers a step, equal on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.training.loss.token_loss import MAXIMUM
from slime.training.parallel import Parallel, Ranks


def step_metrics(reports: list[dict[str, Tensor]], counts: dict[str, float], parallel: Parallel) -> dict[str, float]:
    """Sums and maxima of the micro-batches over all ranks, and ``counts``, likewise summed.

    Args:
        reports: of `slime.training.loss.token_loss.reduce_tokens`, one a micro-batch; none before the last stage.
        counts: of this rank's rows, under names that no report has.
    """
    metrics = _reduce(reports, counts, parallel) if parallel.is_last_stage else {}
    if parallel.pp.size > 1:
        box = [metrics]
        dist.broadcast_object_list(box, group_src=parallel.pp.size - 1, group=parallel.pp.group)
        metrics = box[0]
    return metrics


def _reduce(reports: list[dict[str, Tensor]], counts: dict[str, float], parallel: Parallel) -> dict[str, float]:
    group = parallel.dp_cp.group
    names = _names(reports, parallel.dp_cp)
    zero = torch.zeros_like(next(iter(reports[0].values())))
    table = torch.stack([torch.stack([report.get(name, zero) for name in names]) for report in reports])
    is_maximum = torch.tensor([name.startswith(MAXIMUM) for name in names], device=table.device)
    maxima = table.amax(0)
    own = [count * parallel.counts_rows for count in counts.values()]
    sums = torch.cat([table.double().sum(0), torch.tensor(own, dtype=torch.float64, device=table.device)])
    if parallel.dp_cp.size > 1:
        dist.all_reduce(sums, group=group)
        if is_maximum.any():
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
    sums[: len(names)] = torch.where(is_maximum, maxima.double(), sums[: len(names)])
    shown = [f"{name.removeprefix(MAXIMUM)}_max" if name.startswith(MAXIMUM) else name for name in names]
    return dict(zip([*shown, *counts], sums.tolist(), strict=True))


def _names(reports: list[dict[str, Tensor]], ranks: Ranks) -> list[str]:
    """Of all micro-batches of all ranks, in the same order on each: a user's loss may report what only some have."""
    names = dict.fromkeys(name for report in reports for name in report)
    of_ranks: list[Any] = [names]
    if ranks.size > 1:
        of_ranks = [None] * ranks.size
        dist.all_gather_object(of_ranks, names, ranks.group)
    return list(dict.fromkeys(name for each in of_ranks for name in each))
