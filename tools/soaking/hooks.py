"""The reward and generate functions of a soak's run: deterministic, and out of order when a switch says so.

A switch is a file in ``--soak-switches``, named for a kind of fault. Whoever removes it first has that fault, once, and
adds a line to ``taken.jsonl`` there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
import zlib
from pathlib import Path
from typing import Any

from slime.data import Sample
from slime.rollout.sglang_rollout import generate as ask

TAKEN = "taken.jsonl"
_SLOW = 1.5
"""In units of --reward-timeout."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flag of the switches."""
    parser.add_argument("--soak-switches", help="Directory of the switches.")


def _takes(args: argparse.Namespace, kind: str, sample: Sample) -> bool:
    """Whether this sample has the fault that somebody has asked for."""
    directory = Path(args.soak_switches)
    try:
        (directory / kind).unlink()
    except FileNotFoundError:
        return False
    line = {"kind": kind, "sample": sample.index, "time": time.time()}
    with (directory / TAKEN).open("a") as taken:
        taken.write(json.dumps(line) + "\n")
    return True


async def generate(args: argparse.Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """slime's own, or an error as of a connection that broke."""
    if _takes(args, "request_fails", sample):
        raise ConnectionResetError("the request was lost")
    return await ask(args, sample, sampling_params)


async def reward_func(args: argparse.Namespace, sample: Sample, **kwargs: Any) -> float:
    """0 or 1, by the response and the sample's number."""
    if _takes(args, "reward_raises", sample):
        raise RuntimeError("the judge is out of order")
    if _takes(args, "reward_slow", sample):
        await asyncio.sleep(_SLOW * args.reward_timeout)
    if _takes(args, "reward_hangs", sample):
        await _never()
    return float(zlib.crc32(f"{sample.index} {sample.response}".encode()) & 1)


async def _never() -> None:
    """Wait for nothing, and do not heed that nobody waits for this any longer."""
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
