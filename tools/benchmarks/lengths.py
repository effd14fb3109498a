"""A generate function for measurements: every response has the length that is drawn for it, whatever the model says."""

from __future__ import annotations

import argparse
import math
import random
from typing import Any

from slime.data import Sample
from slime.rollout.sglang_rollout import generate as generate_plain

_SPREAD = 0.9
"""Of the logarithm of a long-tailed length: the longest of 256 is about ten times the median."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``--long-tail``."""
    parser.add_argument("--long-tail", action="store_true", help="lengths are log-normal, cut at the longest")


def length_of(index: int, longest: int, long_tail: bool) -> int:
    """The response length of sample ``index``; with ``long_tail`` a tenth of ``longest`` in the median."""
    if not long_tail:
        return longest
    drawn = random.Random(index).lognormvariate(math.log(longest / 10), _SPREAD)
    return max(16, min(longest, round(drawn)))


async def generate(args: argparse.Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One response of `length_of` tokens."""
    assert sample.index is not None
    length = length_of(sample.index, sampling_params["max_new_tokens"], args.long_tail)
    return await generate_plain(args, sample, sampling_params | {"max_new_tokens": length, "ignore_eos": True})
