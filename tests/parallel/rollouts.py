"""Options of a small training run, and rollouts of random tokens for it."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np

from slime.batching.columns import train_batches
from slime.batching.schedule import build_schedule
from slime.utils.types import Ragged, TrainBatch
from tests.parallel import tiny

OPTIONS: dict[str, Any] = {
    "load": None,
    "ref_load": None,
    "num_rollout": 4,
    "num_steps_per_rollout": 2,
    "update_weight_buffer_size": 2**20,
    "loss_type": "policy_loss",
    "rollout_temperature": 0.8,
    "use_kl_loss": True,
    "kl_loss_coef": 0.05,
    "kl_loss_type": "low_var_kl",
    "entropy_coef": 0.01,
    "eps_clip": 0.2,
    "eps_clip_high": 0.28,
    "eps_clip_c": None,
    "calculate_per_token_loss": False,
    "check_for_nan_in_loss_and_grad": True,
    "use_distributed_optimizer": False,
    "accumulate_allreduce_grads_in_fp32": True,
    "optimizer": "adam",
    "lr": 1e-3,
    "min_lr": 1e-4,
    "lr_decay_style": "cosine",
    "lr_decay_iters": None,
    "lr_warmup_iters": 2,
    "lr_warmup_fraction": None,
    "lr_warmup_init": 1e-4,
    "lr_wsd_decay_iters": None,
    "lr_wsd_decay_style": None,
    "weight_decay": 0.1,
    "start_weight_decay": None,
    "end_weight_decay": None,
    "weight_decay_incr_style": "constant",
    "use_checkpoint_opt_param_scheduler": False,
    "adam_beta2": 0.95,
    "clip_grad": 1.0,
}


def arguments(model_dir: Path, **options: Any) -> Namespace:
    """As `parse_args` would make them."""
    return tiny.arguments(model_dir, **{"hf_checkpoint": str(model_dir), **OPTIONS, **options})


def columns(
    seed: int,
    rollouts: int = 16,
    vocab: int = tiny.VOCAB,
    prompt: int = 12,
    response: int = 24,
    with_engine: bool = True,
) -> TrainBatch:
    """One row a rollout, of random lengths up to ``prompt`` + ``response``; some response tokens are masked."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(1, prompt + 1, rollouts)
    responses = rng.integers(1, response + 1, rollouts)
    masks = [(rng.random(n) < 0.8).astype(np.uint8) for n in responses]
    masks[0][:] = 0  # a rollout without a loss token still counts
    rewards = rng.normal(size=rollouts).astype(np.float32)
    log_probs = [rng.normal(-4.0, 1.0, n) for n in responses]
    return TrainBatch(
        tokens=Ragged.from_rows(
            [rng.integers(0, vocab, p + r) for p, r in zip(prompts, responses, strict=True)], np.int32
        ),
        loss_mask=Ragged.from_rows(masks, np.uint8),
        rewards=rewards,
        raw_rewards=rewards + 1,
        rollout_ids=np.arange(rollouts),
        rollout_mask_sums=np.array([mask.sum() for mask in masks], dtype=np.int64),
        group_indices=np.arange(rollouts) // 4,
        sample_indices=np.arange(rollouts),
        truncated=rng.random(rollouts) < 0.3,
        rollout_log_probs=Ragged.from_rows(log_probs, np.float32) if with_engine else None,
        steps=[],
    )


def batches(
    rows: TrainBatch,
    dp_size: int = 1,
    steps: int = 2,
    micro_batch_size: int | None = None,
    max_tokens: int | None = 96,
) -> list[TrainBatch]:
    """The rows as every data-parallel rank gets them."""
    schedule = build_schedule(
        rows.tokens.lengths,
        rows.rollout_ids,
        np.array([row.sum() for row in (rows.loss_mask[i] for i in range(len(rows)))]),
        dp_size=dp_size,
        global_batch_size=len(np.unique(rows.rollout_ids)) // steps,
        micro_batch_size=micro_batch_size,
        max_tokens=None if micro_batch_size else max_tokens,
    )
    return train_batches(rows, schedule)
