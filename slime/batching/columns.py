"""From the columns of a whole rollout and its schedule to what each data-parallel rank receives."""

from __future__ import annotations

import numpy as np

from slime.batching.schedule import ScheduledStep
from slime.data import OptimizerStep, TrainBatch


def train_batches(columns: TrainBatch, schedule: list[ScheduledStep]) -> list[TrainBatch]:
    """One batch a rank: its rows in the order in which its micro-batches use them, and its steps.

    Args:
        columns: every row of the rollout; its ``steps`` are ignored.
        schedule: from `build_schedule` over the same rows; row indices are renumbered to the rank's own.
    """
    dp_size = len(schedule[0].micro_batches)
    return [_of_rank(columns, schedule, rank) for rank in range(dp_size)]


def _of_rank(columns: TrainBatch, schedule: list[ScheduledStep], rank: int) -> TrainBatch:
    steps: list[OptimizerStep] = []
    chosen: list[np.ndarray] = []
    count = 0
    for step in schedule:
        own = []
        for rows in step.micro_batches[rank]:
            chosen.append(rows)
            own.append(np.arange(count, count + len(rows), dtype=np.int64))
            count += len(rows)
        steps.append(OptimizerStep(own, step.num_rollouts, step.num_tokens, step.num_trained_rollouts))
    return columns.take(np.concatenate(chosen), steps)
