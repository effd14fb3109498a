"""One object a process holds what its rollouts share: engines that come and go, the pause, weight versions."""

from __future__ import annotations

import asyncio
import contextvars
import multiprocessing
import threading
from argparse import Namespace
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from slime.data import Sample, Status
from slime.rollout.engine import state
from slime.rollout.engine.loop import background_loop
from slime.rollout.fully_async_rollout import generate_rollout_fully_async
from slime.rollout.runtime import EngineSet, RolloutRuntime, current, pushed_version
from slime.rollout.sglang_rollout import generate
from slime.utils import http_utils
from tests.fake_client import FakeClient, reply
from tests.small_rollout import small_rollout

NUM_GPUS = 0
_ANSWER_S = 120.0


class Process:
    """A process of its own, which generates without end, told by a pipe what an actor would be told by a call."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_generate_without_end, args=(theirs,), daemon=True)
        self._process.start()

    def call(self, method: str, *values: Any) -> Any:
        self._pipe.send((method, values))
        assert self._pipe.poll(_ANSWER_S), f"no answer to {method}"
        return self._pipe.recv()

    def end(self) -> None:
        self._process.terminate()
        self._process.join(_ANSWER_S)


def _generate_without_end(pipe: Connection) -> None:
    args = small_rollout(Path("no tokenizer is read"), sglang_server_concurrency=4)
    runtime, seen = RolloutRuntime(args), [0]
    client = FakeClient(lambda *_: seen.append(pushed_version()) or reply("x"), seconds=0.0)
    state.make_client = lambda *_: client

    async def ask() -> None:
        while True:
            await generate(args, Sample(tokens=[1, 2]), {"max_new_tokens": 4})

    async def begin() -> None:
        client.tasks = [asyncio.create_task(ask()) for _ in range(8)]  # type: ignore[attr-defined]

    async def sent(more_than: int) -> int:
        """How many requests were sent, once it is so many and those under way have ended, if they ever do."""
        while len(client.requests) <= more_than:
            await asyncio.sleep(0)
        for _ in range(1000):  # turns of the loop, each of which sends another one where it may
            await asyncio.sleep(0)
        return len(client.requests)

    async def version() -> tuple[int, int]:
        return runtime.version, seen[-1]

    async def pause() -> None:
        runtime.pause_generation()

    calls: dict[str, Callable[..., Any]] = {"pause": pause, "resume": runtime.resume_generation, "sent": sent}
    with runtime.active():
        background_loop().run(begin(), timeout=60, what="begin")
        while True:
            name, values = pipe.recv()
            call = (calls | {"version": version})[name](*values)
            pipe.send(background_loop().run(call, timeout=60, what=name))


def test_several_processes_are_paused_together_and_go_on_under_new_weights() -> None:
    processes = [Process(), Process()]
    try:
        assert all(process.call("sent", 100) > 100 for process in processes)
        for process in processes:
            process.call("pause")
        counts = [process.call("sent", 0) for process in processes]
        assert [process.call("sent", 0) for process in processes] == counts, "neither sends"
        for process in processes:
            process.call("resume", 7)
        for process, before in zip(processes, counts, strict=True):
            assert process.call("sent", before) > before
            assert process.call("version") == (7, 7), "which who is asked sees as well"
    finally:
        for process in processes:
            process.end()


def test_engines_that_come_and_go_decide_how_many_requests_are_in_flight() -> None:
    runtime = RolloutRuntime(Namespace(request_timeout=9.0, sglang_server_concurrency=3, num_engines=2))
    assert runtime.capacity == 6, "as planned, until they are known"

    async def run() -> list[int]:
        gate, found = runtime.here().gate, []

        async def set_to(*urls: str) -> None:
            runtime.set_engines(urls, "key")
            await asyncio.sleep(0)
            found.append(gate._capacity)

        await set_to("http://a")
        await set_to("http://a", "http://b", "http://c")
        assert runtime.engines == EngineSet(2, ("http://a", "http://b", "http://c"), "key")
        await set_to("http://c")
        await set_to()
        return found

    assert asyncio.run(run()) == [3, 9, 3, 3]


def test_whoever_waits_on_whatever_loop_goes_on(runtime: RolloutRuntime) -> None:
    told: list[int] = []

    async def tell() -> None:
        told.append(runtime.version)

    async def wait(goes: asyncio.Event | None = None) -> int:
        with runtime.listening(tell):
            async with runtime.acquire((0, 0), held=goes.set if goes else lambda: None):
                return runtime.version

    async def run() -> list[int]:
        runtime.pause_generation()
        others, goes = [asyncio.to_thread(lambda: asyncio.run(wait())) for _ in "ab"], asyncio.Event()
        waiting = [asyncio.ensure_future(job) for job in (wait(goes), *others)]
        await goes.wait()
        while len(runtime._pause._waiting) < 3:
            await asyncio.sleep(0)
        assert not any(job.done() for job in waiting)
        await runtime.resume_generation(4)
        return await asyncio.gather(*waiting)

    assert asyncio.run(asyncio.wait_for(run(), 60)) == [4, 4, 4]
    assert told[0] == 4


def test_a_call_outside_of_a_runtime_has_one_to_itself(
    rollout_args: Callable[..., Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    clients: list[FakeClient] = []

    def make_client(*_: Any) -> FakeClient:
        assert current() is not None
        clients.append(FakeClient())
        return clients[-1]

    monkeypatch.setattr(state, "make_client", make_client)
    args, sample = rollout_args(), Sample(tokens=[1, 2])
    contextvars.Context().run(asyncio.run, generate(args, sample, {"max_new_tokens": 4}))
    assert sample.status is Status.COMPLETED
    assert [len(client.requests) for client in clients] == [1]
    with pytest.raises(RuntimeError, match="needs a RolloutRuntime"):
        contextvars.Context().run(generate_rollout_fully_async, args, 0, None)


def test_a_thread_of_the_users_finds_the_runtime_of_the_process(
    runtime: RolloutRuntime, rollout_args: Callable[..., Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins with an empty context, as upstream's fully asynchronous worker does."""
    client, found = FakeClient(), []
    monkeypatch.setattr(state, "make_client", lambda *_: client)
    args, samples = rollout_args(), [Sample(tokens=[1, 2]) for _ in range(2)]
    runtime.own_process()

    def work() -> None:
        found.extend([current(), http_utils.current_http()])
        for sample in samples:
            asyncio.run(generate(args, sample, {"max_new_tokens": 4}))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert found == [runtime, runtime.http]
    assert [sample.status for sample in samples] == [Status.COMPLETED] * 2
    assert len(client.requests) == 2


def test_requests_go_on_whatever_a_listener_raises(runtime: RolloutRuntime) -> None:
    async def fail() -> None:
        raise ValueError("of a listener")

    async def run() -> str:
        with runtime.listening(fail):
            runtime.pause_generation()
            with pytest.raises(ValueError, match="of a listener"):
                await runtime.resume_generation(3)
        async with runtime.acquire((0, 0)):
            return "in"

    assert asyncio.run(asyncio.wait_for(run(), 60)) == "in"


def test_a_rollouts_client_is_not_used_on_another_loop(
    rollout_args: Callable[..., Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a plain function's `asyncio.run`, in a thread that has the rollout's context."""
    clients: list[FakeClient] = []
    monkeypatch.setattr(state, "make_client", lambda *_: clients.append(FakeClient()) or clients[-1])
    args, sample = rollout_args(), Sample(tokens=[1, 2])

    async def rollout() -> None:
        async with state.rollout_state(args):
            await asyncio.to_thread(lambda: asyncio.run(generate(args, sample, {"max_new_tokens": 4})))

    asyncio.run(rollout())
    assert [len(client.requests) for client in clients] == [0, 1]
