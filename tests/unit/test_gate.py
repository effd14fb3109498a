"""The bound on requests that rollouts share: who comes first, and how many are let in."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

from slime.rollout.engine.gate import FIRST, Gate

NUM_GPUS = 0


@contextlib.asynccontextmanager
async def passing(gate: Gate, rank: tuple[int, int]) -> AsyncIterator[None]:
    await gate.enter(rank)
    try:
        yield
    finally:
        gate.leave()


def test_older_rollouts_come_first_and_evaluations_before_them() -> None:
    order: list[int] = []

    async def pass_through(gate: Gate, rank: int) -> None:
        async with passing(gate, rank):
            order.append(rank)
            await asyncio.sleep(0)

    async def run() -> None:
        gate = Gate(1)
        await asyncio.gather(*(pass_through(gate, rank) for rank in (5, 7, 6, 7, FIRST, 6)))

    asyncio.run(run())
    assert order == [5, FIRST, 6, 6, 7, 7]


def test_a_gate_holds_its_bound_however_many_give_up() -> None:
    async def run() -> None:
        gate, inside, most = Gate(3), 0, 0

        async def pass_through(rank: int) -> None:
            nonlocal inside, most
            async with passing(gate, rank):
                inside += 1
                most = max(most, inside)
                try:
                    await asyncio.sleep(random.random() * 0.002)
                finally:
                    inside -= 1

        tasks = [asyncio.create_task(pass_through(random.randrange(4))) for _ in range(200)]
        for task in random.sample(tasks, 120):
            await asyncio.sleep(random.random() * 0.001)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (most, inside) == (3, 0)
        # All three places are free again.
        async with passing(gate, 0), passing(gate, 0), passing(gate, 0):
            pass

    asyncio.run(asyncio.wait_for(run(), timeout=60))


def test_a_gate_that_shrinks_while_requests_wait_lets_fewer_in() -> None:
    async def run() -> None:
        gate, ends, inside = Gate(4), asyncio.Semaphore(0), 0

        async def request(rank: int) -> None:
            nonlocal inside
            async with passing(gate, (rank, 0)):
                inside += 1
                await ends.acquire()
                inside -= 1

        async def end(count: int) -> int:
            for _ in range(count):
                ends.release()
            for _ in range(10):
                await asyncio.sleep(0)
            return inside

        tasks = [asyncio.create_task(request(rank)) for rank in range(12)]
        assert await end(0) == 4
        gate.set_capacity(2)
        assert [await end(1) for _ in range(4)] == [3, 2, 2, 2], "who is inside may stay, and nobody takes the place"
        gate.set_capacity(5)
        assert await end(0) == 5
        assert await end(7) == 1
        await end(5)
        await asyncio.gather(*tasks)

    asyncio.run(asyncio.wait_for(run(), timeout=60))
