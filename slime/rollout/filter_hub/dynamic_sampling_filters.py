"""Filters of finished groups, for ``--dynamic-sampling-filter-path``."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import numpy as np

from slime.algorithms.rewards import rollout_rewards
from slime.data import Sample
from slime.rollout.filter_hub.base_types import DynamicFilterOutput

_SMALLEST_STD = 1e-6


def check_reward_nonzero_std(args: Namespace, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Keep a group whose rewards differ: one of equal rewards has no advantage to learn from.

    Dynamic sampling of Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.2. A rollout that was cut
    into parts counts once, by `rollout_rewards`; a group of a single rollout has nothing to differ from and is dropped.
    """
    by_rollout = rollout_rewards((s.rollout_id for s in samples), (s.get_reward_value(args) for s in samples))
    rewards = np.array(list(by_rollout.values()), dtype=np.float64)
    keep = len(rewards) > 1 and float(rewards.std(ddof=1)) > _SMALLEST_STD
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"zero_std_{round(float(rewards[0]), 1):g}")


def check_reward_nonzero_std_with_fallback(
    args: Namespace, samples: list[Sample], **kwargs: Any
) -> DynamicFilterOutput:
    """As `check_reward_nonzero_std`, but a group is kept all the same where it would take more prompts to drop it."""
    output = check_reward_nonzero_std(args, samples, **kwargs)
    output.keep_when_insufficient = not output.keep
    return output
