"""A rollout function for train_async.py that never stops generating: rollouts take what is done, across weight pushes.

``--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async``. slime's own rollout ends
when its last response does; here the groups of later rollouts are under way meanwhile, as many as can still be trained
within ``--max-weight-staleness``.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from argparse import Namespace
from typing import Any
from weakref import WeakKeyDictionary

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, flatten_samples
from slime.rollout.collect import finish_batch
from slime.rollout.loop import background_loop, run_all
from slime.rollout.metrics import engine_metrics, speed_metrics
from slime.rollout.pool import Pool
from slime.rollout.sglang_rollout import generate_rollout
from slime.rollout.state import RolloutState, rollout_state
from slime.rollout.versions import forget_listener, on_push, pushed_version, staleness
from slime.utils.errors import DeadlineError


def generate_rollout_fully_async(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """The next ``--rollout-batch-size`` groups that are done; generation of others goes on. Or an evaluation.

    Raises:
        DeadlineError: ``--rollout-timeout`` passed before as many were done.
        HookError, RequestError: more groups failed, or crashed, than a rollout has.
    """
    if evaluation:
        return generate_rollout(args, rollout_id, data_source, evaluation=True)
    what = f"rollout {rollout_id} (--rollout-timeout)"
    return background_loop().run(_next(args, rollout_id, data_source), timeout=args.rollout_timeout, what=what)


async def _next(args: Namespace, rollout_id: int, source: Any) -> RolloutFnTrainOutput:
    loop = asyncio.get_running_loop()
    stream = _streams.get(loop)
    if stream is None or stream.source is not source or stream.ended:
        stream = _streams[loop] = Stream(args, source)
    return await stream.rollout(rollout_id)


class Stream:
    """Groups under way without end, for one data source on one event loop."""

    def __init__(self, args: Namespace, source: Any) -> None:
        self.source = source
        self._args = args
        self._pool: Pool | None = None
        self._state: RolloutState | None = None
        self._changed = asyncio.Condition()
        """Whatever rollouts and room depend on: groups that are done or taken, new weights, the end."""
        self._next = 0
        """The rollout that takes the next groups."""
        # A context of its own: what it draws belongs to no rollout until one takes it.
        self._task = asyncio.get_running_loop().create_task(self._generate(), context=contextvars.Context())

    @property
    def ended(self) -> bool:
        """Whether an error has ended it."""
        return self._task.done()

    async def rollout(self, rollout_id: int) -> RolloutFnTrainOutput:
        """Wait for the groups of a rollout and take them; raises as `generate_rollout_fully_async` does."""
        args, started = self._args, time.monotonic()
        self._next = rollout_id
        await self._tell()
        try:
            async with asyncio.timeout(args.rollout_timeout), self._changed:
                await self._changed.wait_for(lambda: self._task.done() or self._has_enough())
        except TimeoutError:
            limit = f"within {args.rollout_timeout:g} s (--rollout-timeout)"
            done = self._state.progress() if self._state else "nothing has begun"
            raise DeadlineError(f"rollout {rollout_id}: {done} {limit}") from None
        if self._task.done():
            self._task.result()
        assert self._pool is not None
        groups = self._pool.take(args.rollout_batch_size)
        self._next = rollout_id + 1
        all_done, self._pool.all_done = self._pool.all_done, []
        metrics = self._pool.metrics() | {"rollout/groups_under_way": float(self._pool.num_under_way)}
        await self._tell()
        await finish_batch(args, self.source, groups, all_done)
        samples = flatten_samples(groups)
        metrics |= speed_metrics(args, samples, time.monotonic() - started) | engine_metrics(samples)
        return RolloutFnTrainOutput(samples=groups, metrics=metrics)

    def _has_enough(self) -> bool:
        """Whether a rollout can be taken; what has become too old for it goes back, to be generated anew."""
        if self._pool is None:
            return False
        self._pool.return_stale(lambda sample: (staleness(sample, self._next) or 0) > self._args.max_weight_staleness)
        return len(self._pool.kept) >= self._args.rollout_batch_size

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _generate(self) -> None:
        on_push(self._tell)
        async with rollout_state(self._args) as state:
            self._state, self._pool = state, Pool(self._args, self.source, state, rollout_id=0, forgives=True)
            try:
                await run_all([self._fill(self._pool), self._advance(self._pool)])
            finally:
                forget_listener(self._tell)
                await self._pool.end()
                # Not within this task, which a waiting rollout wants to see done.
                asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self._tell()))

    async def _fill(self, pool: Pool) -> None:
        def room() -> int:
            return self._limit() - pool.num_under_way - len(pool.kept)

        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: room() > 0)
            await pool.draw(room())

    async def _advance(self, pool: Pool) -> None:
        while True:
            await pool.advance(None, self._args.rollout_batch_size)
            await self._tell()

    def _limit(self) -> int:
        """How many groups may be outstanding.

        A group that is begun now has the weights that were pushed last and is taken by rollout ``_next`` or, behind as
        many others as a rollout has, by the one after it; ``--max-weight-staleness`` says by which at the latest.
        """
        # A rollout is only begun when the engines' weights are new enough for it.
        version = max(pushed_version(), self._next - self._args.max_weight_staleness)
        return self._args.rollout_batch_size * (version + self._args.max_weight_staleness - self._next + 1)


_streams: WeakKeyDictionary[asyncio.AbstractEventLoop, Stream] = WeakKeyDictionary()
