"""Options of a small training run, and rollouts of random tokens for it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Container
from pathlib import Path
from typing import Any

import numpy as np

from slime.batching.schedule import build_schedule, train_batches
from slime.data import Ragged, TrainBatch
from tests.algorithm_options import algorithm_options
from tests.parallel import tiny
from tests.parallel.outcome import CLIP

OPTIONS: dict[str, Any] = {
    "ref_load": None,
    "num_rollout": 4,
    "num_steps_per_rollout": 2,
    "update_weight_buffer_size": 2**20,
    "rollout_temperature": 0.8,
    "use_kl_loss": True,
    "kl_loss_coef": 0.05,
    "kl_loss_type": "low_var_kl",
    "entropy_coef": 0.01,
    "eps_clip_high": 0.28,
    "check_for_nan_in_loss_and_grad": True,
    "use_distributed_optimizer": False,
    "accumulate_allreduce_grads_in_fp32": True,
    "optimizer": "adam",
    "lr": 1e-3,
    "min_lr": 1e-4,
    "lr_decay_style": "cosine",
    "lr_decay_iters": None,
    "lr_warmup_iters": 2,
    "lr_warmup_init": 1e-4,
    "lr_wsd_decay_iters": None,
    "lr_wsd_decay_style": None,
    "weight_decay": 0.1,
    "start_weight_decay": None,
    "end_weight_decay": None,
    "weight_decay_incr_style": "constant",
    "use_checkpoint_opt_param_scheduler": False,
    "adam_beta2": 0.95,
    "adam_eps": 1e-8,
    "clip_grad": CLIP,
}


TEXT = [7 * position % tiny.VOCAB for position in range(1, 14)]
"""Tokens, an odd number of them."""


def arguments(model_dir: Path, **options: Any) -> Namespace:
    """As `parse_args` would make them; a teacher's directory lies beside the student's."""
    if options.get("use_opd"):
        options["opd_teacher_load"] = f"{model_dir}_teacher"
    algorithm = algorithm_options(**{**OPTIONS, **options})
    return tiny.arguments(model_dir, **{"hf_checkpoint": str(model_dir), **vars(algorithm), **options})


def columns(
    seed: int, rollouts: int = 16, prompt: int = 12, response: int = 24, with_engine: bool = True
) -> TrainBatch:
    """One row a rollout, of random lengths up to ``prompt`` + ``response``; some response tokens are masked."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(1, prompt + 1, rollouts)
    responses = rng.integers(1, response + 1, rollouts)
    masks = [(rng.random(n) < 0.8).astype(np.uint8) for n in responses]
    masks[0][:] = 0  # a rollout without a loss token still counts
    rows = _columns(rng, prompts.tolist(), masks)
    log_probs = [rng.normal(-4.0, 1.0, n) for n in responses]
    return rows.changed(rollout_log_probs=Ragged.from_rows(log_probs, np.float32)) if with_engine else rows


def _columns(rng: np.random.Generator, prompts: list[int], masks: list[np.ndarray]) -> TrainBatch:
    """One row a rollout, of random tokens and rewards, four to a group; no engine made them."""
    rollouts = len(masks)
    rewards = rng.normal(size=rollouts).astype(np.float32)
    return TrainBatch({}).changed(
        tokens=Ragged.from_rows(
            [rng.integers(0, tiny.VOCAB, prompt + len(mask)) for prompt, mask in zip(prompts, masks, strict=True)],
            np.int32,
        ),
        loss_mask=Ragged.from_rows(masks, np.uint8),
        rewards=rewards,
        raw_rewards=rewards + 1,
        rollout_ids=np.arange(rollouts),
        rollout_mask_sums=np.array([mask.sum() for mask in masks], dtype=np.int64),
        group_indices=np.arange(rollouts) // 4,
        sample_indices=np.arange(rollouts),
        truncated=rng.random(rollouts) < 0.3,
    )


_RESPONSES = {
    "one": 1,
    "another one": 1,
    "short": 3,
    "some": 9,
    "masked": 24,
    "end masked": 60,
    "cut": 130,
    "long": 280,
}


def uneven(seed: int, rollouts: int) -> TrainBatch:
    """Rollouts of 1 to 280 response tokens: every eight of `_RESPONSES`, in random order.

    Tokens in the middle are masked; "masked" is so throughout, "end masked" in its last tokens too, and "cut" is three
    samples, of which the second is fully masked.
    """
    rng = np.random.default_rng(seed)
    kinds = [kind for _ in range(0, rollouts, len(_RESPONSES)) for kind in rng.permutation(list(_RESPONSES))]
    masks = []
    for kind in kinds:
        mask = (rng.random(_RESPONSES[kind]) < 0.8).astype(np.uint8)
        mask[0] = 1
        if kind == "masked":
            mask[:] = 0
        elif kind == "end masked":
            mask[-3:] = 0
        elif kind == "cut":
            mask[np.array_split(np.arange(len(mask)), 3)[1]] = 0
        masks.append(mask)
    rows = _columns(rng, rng.integers(1, 17, rollouts).tolist(), masks)
    return cut(rows, {row for row, kind in enumerate(kinds) if kind == "cut"})


def cut(rows: TrainBatch, chosen: Container[int]) -> TrainBatch:
    """The chosen rows each as three samples: a part of the response, after all that came before."""
    tokens, masks, log_probs, origin = [], [], [], []
    for row in range(len(rows)):
        mask = rows.loss_mask[row]
        prompt = len(rows.tokens[row]) - len(mask)
        for part in np.array_split(np.arange(len(mask)), 3 if row in chosen else 1):
            if len(part) == 0:
                continue
            tokens.append(rows.tokens[row][: prompt + part[-1] + 1])
            masks.append(mask[part])
            if rows.rollout_log_probs is not None:
                log_probs.append(rows.rollout_log_probs[row][part])
            origin.append(row)
    columns = {name: column[origin] for name, column in rows.columns.items() if isinstance(column, np.ndarray)}
    return rows.changed(
        **columns,
        tokens=Ragged.from_rows(tokens, np.int32),
        loss_mask=Ragged.from_rows(masks, np.uint8),
        rollout_log_probs=Ragged.from_rows(log_probs, np.float32) if log_probs else None,
    )


def from_engine(rows: TrainBatch, log_probs: list[np.ndarray], seed: int) -> TrainBatch:
    """Rows as an engine that differs a little, in each token and in each row as a whole, samples them.

    Args:
        log_probs: the model's, of every row's response.
    """
    rng = np.random.default_rng(seed)
    noisy = [row + rng.normal(0, 0.02) + rng.normal(0, 0.03, len(row)) for row in log_probs]
    return rows.changed(rollout_log_probs=Ragged.from_rows(noisy, np.float32))


def batches(
    rows: TrainBatch,
    dp_size: int = 1,
    steps: int = 2,
    micro_batch_size: int | None = None,
    max_tokens: int | None = 96,
    micro_batch_multiple: int = 1,
) -> list[TrainBatch]:
    """The rows as every data-parallel rank gets them."""
    schedule = build_schedule(
        rows.lengths,
        rows.rollout_ids,
        np.array([row.sum() for row in (rows.loss_mask[i] for i in range(len(rows)))]),
        dp_size=dp_size,
        global_batch_size=len(np.unique(rows.rollout_ids)) // steps,
        micro_batch_size=micro_batch_size,
        max_tokens=None if micro_batch_size else max_tokens,
        micro_batch_multiple=micro_batch_multiple,
    )
    return train_batches(rows, schedule)


def batch_of_rank(args: Namespace, rows: TrainBatch, dp_size: int, dp_rank: int, steps: int = 2) -> TrainBatch:
    """One rank's of `batches`, of micro-batches of up to 256 tokens, by the limits that `train_data.to_train_batches`
    derives from the options."""
    interleaved = args.virtual_pipeline_model_parallel_size is not None
    return batches(
        rows,
        dp_size,
        steps,
        max_tokens=256 * args.context_parallel_size,
        micro_batch_multiple=args.pipeline_model_parallel_size if interleaved else 1,
    )[dp_rank]
