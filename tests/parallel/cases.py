"""The training runs that every layout makes, and that plain PyTorch makes too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from slime.utils.types import Ragged, TrainBatch
from tests.parallel import rollouts


@dataclass(frozen=True)
class Case:
    """Options over `rollouts.OPTIONS`, and what is trained on."""

    options: dict[str, Any] = field(default_factory=dict)
    rows: Callable[[int], TrainBatch] = rollouts.columns
    """Of a rollout id."""
    rollouts: int = 1
    steps: int = 2
    micro_batch_size: int | None = None


def cut_in_three(seed: int) -> TrainBatch:
    """The rollouts of `rollouts.columns`, each as three samples: a part of the response, after all that came before."""
    rows = rollouts.columns(seed)
    tokens, masks, log_probs, origin = [], [], [], []
    for row in range(len(rows)):
        mask = rows.loss_mask[row]
        prompt = len(rows.tokens[row]) - len(mask)
        assert rows.rollout_log_probs is not None
        for part in np.array_split(np.arange(len(mask)), 3):
            if len(part) == 0:
                continue
            tokens.append(rows.tokens[row][: prompt + part[-1] + 1])
            masks.append(mask[part])
            log_probs.append(rows.rollout_log_probs[row][part])
            origin.append(row)
    columns = {
        name: getattr(rows, name)[origin]
        for name in (
            "rewards",
            "raw_rewards",
            "rollout_ids",
            "rollout_mask_sums",
            "group_indices",
            "sample_indices",
            "truncated",
        )
    }
    return replace(
        rows,
        tokens=Ragged.from_rows(tokens, np.int32),
        loss_mask=Ragged.from_rows(masks, np.uint8),
        rollout_log_probs=Ragged.from_rows(log_probs, np.float32),
        **columns,
    )


def without_engine(seed: int) -> TrainBatch:
    """Supervised rows: no engine made them."""
    return rollouts.columns(seed, with_engine=False)


# A large epsilon: Adam's step is otherwise the sign of gradients that are nothing but rounding.
_ADAM = {"adam_eps": 1e-3}
CASES = {
    "grpo": Case(_ADAM),
    "per_token": Case(
        _ADAM | {"calculate_per_token_loss": True, "eps_clip_c": 1.5, "kl_loss_type": "k2"},
        micro_batch_size=2,
    ),
    "sft": Case(_ADAM | {"loss_type": "sft_loss"}, rows=without_engine),
    "sgd": Case({"optimizer": "sgd", "weight_decay": 0.0, "lr": 0.2, "lr_warmup_init": 0.1}),
    "cut_in_three": Case(_ADAM, rows=cut_in_three),
    "static": Case(_ADAM, micro_batch_size=1),
    "resume": Case({"num_steps_per_rollout": 1}, steps=1),
}
