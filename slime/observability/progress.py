"""What a driver says to whoever started it: lines at the end of a step and of a run, warnings."""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TextIO

from slime.observability.phases import STEP, longest, seconds_of
from slime.observability.scores import is_eval_score

logger = logging.getLogger(__name__)

_REWARDS = ("rollout/raw_reward", "rollout/rewards")
_LOSS = "train/loss"
_PROBE = "rollout/push_probe_abs_diff"


def done_line(args: Namespace) -> str:
    """One line on a finished run: how many rollouts, and where its results are."""
    parts = [f"done: {args.num_rollout} rollouts"]
    if args.placement != "rollout_only" and args.num_rollout > args.start_rollout_id:
        if args.save:
            parts.append(f"checkpoint in {args.save}")
        exports = (("Hugging Face model", args.save_hf), ("adapters", args.save_lora))
        parts += [f"{what} in {path.format(rollout_id=args.num_rollout - 1)}" for what, path in exports if path]
    return ", ".join([*parts, f"metrics and logs in {args.run_dir}"])


def step_line(rollout_id: int, num_rollout: int, metrics: Mapping[str, float], verdict: str = "") -> str:
    """One line on a finished step: rollout (``rollout_id`` counts from 0, the line from 1), mean reward, loss,
    difference of the last push's probe, evaluation, seconds, longest of `phases`, and whether the run learns
    (``verdict``); without what ``metrics``, all that was logged during the step, do not have."""
    parts = [f"rollout {rollout_id + 1}/{num_rollout}"]
    reward = next((metrics[key] for key in _REWARDS if key in metrics), None)
    if reward is not None:
        parts.append(f"reward {reward:.3f}")
    if _LOSS in metrics:
        parts.append(f"loss {round(metrics[_LOSS], 4) + 0.0:.4f}")  # no -0.0000
    if _PROBE in metrics:
        parts.append(f"probe {metrics[_PROBE]:.1g}")
    for key, value in metrics.items():
        if is_eval_score(key):
            parts.append(f"{key} {value:.3f}")
    seconds = seconds_of(metrics)
    if seconds[STEP]:
        phase = longest(seconds)
        parts.append(f"{seconds[STEP]:.1f} s")
        if round(seconds[phase], 1):
            parts.append(f"bound by {phase} ({seconds[phase]:.1f} s)")
    return " | ".join([*parts, verdict] if verdict else parts)


def say(line: str, stream: TextIO | None = None) -> None:
    """Print a line, on standard output unless told, and have it in the driver's log."""
    print(line, file=stream, flush=True)
    logger.info(line)


def warn(line: str) -> None:
    """Say it as a warning, on standard error."""
    say(f"{program()}: warning: {line}", sys.stderr)


def warn_of(warnings: Iterable[str | None]) -> None:
    """Say those that there are."""
    for warning in filter(None, warnings):
        warn(warning)


def program() -> str:
    """What messages call the driver."""
    return Path(sys.argv[0]).name
