"""From prompts to the groups of one rollout."""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from typing import Any

from slime.data import Group
from slime.data.source.data_source import RolloutDataSource
from slime.rollout.base_types import RolloutFnTrainOutput, flatten_samples
from slime.rollout.batches.metrics import engine_metrics, request_metrics, speed_metrics
from slime.rollout.engine.state import RolloutState, rollout_state
from slime.rollout.groups.pool import Pool, call_batch_hook
from slime.utils.errors import DeadlineError, HookError


async def collect(
    args: Namespace, rollout_id: int, source: Any, drawn: list[Group], num_groups: int
) -> RolloutFnTrainOutput:
    """Generate, reward and filter groups until ``num_groups`` are kept; what is left goes back to the data source.

    ``drawn`` are the first; more are drawn from ``source``, ``--over-sampling-batch-size`` at a time or as many as are
    missing. DeadlineError where ``--rollout-timeout`` passed; HookError and RequestError as of `Pool.advance`.
    """
    started = time.monotonic()
    async with rollout_state(args, rank=rollout_id) as state:
        pool = Pool(args, source, state, rollout_id)
        try:
            async with state.runtime.here().line.waiting(rollout_id, args.rollout_timeout):
                pool.begin(drawn)
                while (missing := num_groups - len(pool.kept)) > 0:
                    if missing > pool.num_under_way:
                        await pool.draw(args.over_sampling_batch_size or missing - pool.num_under_way)
                    await pool.advance(num_groups)
                groups = pool.take(range(num_groups), rollout_id)
                metrics = await pool.end() | pool.metrics()
                await finish_batch(args, source, state, groups, pool.take_all_done())
        except (HookError, DeadlineError) as error:
            raise type(error)(f"rollout {rollout_id}: {error}") from error
        except asyncio.CancelledError:
            if not isinstance(source, RolloutDataSource):  # which knows by itself what it has handed out
                await pool.end()
            raise
        except TimeoutError:
            raise DeadlineError(late(args, rollout_id, pool.progress())) from None
        finally:
            await pool.cancel()
    samples = flatten_samples(groups)
    metrics |= speed_metrics(args, samples, time.monotonic() - started) | engine_metrics(samples)
    metrics |= request_metrics(state.replies)
    return RolloutFnTrainOutput(samples=groups, metrics=metrics)


def late(args: Namespace, rollout_id: int, progress: str) -> str:
    """The message of a rollout's deadline."""
    return f"rollout {rollout_id}: {progress} within {args.rollout_timeout:g} s (--rollout-timeout)"


async def finish_batch(
    args: Namespace, source: Any, state: RolloutState, groups: list[list[Any]], all_done: list[list[Any]]
) -> None:
    """Call the user's functions for a whole batch: ``--rollout-sample-filter-path`` may mask samples out of the loss by
    ``remove_sample``; ``--rollout-all-samples-process-path`` sees all finished groups, filtered ones too."""
    if (path := args.rollout_sample_filter_path) is not None:
        await call_batch_hook(state, "--rollout-sample-filter-path", path, groups, args, groups)
    if (path := args.rollout_all_samples_process_path) is not None:
        flag, seen = "--rollout-all-samples-process-path", [*groups, *all_done]  # later rollouts train some of these
        await call_batch_hook(state, flag, path, seen, args, all_done, source)
