"""A generate function that loses requests, by seed, so that tests know whose, and a judge that hangs once."""

from __future__ import annotations

import asyncio
import random
from argparse import Namespace
from collections import Counter
from typing import Any

from slime.data import Sample
from slime.rollout.sglang_rollout import generate as ask

TRIES = 3
"""As many as ``--on-sample-error retry`` has."""
HANG_S = 30.0
_LOST = 0.3

_tries: Counter[int | None] = Counter()
_hung: list[int | None] = []


def is_lost(index: int | None, number: int) -> bool:
    """Whether the ``number``-th request of a sample, from 0, fails."""
    return random.Random(f"{index}/{number}").random() < _LOST


def is_hopeless(group: int, size: int) -> bool:
    """Whether a sample of the group fails at every try, so that the group is dropped."""
    members = range(group * size, (group + 1) * size)
    return any(all(is_lost(index, number) for number in range(TRIES)) for index in members)


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """slime's own, where the request is not lost."""
    _tries[sample.index] += 1
    if is_lost(sample.index, _tries[sample.index] - 1):
        raise ConnectionResetError("the request was lost")
    return await ask(args, sample, sampling_params)


async def reward_func(args: Namespace, sample: Sample) -> float:
    """0 or 1; the first that is asked for after the first rollout comes too late."""
    if not _hung and sample.group_index is not None and sample.group_index >= 2 * args.rollout_batch_size:
        _hung.append(sample.index)
        await asyncio.sleep(HANG_S)
    return float(random.Random(f"reward/{sample.index}").random() < 0.5)
