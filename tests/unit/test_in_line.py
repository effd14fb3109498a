"""Deadlines of rollouts that wait behind others: they stand still meanwhile, and say truly what was waited for."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.data import Sample
from slime.data.source.prompts import draw_groups
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.engine.gate import FIRST, Line
from slime.rollout.engine.loop import background_loop
from slime.rollout.engine.state import RolloutState
from slime.rollout.groups.collect import collect
from slime.rollout.runtime import RolloutRuntime
from slime.utils.errors import DeadlineError
from tests.fake_client import FakeClient, hook_file, reply, rollout
from tests.waiting import skip

NUM_GPUS = 0

Args = Callable[..., Namespace]
Use = Callable[..., FakeClient]


def test_a_deadline_runs_only_for_the_first_in_line() -> None:
    ends: dict[int, str] = {}

    line = Line()

    async def stay(rank: int, until: asyncio.Event, seconds: float | None = 10.0) -> None:
        try:
            async with line.waiting(rank, seconds):
                await until.wait()
            ends[rank] = "done"
        except TimeoutError:
            ends[rank] = "late"

    async def scenario() -> None:
        async def settle() -> None:
            for _ in range(20):  # turns of the loop: what can go on has done so, whatever the clock says
                await asyncio.sleep(0)

        async def pass_by(seconds: float) -> None:
            await settle()
            skip(seconds)
            await settle()

        older, never, evaluated = asyncio.Event(), asyncio.Event(), asyncio.Event()
        jobs = [asyncio.create_task(stay(5, older)), asyncio.create_task(stay(6, never))]
        await pass_by(9)
        assert not ends
        older.set()
        await pass_by(6)
        assert ends == {5: "done"}, "the younger one has its own ten seconds from now on"
        jobs.append(asyncio.create_task(stay(FIRST, evaluated, seconds=None)))
        await pass_by(100)
        assert ends == {5: "done"}, "an evaluation comes first"
        evaluated.set()
        await pass_by(3)
        assert set(ends) == {5, FIRST}, "nine of the ten are over"
        await pass_by(2)
        assert ends == {5: "done", FIRST: "done", 6: "late"}
        await asyncio.gather(*jobs)

    asyncio.run(scenario())


def test_what_is_shown_of_a_sample_with_several_requests(make_args: Args, use: Use, runtime: RolloutRuntime) -> None:
    """However they get their places: that one has none, while one has none, and then what the sample does."""
    use(FakeClient())

    async def scenario() -> None:
        state = RolloutState(make_args(), runtime, rank=0)
        with state.doing(Sample(index=5), "generating"):
            doing = next(iter(state._doing.values()))
            first, second = doing.in_line("waiting for a place"), doing.in_line("waiting for a place")
            first.__enter__()
            second.__enter__()
            assert "sample 5 (waiting for a place for" in state.progress()
            first.__exit__(None, None, None)
            assert "sample 5 (waiting for a place for" in state.progress()
            second.__exit__(None, None, None)
            assert "sample 5 (generating for" in state.progress()
            with doing.in_line("waiting for a place") as goes_on:
                goes_on("held back by a weight update")
                assert "sample 5 (held back by a weight update for" in state.progress()

    asyncio.run(scenario())


def test_a_rollout_that_waits_behind_an_older_one_ends_well(make_args: Args, use: Use) -> None:
    """The older one takes almost all of its own time, which leaves the younger one none if it counted from its
    beginning."""

    older_ended = asyncio.Event()

    async def answer(number: int, input_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        if len(input_ids) == 1:
            skip(9)
        elif len(input_ids) > 4:  # the younger one's prompts
            await older_ended.wait()
            if len(input_ids) == 8:
                skip(9)
        return reply("x")

    use(FakeClient(answer))
    args = make_args(asynchronous=True, max_weight_staleness=1, sglang_server_concurrency=8, rollout_timeout=20.0)
    source = RolloutDataSourceWithBuffer(args)

    async def both() -> list[Any]:
        older, younger = [
            asyncio.create_task(collect(args, number, source, draw_groups(args, source, 4), 4)) for number in (0, 1)
        ]
        older.add_done_callback(lambda _: older_ended.set())
        return await asyncio.gather(older, younger)

    first, second = background_loop().run(both(), timeout=60, what="two rollouts")
    assert len(first.samples) == len(second.samples) == 4


@pytest.mark.parametrize("counts", [False, True])
def test_the_limit_of_a_call_counts_only_what_it_does_itself(
    counts: bool, make_args: Args, use: Use, tmp_path: Path
) -> None:
    """One request is served at a time, and takes a third of the limit; each call makes two, and waits for others."""

    async def answer(number: int, input_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        if not counts:
            skip(6)
        return reply("x")

    use(FakeClient(answer))
    hook = hook_file(
        tmp_path,
        "import asyncio\n"
        "from slime.rollout.sglang_rollout import generate as ask\n"
        "from tests.waiting import skip\n"
        "async def generate(args, sample, params):\n"
        "    for _ in range(2):\n"
        "        sample = await ask(args, sample, params)\n"
        f"    if {counts}:\n"
        "        skip(30)\n"
        "        await asyncio.sleep(60)\n"
        "    return sample\n",
    )
    args = make_args(
        custom_generate_function_path=f"{hook}:generate",
        generate_timeout=20.0,
        sglang_server_concurrency=1,
        on_sample_error="stop",
        rollout_timeout=10**6,
    )
    source = RolloutDataSourceWithBuffer(args)
    if counts:
        with pytest.raises(DeadlineError, match=r"took longer than 20 s \(--generate-timeout\)"):
            rollout(args, 0, source)
    else:
        assert len(rollout(args, 0, source).samples) == 4


@pytest.mark.parametrize("why", ["place", "push"])
def test_the_message_says_that_a_request_waits_and_for_what(
    why: str, make_args: Args, use: Use, runtime: RolloutRuntime
) -> None:
    async def answer(number: int, input_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        asyncio.get_running_loop().call_later(0.05, skip, 30)
        await asyncio.sleep(100)
        return reply("x")

    use(FakeClient(answer))
    args = make_args(sglang_server_concurrency=1 if why == "place" else 100, rollout_timeout=20.0)
    source = RolloutDataSourceWithBuffer(args)

    async def late() -> None:
        if why == "push":
            runtime.pause_generation()
            asyncio.get_running_loop().call_later(0.05, skip, 30)
        try:
            await collect(args, 0, source, draw_groups(args, source, 4), 4)
        finally:
            await runtime.resume_generation()

    waits = {
        "place": r"sample 0 \(generating for .*sample 1 \(waiting for a place among the requests in flight for",
        "push": r"sample 0 \(held back by a weight update for",
    }
    with pytest.raises(DeadlineError, match=rf"rollout 0: 0 of 8 samples finished; .*{waits[why]}"):
        background_loop().run(late(), timeout=60, what="a rollout")
    background_loop.cache_clear()
