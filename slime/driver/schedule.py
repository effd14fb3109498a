"""What a run has to do: every so many rollouts, at its start, and whether anything at all."""

from __future__ import annotations

import argparse

from slime.files.checkpoints import rollouts_done
from slime.files.exports import exports_after, is_export
from slime.observability.metrics import evaluated_versions


class NothingLeftError(Exception):
    """The run is over already, as the message says: no failure, and the driver ends with status 0."""


def is_due(rollout_id: int, interval: int | None, last: int | None = None) -> bool:
    """Whether what is done every ``interval`` rollouts (None: never), and after the ``last``, is due after this one."""
    return rollout_id + 1 == last or (interval is not None and (rollout_id + 1) % interval == 0)


def times_due(first: int, interval: int | None, last: int) -> int:
    """How many of the rollouts from ``first`` on, ``last`` in all, something is due after; the last is one of them."""
    if first >= last:
        return 0
    if interval is None:
        return 1
    return last // interval - first // interval + (last % interval > 0)


def scores_start(args: argparse.Namespace, start: int) -> bool:
    """Whether the weights of a run's start, of ``start`` rollouts, are to be scored; not again after a resume."""
    if not args.eval_interval or args.skip_eval_before_train:
        return False
    return start == 0 or start not in evaluated_versions(args)


def missing_exports(args: argparse.Namespace, start: int) -> dict[str, str]:
    """What a run that is resumed after its last rollout was to export of it, and has not, as it was asked for later, or
    the run ended between the checkpoint and it: option -> directory."""
    if not args.load or start < args.num_rollout or args.start_rollout_id not in (None, start):
        return {}
    asked = exports_after(args, start - 1)
    return {name: place for name, place in asked.items() if not is_export(place, args, start - 1)}


def check_remaining(args: argparse.Namespace) -> str:
    """A line on what is left of a run that has no rollout to train, before anything is started for it; NothingLeftError
    where neither scores nor exports are missing. A run that only evaluates (``--num-rollout 0``) is never over, nor is
    one whose number of rollouts is not known yet."""
    if not args.num_rollout:
        return ""
    done = 0 if args.placement == "rollout_only" else rollouts_done(args.load, args.ckpt_step)
    first = done if args.start_rollout_id is None else args.start_rollout_id
    if first < args.num_rollout:
        return ""
    why = f"the checkpoint in {args.load} is after rollout {done} of {args.num_rollout}"
    if args.start_rollout_id is not None:
        why = f"--start-rollout-id {first}, counted from 0, is after the last of {args.num_rollout} rollouts"
    more = "a larger --num-rollout goes on"
    left = ["scoring these weights"] if scores_start(args, first) else []
    left += ["writing the exports that are missing"] if missing_exports(args, done) else []
    if not left:
        raise NothingLeftError(f"{why}: nothing is left to do; {more}")
    return f"{why}: nothing is left but {' and '.join(left)}; {more}"
