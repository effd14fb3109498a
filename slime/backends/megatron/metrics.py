"""From what each micro-batch reports to one dict of numbers a step, equal on every rank."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from slime.backends.megatron.loss import MAXIMUM
from slime.utils import device
from slime.utils.types import OptimizerStep, TrainBatch


def row_sums(batch: TrainBatch, step: OptimizerStep) -> dict[str, float]:
    """What is averaged over the step's samples, summed over this rank's; and their number, as ``rows``."""
    rows = np.concatenate(step.micro_batches)
    lengths = batch.tokens.lengths[rows]
    return {
        "rows": float(len(rows)),
        "tokens": float(lengths.sum()),
        "rollout/rewards": float(batch.rewards[rows].sum(dtype=np.float64)),
        "rollout/raw_reward": float(batch.raw_rewards[rows].sum(dtype=np.float64)),
        "rollout/response_lengths": float(batch.loss_mask.lengths[rows].sum()),
        "rollout/total_lengths": float(lengths.sum()),
        "rollout/truncated": float(batch.truncated[rows].sum()),
    }


def step_metrics(reports: list[dict[str, Tensor]], rows: dict[str, float]) -> dict[str, float]:
    """Sums and maxima of the micro-batches over all ranks; means over samples; and ``tokens`` of the step.

    Args:
        reports: of `slime.backends.megatron.loss.reduce_tokens`, one a micro-batch; none before the last stage.
        rows: of `row_sums`.
    """
    metrics = _reduce(reports, rows) if parallel_state.is_pipeline_last_stage() else {}
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        box = [metrics]
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(box, src=last, group=parallel_state.get_pipeline_model_parallel_group())
        metrics = box[0]
    return metrics


def _reduce(reports: list[dict[str, Tensor]], rows: dict[str, float]) -> dict[str, float]:
    names = list(reports[0])
    table = torch.stack([torch.stack([report[name] for name in names]) for report in reports])
    is_maximum = torch.tensor([name.endswith(MAXIMUM) for name in names], device=table.device)
    maxima = table.amax(0)
    # Context-parallel ranks share rows.
    counted = parallel_state.get_context_parallel_rank() == 0
    of_rows = torch.tensor([value if counted else 0.0 for value in rows.values()], dtype=torch.float64)
    sums = torch.cat([table.double().sum(0), of_rows.to(device.current_device())])
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if group.size() > 1:
        dist.all_reduce(sums, group=group)
        if is_maximum.any():
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
    sums[: len(names)] = torch.where(is_maximum, maxima.double(), sums[: len(names)])
    metrics = dict(zip([*names, *rows], sums.tolist(), strict=True))
    count = metrics.pop("rows")
    return {name: value / count if name in rows and name != "tokens" else value for name, value in metrics.items()}
