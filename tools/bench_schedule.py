#!/usr/bin/env python3
"""How long the data-parallel schedule of a large batch takes, and how even and how full its micro-batches are.

    python tools/bench_schedule.py --rows 100000 --dp-size 64 --max-tokens 16384

prints a line for each way of batching, over the same log-normal lengths. Work is counted by the forward FLOPs of an
8-billion-parameter Qwen3.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.entry.installation import check_installation

check_installation()

import numpy as np  # noqa: E402

from slime.batching.flops import DecoderShape, forward_flops  # noqa: E402
from slime.batching.schedule import ScheduledStep, build_schedule  # noqa: E402

QWEN3_8B = DecoderShape(
    num_layers=36,
    hidden_size=4096,
    ffn_hidden_size=12288,
    num_attention_heads=32,
    num_query_groups=8,
    kv_channels=128,
    vocab_size=151936,
)
COLUMNS = """\
seconds   processor time of the schedule, costs included
mb/rank   micro-batches of one rank
fill      tokens / (micro-batches x --max-tokens), without padding; above 1 in static ones, or by rows longer than it
ranks     FLOPs of the busiest rank / the mean rank's
lockstep  the same where every micro-batch waits for the slowest rank, as with expert parallelism
mb max    FLOPs of the largest micro-batch / the mean one's
mb std    standard deviation of the micro-batches' FLOPs / their mean"""


def skewed_lengths(rows: int, median: float, sigma: float, longest: int, seed: int) -> np.ndarray:
    """int64 [rows], log-normal, at least 16 and at most ``longest``."""
    drawn = np.random.default_rng(seed).lognormal(np.log(median), sigma, rows)
    return np.clip(drawn, 16, longest).astype(np.int64)


def measure(
    lengths: np.ndarray, dp_size: int, max_tokens: int, mode: dict[str, Any], balance: bool
) -> dict[str, float]:
    """The figures of `COLUMNS` for one optimizer step of all rows."""
    start = time.process_time()
    costs = forward_flops(lengths, QWEN3_8B)
    step = build_schedule(
        lengths,
        np.arange(len(lengths)),
        lengths,
        dp_size=dp_size,
        global_batch_size=len(lengths),
        row_costs=costs if balance else None,
        **mode,
    )[0]
    seconds = time.process_time() - start
    work = flops_of_micro_batches(step, costs)
    mean_rank = work.sum() / dp_size
    return {
        "seconds": seconds,
        "mb/rank": work.shape[1],
        "fill": lengths.sum() / (work.size * max_tokens),
        "ranks": work.sum(axis=1).max() / mean_rank,
        "lockstep": work.max(axis=0).sum() / mean_rank,
        "mb max": work.max() / work.mean(),
        "mb std": work.std() / work.mean(),
    }


def flops_of_micro_batches(step: ScheduledStep, costs: np.ndarray) -> np.ndarray:
    """float64 [ranks, micro-batches of a rank]"""
    return np.array([[costs[rows].sum() for rows in rank] for rank in step.micro_batches])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=COLUMNS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000, help="samples of the one step; default: %(default)s")
    parser.add_argument("--dp-size", type=int, default=64, help="data-parallel ranks; default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=16384, help="cap of a micro-batch; default: %(default)s")
    parser.add_argument("--micro-batch-size", type=int, default=4, help="rows of a static one; default: %(default)s")
    parser.add_argument("--median", type=float, default=2000.0, help="tokens of the median row; default: %(default)s")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the lengths' logarithm; default: %(default)s")
    parser.add_argument("--longest", type=int, default=16384, help="tokens of the longest row; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths; default: %(default)s")
    args = parser.parse_args()
    lengths = skewed_lengths(args.rows, args.median, args.sigma, args.longest, args.seed)
    static, dynamic = {"micro_batch_size": args.micro_batch_size}, {"max_tokens": args.max_tokens}
    modes: dict[str, tuple[dict[str, Any], bool]] = {
        "static": (static, False),
        "static, --balance-data": (static, True),
        "dynamic": (dynamic, False),
        "dynamic, --balance-data": (dynamic, True),
        "dynamic, --balance-by-flops": (dynamic | {"balance_micro_batches": True}, True),
    }
    for number, (name, (mode, balance)) in enumerate(modes.items()):
        figures = measure(lengths, args.dp_size, args.max_tokens, mode, balance=balance)
        if number == 0:
            print(" " * 27 + "".join(f"{column:>10}" for column in figures))
        print(f"{name:27}" + "".join(f"{figure:10.5g}" for figure in figures.values()))


if __name__ == "__main__":
    main()
