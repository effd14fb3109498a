"""Telling of ``--rollout-prefix-warmup`` where it is no use."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Mapping

from slime.observability.logs import should_log
from slime.rollout.batches.metrics import PREFIX_HITS

logger = logging.getLogger(__name__)


class WarmupLog:
    """Warns of rollouts for which engines had nothing of any prompt: of the first, and then of every power of two."""

    def __init__(self) -> None:
        self._count = 0

    def check(self, args: Namespace, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Warn of a rollout by its metrics, or only count it; one whose requests are a user's own tells nothing, and
        with one sample a prompt nothing is warmed up."""
        if not args.rollout_prefix_warmup or args.n_samples_per_prompt < 2 or metrics.get(PREFIX_HITS) != 0:
            return
        self._count += 1
        if should_log(self._count):
            logger.warning(
                "rollout %d: --rollout-prefix-warmup was no use: engines had nothing of any prompt in their caches (%s "
                "is 0). Prompts may be shorter than a page of the cache, or be sent by a function of yours in another "
                "form; or engines keep none, as for deterministic inference with other attention than fa3, fa4 or "
                "triton: their logs say so where they tell of 'radix cache'",
                rollout_id,
                PREFIX_HITS,
            )
