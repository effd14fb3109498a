"""A generate function of two turns, between which an environment says something."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.data import Sample
from slime.rollout.observation import append_observation
from slime.rollout.sglang_rollout import generate as one_turn

FIRST = 8
"""Tokens of the first turn at most."""
SAID = " It says 12."


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """``--custom-generate-function-path``."""
    first = sampling_params | {"max_new_tokens": FIRST}
    sample = await one_turn(args, sample, first)
    if append_observation(args, sample, sampling_params, SAID):
        sample = await one_turn(args, sample, sampling_params)
    return sample
