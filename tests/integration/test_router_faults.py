"""The real router where engines die, where it hangs, and where its port is taken; stand-ins for the engines."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from aiohttp import web

from slime.backends.sglang.client import EngineError, GenerateClient
from slime.backends.sglang.router import Router
from slime.utils.http_client import Http
from tests.integration.tiny import KEYS, engine_args

NUM_GPUS = 0
pytestmark = pytest.mark.integration


@dataclass
class Engine:
    """A server that answers with its name, or that breaks off all it was asked, and is gone."""

    name: str
    dies: bool = False
    asked: list[web.Request] = field(default_factory=list)

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/{path:.*}", self._describe)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    @property
    def is_gone(self) -> bool:
        return not self._runner.sites

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _describe(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"model_path": "m"})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request)
        if not self.dies:
            return web.json_response({"text": "", "meta_info": {"by": self.name}})
        await asyncio.sleep(0.5)
        for broken in self.asked:
            if broken.transport is not None:
                broken.transport.abort()
        for site in list(self._runner.sites):
            await site.stop()
        return web.Response()


@asynccontextmanager
async def served(directory: Path, *engines: Engine) -> AsyncIterator[tuple[Router, GenerateClient]]:
    """A router that has the first of the engines, all of which run, and a client of it."""
    asked = {"rollout_health_check_interval": 60.0, "rollout_health_check_timeout": 1.0}
    router = Router(engine_args(directory, directory, **asked), "127.0.0.1", KEYS, directory / "router.log")
    http = Http(60.0)
    for engine in engines:
        await engine.start()
    try:
        await asyncio.to_thread(router.start)
        await add(router, engines[0])
        yield router, GenerateClient(http, router.url, KEYS[0], retries=30)
    finally:
        await http.close()
        await asyncio.to_thread(router.stop)
        for engine in engines:
            await engine.stop()


async def add(router: Router, engine: Engine) -> None:
    await asyncio.to_thread(router.add, engine.url)
    await asyncio.to_thread(router.wait_registered, [engine.url], 60)


def within_limit(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 300))


def test_requests_of_an_engine_that_dies_are_sent_to_the_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        doomed, other = Engine("the doomed", dies=True), Engine("the other")
        async with served(tmp_path, doomed, other) as (router, client):
            calls = [asyncio.ensure_future(client.generate([i] * 9, {"max_new_tokens": 3})) for i in range(40)]
            while not doomed.asked or not doomed.is_gone:
                await asyncio.sleep(0.1)
            await add(router, other)
            for _ in range(2):  # whoever finds it gone
                await asyncio.to_thread(router.remove, doomed.url)
            replies = await asyncio.gather(*calls)
            assert [reply["meta_info"]["by"] for reply in replies] == ["the other"] * 40

    within_limit(scenario)


def test_a_router_that_hangs_is_found_and_comes_back_at_its_address(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = Engine("the engine")
        async with served(tmp_path, engine) as (router, client):
            router.listen()
            router.check()
            await asyncio.to_thread(router.examine, "nothing: it answers")
            for process in psutil.Process(supervisor_of(router)).children():
                process.suspend()
            with pytest.raises(EngineError, match=r"router at http://\S+ hangs: .*/liveness: no answer within 1 s"):
                await asyncio.to_thread(router.examine, "being stopped")
            address = router.url
            await asyncio.to_thread(router.restart)
            assert router.url == address
            assert not router.registered(), "whoever has the table tells it"
            await add(router, engine)
            router.check()
            assert (await client.generate([1], {}))["meta_info"]["by"] == "the engine"

    within_limit(scenario)


def test_a_router_whose_port_was_taken_meanwhile_says_so_and_can_be_started_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, Engine("the engine")) as (router, _):
            address = router.url
            await asyncio.to_thread(router._halt)
            host, port = address.removeprefix("http://").split(":")
            with socket.create_server((host, int(port))) as taken:
                with pytest.raises(EngineError, match=r"router at http://\S+ ended with status 1\n"):
                    await asyncio.to_thread(router.restart)
                taken.setblocking(False)
                with pytest.raises(BlockingIOError):  # whoever has its port is not asked in its place, by its key
                    taken.accept()
            await asyncio.to_thread(router.restart)
            assert router.url == address

    within_limit(scenario)


def supervisor_of(router: Router) -> int:
    assert router._process is not None
    assert router._process.pid is not None
    return router._process.pid
