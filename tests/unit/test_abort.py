"""Ending requests at engines, of which one may not answer."""

from __future__ import annotations

import asyncio

import pytest

from slime.rollout.runtime import RolloutRuntime
from tests.fake_servers import Servers

NUM_GPUS = 0


def test_an_engine_that_asks_for_no_key_sees_none(runtime: RolloutRuntime) -> None:
    made = [Servers(), Servers()]
    runtime.set_engines([each.url for each in made], "admin", frozenset([made[1].url]))
    assert asyncio.run(runtime.abort_requests(None))
    assert [each.posted_with for each in made] == [["Bearer admin"], [None]]
    for each in made:
        each.close()


def test_engine_that_does_not_answer_holds_up_no_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, runtime: RolloutRuntime
) -> None:
    monkeypatch.setattr("slime.rollout.runtime._ABORT_ANSWER_S", 0.2)

    async def ended() -> bool:
        server = await asyncio.start_server(lambda reader, writer: asyncio.sleep(3600), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            runtime.set_engines([url], None)
            async with asyncio.timeout(100):
                return await runtime.abort_requests([str(i) for i in range(1000)])
        finally:
            server.close()

    assert asyncio.run(ended())
    assert caplog.text.count("did not answer /abort_request within 0.2 s") == 1
