"""What a step's seconds come to: the share that trainers waited, and floating-point operations a second."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence

import numpy as np

from slime.batching.flops import forward_flops
from slime.data import TrainBatch
from slime.rollout.batches.train_data import decoder_shape

_FORWARD = "rollout/forward_tflop"
_WAIT = "perf/wait_for_rollout_time"
_PASSES = {
    "perf/log_probs_tflops": ("perf/log_probs_time", 1),
    "perf/ref_log_probs_tflops": ("perf/ref_log_probs_time", 1),
    "perf/actor_train_tflops": ("perf/actor_train_time", 3),
}
"""Of each rate the seconds, and how many forward passes were made in them: a backward pass is worth two."""


def operations(args: Namespace, batches: Sequence[TrainBatch]) -> dict[str, float]:
    """The TFLOP of one forward pass over a rollout, by `forward_flops`; nothing where no trainer makes one."""
    if args.debug_rollout_only:
        return {}
    lengths = np.concatenate([batch.lengths for batch in batches])
    return {_FORWARD: float(forward_flops(lengths, decoder_shape(args)).sum()) / 1e12}


def step_figures(metrics: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Of a step that took ``seconds``: these, and which share of them trainers waited for the rollout."""
    figures = {"perf/step_time": seconds}
    if _WAIT in metrics and seconds > 0:
        figures["perf/wait_time_ratio"] = metrics[_WAIT] / seconds
    return figures


def flop_rates(args: Namespace, trained: Mapping[str, float], rollout: Mapping[str, float]) -> dict[str, float]:
    """TFLOP/s of one training rank in each part of training, of the seconds in ``trained`` and the operations of a
    forward pass in ``rollout``. Frozen weights have no gradient: with adapters a step is worth two passes."""
    if _FORWARD not in rollout:
        return {}
    each = rollout[_FORWARD] / (args.actor_num_nodes * args.actor_num_gpus_per_node)
    passes = {name: (time, min(n, 2) if args.lora_rank else n) for name, (time, n) in _PASSES.items()}
    return {name: n * each / trained[time] for name, (time, n) in passes.items() if trained.get(time, 0.0) > 0}
