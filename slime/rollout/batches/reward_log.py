"""Telling of rollouts whose rewards teach nothing, as those of a wrong reward function or label do."""

from __future__ import annotations

import logging
import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence

import numpy as np

from slime.data import Sample, TrainBatch
from slime.observability.logs import should_log
from slime.observability.verdict_rules import MAKES_ADVANTAGES
from slime.options.learning.distillation import REWARD_PATH
from slime.rollout.batches.metrics import ZERO_STD

logger = logging.getLogger(__name__)

_SHOWN = 3
"""Rewards that are told with the number of their groups."""
_END = 120
"""Letters of a response's end, where its answer mostly is."""


class RewardLog:
    """Warns of rollouts in whose every group all rewards are the same: of the first, and then of every power of two."""

    def __init__(self) -> None:
        self._count = 0

    def check(
        self,
        args: Namespace,
        rollout_id: int,
        samples: Sequence[Sample],
        batches: Sequence[TrainBatch],
        metrics: Mapping[str, float],
    ) -> None:
        """Warn of a rollout, whose ``batches`` are of all data-parallel ranks, or only count it. ``metrics``, of
        `slime.rollout.batches.train_data.to_train_batches`, count the groups; one of ``samples`` is shown."""
        if args.loss_type != "policy_loss" or args.reward_baseline is None:
            return
        if args.use_opd and args.custom_rm_path == REWARD_PATH and args.rm_type is None:
            return  # a teacher teaches, and all rewards are 0
        # Samples that a response was cut into may differ where responses do not.
        if any(getattr(args, name) is not None for name in MAKES_ADVANTAGES) or any(b.rewards.any() for b in batches):
            return
        prefix = f"{ZERO_STD}/count_"
        groups = {name.removeprefix(prefix): int(n) for name, n in metrics.items() if name.startswith(prefix)}
        num_groups = len(np.unique(np.concatenate([batch.group_indices for batch in batches])))
        if sum(groups.values()) < num_groups:
            return  # one has a single response, which is compared with none
        self._count += 1
        if should_log(self._count):
            self._warn(args, rollout_id, samples, groups, num_groups)

    def _warn(
        self, args: Namespace, rollout_id: int, samples: Sequence[Sample], groups: Mapping[str, int], num_groups: int
    ) -> None:
        flag = "--rm-type" if args.custom_rm_path is None else "--custom-rm-path"
        so_far = f" ({self._count} rollouts so by now)" if self._count > 1 else ""
        logger.warning(
            "rollout %d: in each of its %d groups all responses have the same reward (%s): the rewards teach nothing; "
            "check %s and --label-key, or take easier or harder prompts%s\n%s\n%s",
            *(rollout_id, num_groups, _told(groups), flag, so_far, one_of(samples), _where(args, rollout_id)),
        )


def one_of(samples: Sequence[Sample]) -> str:
    """A sample as it was judged: escaped, as models may have written anything into it."""
    sample = next((each for each in samples if each.response), samples[0])
    text = str(sample.response)
    end = text if len(text) <= _END else f"...{text[-_END:]}"
    judged = f"reward {sample.reward!r:.80}, label {sample.label!r:.80}, response {end!r}"
    return f"  one of them: sample {sample.index}, {judged}"


def _where(args: Namespace, rollout_id: int) -> str:
    saved = args.save_debug_rollout_data
    place = "DIR" if saved is None else shlex.quote(saved.format(rollout_id=rollout_id))
    first = "add --save-debug-rollout-data 'DIR/{rollout_id}.pt', then: " if saved is None else ""
    view = f"python3 tools/view_samples.py {place} --hf-checkpoint {shlex.quote(args.hf_checkpoint)}"
    return f"  to read all of them: {first}{view}"


def _told(groups: Mapping[str, int]) -> str:
    if len(groups) == 1:
        return next(iter(groups))
    most = sorted(groups, key=lambda reward: -groups[reward])
    told = [f"{reward} in {groups[reward]}" for reward in most[:_SHOWN]]
    return ", ".join([*told, "..."] if len(most) > _SHOWN else told)
