"""Ending requests at engines, of which one may not answer."""

from __future__ import annotations

import asyncio

import pytest

from slime.rollout.runtime import RolloutRuntime

NUM_GPUS = 0


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
