"""A rollout function for train_async.py that never stops generating: rollouts take what is done, across weight pushes.

``--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async``. slime's own rollout ends
when its last response does; here the groups of later rollouts are under way meanwhile, as many as can still be trained
within ``--max-weight-staleness``.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from slime.observability.trace import span
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, flatten_samples
from slime.rollout.batches.metrics import engine_metrics, request_metrics, speed_metrics
from slime.rollout.engine.loop import background_loop, run_all
from slime.rollout.engine.state import RolloutState, rollout_state
from slime.rollout.groups.collect import finish_batch, late
from slime.rollout.groups.pool import Pool
from slime.rollout.runtime import RolloutRuntime, current
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.errors import DeadlineError


def generate_rollout_fully_async(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """The next ``--rollout-batch-size`` groups that are done, while generation of others goes on; or an evaluation.
    DeadlineError past ``--rollout-timeout``; HookError or RequestError where more groups failed than a rollout has."""
    if evaluation:
        return generate_rollout(args, rollout_id, data_source, evaluation=True)
    what = f"rollout {rollout_id} (--rollout-timeout)"
    rollout = _next(args, rollout_id, data_source)
    return background_loop().run(rollout, timeout=args.rollout_timeout, what=what, keeps_it=True)


async def _next(args: Namespace, rollout_id: int, source: Any) -> RolloutFnTrainOutput:
    if (runtime := current()) is None:
        raise RuntimeError("a rollout that goes on after the call needs a RolloutRuntime: call it within its active()")
    here = runtime.here()
    if here.stream is None or here.stream.source is not source or here.stream.is_over:
        here.stream = Stream(runtime, args, source)
    output: RolloutFnTrainOutput = await here.stream.rollout(rollout_id)
    return output


class Stream:
    """Groups under way without end, for one data source on one event loop."""

    def __init__(self, runtime: RolloutRuntime, args: Namespace, source: Any) -> None:
        self.source = source
        self._runtime = runtime
        self._args = args
        self._pool: Pool | None = None
        self._state: RolloutState | None = None
        self._changed = asyncio.Condition()
        """Whatever rollouts and room depend on: groups that are done or taken, new weights, the end."""
        self._next = 0
        """The rollout that takes the next groups."""
        self._version = 0
        """The engines' weights are as new as this, also where no driver tells of pushes."""
        self._taken = time.monotonic()
        self.ended = False
        """Whether an error has ended it, and a rollout has raised that: what happens between rollouts is the next's."""
        # A context of its own: what it draws belongs to no rollout until one takes it.
        self._task = asyncio.get_running_loop().create_task(self._generate(), context=contextvars.Context())
        background_loop().track(self._task)
        self._task.add_done_callback(self._tell_of_end)
        self._telling: asyncio.Future[None] | None = None
        """Kept: the event loop itself holds a task only weakly."""

    @property
    def is_over(self) -> bool:
        """Whether its error has been raised, or it was cancelled."""
        return self.ended or self._task.cancelled()

    async def rollout(self, rollout_id: int) -> RolloutFnTrainOutput:
        """Wait for the groups of a rollout and take them; raises as `generate_rollout_fully_async` does."""
        args, started = self._args, time.monotonic()
        # A rollout is only begun when the engines' weights are new enough for it; the one after it may have to wait.
        self._next, self._version = rollout_id, rollout_id - args.max_weight_staleness
        await self._tell()
        try:
            async with self._runtime.here().line.waiting(rollout_id, args.rollout_timeout):
                pool, state, places = await self._until_enough()
                groups = pool.take(places, rollout_id)
                self._next = rollout_id + 1
                all_done = pool.take_all_done()
                metrics = pool.metrics() | {"rollout/groups_under_way": float(pool.num_under_way)}
                await self._tell()
                await finish_batch(args, self.source, state, groups, all_done)
        except DeadlineError:
            raise
        except TimeoutError:
            raise DeadlineError(
                late(args, rollout_id, self._pool.progress() if self._pool else "nothing begun")
            ) from None
        samples, now = flatten_samples(groups), time.monotonic()
        metrics |= speed_metrics(args, samples, now - self._taken) | engine_metrics(samples)
        metrics |= request_metrics(state.replies)
        self._taken = now
        return RolloutFnTrainOutput(samples=groups, metrics=metrics | {"perf/rollout_time": now - started})

    async def _until_enough(self) -> tuple[Pool, RolloutState, list[int]]:
        while True:
            oldest = self._next - self._args.max_weight_staleness
            if self._pool is not None and await self._pool.return_older(oldest):
                await self._tell()  # there is room for others, which may be all that is left to wait for
            async with self._changed:
                if self._task.done():
                    self.ended = True
                    self._task.result()
                if self._pool and self._state:
                    if self._pool.older(oldest):  # since it was looked for
                        continue
                    if (places := self._choice(self._pool)) is not None:
                        return self._pool, self._state, places
                await self._changed.wait()

    def _choice(self, pool: Pool) -> list[int] | None:
        def last(oldest: int | None) -> float:
            return math.inf if oldest is None else oldest + self._args.max_weight_staleness

        done = [last(entry.oldest) for entry in pool.kept]
        under_way = [when for when in map(last, pool.oldest_under_way) if when >= self._next]  # others go back anyway
        return choose(done, under_way, self._args.rollout_batch_size, self._next)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _tell_of_end(self, _: asyncio.Task[None]) -> None:
        self._telling = asyncio.ensure_future(self._tell())

    async def _generate(self) -> None:
        with self._runtime.active(), self._runtime.listening(self._tell), span("rollout/stream"):
            async with rollout_state(self._args) as state:
                self._state, self._pool = state, Pool(self._args, self.source, state, rollout_id=0, forgives=True)
                try:
                    await run_all([self._fill(self._pool), self._advance(self._pool)])
                finally:
                    await self._pool.end()

    async def _fill(self, pool: Pool) -> None:
        def room() -> int:
            return self._limit() - pool.num_under_way - len(pool.kept)

        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: room() > 0)
            await pool.draw(room(), self._newest())

    async def _advance(self, pool: Pool) -> None:
        while True:
            await pool.advance(self._args.rollout_batch_size)
            await self._tell()

    def _limit(self) -> int:
        """How many groups may be outstanding: one that is begun now has the weights that were pushed last and is taken
        by rollout ``_next`` or, behind as many others as a rollout has, by the one after it; ``--max-weight-staleness``
        says by which at the latest."""
        rollouts = self._newest() + self._args.max_weight_staleness - self._next + 1
        return self._args.rollout_batch_size * min(rollouts, self._args.num_rollout - self._next)

    def _newest(self) -> int:
        return max(self._runtime.version, self._version)


def choose(done: Sequence[float], under_way: Sequence[float], wanted: int, rollout_id: int) -> list[int] | None:
    """Which groups a rollout takes: those that were done first, but for as many of those whose time is running out as
    the rollouts after it could not take in time. No group then becomes too old that was begun within `Stream._limit`,
    and long responses are as often trained on as short ones.

    Args:
        done: the last rollout that may take each group that is done, in the order in which they were.
        under_way: the same of those that are not.
        wanted: groups of a rollout.

    Returns:
        Places in ``done``; None where there are too few, or one of those under way has to be waited for.
    """
    if len(done) < wanted:
        return None
    places: dict[int, None] = {}
    for last in sorted({*done, *under_way}):
        due = sum(other <= last for other in done) + sum(other <= last for other in under_way)
        missing = min(due - wanted * (last - rollout_id), wanted) - len(places)
        if missing > 0:
            some = [place for place, other in enumerate(done) if other <= last and place not in places]
            if len(some) < missing:
                return None
            places |= dict.fromkeys(some[: int(missing)])
    others = [place for place in range(len(done)) if place not in places]
    return [*places, *others[: wanted - len(places)]]
