"""From prompts to the groups of one rollout."""

from __future__ import annotations

import time
from argparse import Namespace
from typing import Any

from slime.rollout.base_types import RolloutFnTrainOutput, flatten_samples
from slime.rollout.hooks import HookError, call_hook
from slime.rollout.metrics import engine_metrics, speed_metrics
from slime.rollout.pool import Pool
from slime.rollout.state import rollout_state
from slime.utils.errors import DeadlineError
from slime.utils.misc import load_function
from slime.utils.types import Group

SAMPLE_FILTER_NAMES = ("rollout_sample_filter", "sample_filter")
ALL_SAMPLES_NAMES = ("process_all_samples", "all_samples_process")


async def collect(
    args: Namespace, rollout_id: int, source: Any, drawn: list[Group], num_groups: int
) -> RolloutFnTrainOutput:
    """Generate, reward and filter groups until ``num_groups`` are kept; what is left goes back to the data source.

    Args:
        drawn: the first groups; more are drawn from ``source``, ``--over-sampling-batch-size`` at a time or as many as
            are missing.

    Raises:
        DeadlineError: ``--rollout-timeout`` passed.
        HookError, RequestError: as of `Pool.advance`.
    """
    started = time.monotonic()
    async with rollout_state(args, rank=rollout_id) as state:
        pool = Pool(args, source, state, rollout_id)
        pool.begin(drawn)
        try:
            while (missing := num_groups - len(pool.kept)) > 0:
                if missing > pool.num_under_way:
                    await pool.draw(args.over_sampling_batch_size or missing - pool.num_under_way)
                await pool.advance(started + args.rollout_timeout - time.monotonic(), num_groups)
            groups = pool.take(num_groups)
            left = await pool.end()
        except DeadlineError as error:
            limit = f"within {args.rollout_timeout:g} s (--rollout-timeout)"
            raise DeadlineError(f"rollout {rollout_id}: {error} {limit}") from None
        except HookError as error:
            raise HookError(f"rollout {rollout_id}: {error}") from error
        finally:
            await pool.cancel()
    await finish_batch(args, source, groups, pool.all_done)
    samples = flatten_samples(groups)
    metrics = speed_metrics(args, samples, time.monotonic() - started) | engine_metrics(samples)
    return RolloutFnTrainOutput(samples=groups, metrics=metrics | left | pool.metrics())


async def finish_batch(args: Namespace, source: Any, groups: list[list[Any]], all_done: list[list[Any]]) -> None:
    """Call the user's functions for a whole batch.

    ``--rollout-sample-filter-path`` may set ``remove_sample``, which masks a sample out of the loss;
    ``--rollout-all-samples-process-path`` sees all groups that were finished, filtered ones too.
    """
    path, flag = args.rollout_sample_filter_path, "--rollout-sample-filter-path"
    if path is not None:
        function = load_function(path, flag=flag, default_names=SAMPLE_FILTER_NAMES)
        await call_hook(function, f"{flag} {path}", args, groups)
    path, flag = args.rollout_all_samples_process_path, "--rollout-all-samples-process-path"
    if path is not None:
        function = load_function(path, flag=flag, default_names=ALL_SAMPLES_NAMES)
        await call_hook(function, f"{flag} {path}", args, all_done, source)
