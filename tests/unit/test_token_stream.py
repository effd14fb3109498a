"""Replies that come as they are made: of engines that send what is new, of others that send all so far, and broken."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from aiohttp import web

from slime.backends.sglang.client import GenerateClient, RequestError
from slime.data import Sample, Status
from slime.rollout.engine.generation import generate
from slime.utils.http_client import Http
from tests.fake_client import FakeClient

NUM_GPUS = 0


def event(pairs: Sequence[tuple[float, int]], total: int, finish: str | None = None, version: str = "3") -> str:
    meta = {"output_token_logprobs": [[value, token, None] for value, token in pairs], "completion_tokens": total}
    reason = None if finish is None else {"type": finish}
    return f"data: {json.dumps({'meta_info': meta | {'weight_version': version, 'finish_reason': reason}})}\n\n"


MADE = [(-0.5, 7), (-1.5, 8), (-2.5, 9), (-3.5, 10)]
NEW = [event(MADE[:1], 1), event(MADE[1:3], 3), event(MADE[3:], 4, "stop"), "data: [DONE]\n\n"]
ALL = [event(MADE[:1], 1), event(MADE[:3], 3), event(MADE, 4, "stop"), "data: [DONE]\n\n"]
LATE_END = [event(MADE, 4), event([], 4, "length")]


async def answered(tries: list[tuple[list[str], int | None]], retries: int = 2) -> tuple[dict[str, Any], list[int]]:
    """The reply, and the tokens as they came, of a server that answers its requests so, in order: with events, or with
    what of their bytes comes before the connection breaks off."""
    asked = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        assert (await request.json())["stream"] is True
        events, cut = tries[asked]
        asked += 1
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await reply.prepare(request)
        data = "".join(events).encode()
        for start in range(0, len(data[:cut]), 50):  # events end anywhere in what comes at once
            await reply.write(data[:cut][start : start + 50])
        if cut is not None:
            assert request.transport is not None
            request.transport.close()
        return reply

    app = web.Application()
    app.router.add_post("/generate", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    http, came = Http(30.0), list[int]()
    try:
        client = GenerateClient(http, f"http://127.0.0.1:{port}", None, retries)
        return await client.generate([1, 2], {}, on_tokens=came.extend), came
    finally:
        await http.close()
        await runner.cleanup()


@pytest.mark.parametrize("events", [NEW, ALL, LATE_END])
def test_tokens_come_once_each_however_events_have_them(events: list[str]) -> None:
    reply, came = asyncio.run(answered([(events, None)]))
    assert came == [7, 8, 9, 10]
    assert [(pair[0], pair[1]) for pair in reply["meta_info"]["output_token_logprobs"]] == MADE
    assert reply["meta_info"]["finish_reason"]["type"] == ("length" if events is LATE_END else "stop")
    assert reply["meta_info"]["weight_version"] == "3"


def test_a_reply_that_breaks_off_is_asked_for_again_or_is_as_if_aborted() -> None:
    before_any = "".join(NEW).index("\n\n") - 3
    reply, came = asyncio.run(answered([(NEW, before_any), (NEW, 0), (NEW, None)]))
    assert (came, reply["meta_info"]["finish_reason"]["type"]) == ([7, 8, 9, 10], "stop")
    after_two = len("".join(NEW[:2]))
    reply, came = asyncio.run(answered([(NEW, after_two + 9)]))
    assert (came, reply["meta_info"]["finish_reason"]["type"]) == ([7, 8, 9], "abort")
    with pytest.raises(RequestError, match="ClientPayloadError"):
        asyncio.run(answered([(['data: {"error": {"message": "no"}}\n\n'], None)] * 2, retries=1))


def test_what_is_streamed_goes_on_behind_an_abort(make_args: Callable[..., Any], use: Callable[..., Any]) -> None:
    class Streaming(FakeClient):
        async def generate(self, input_ids: Any, sampling_params: Any, **fields: Any) -> dict[str, Any]:
            on_tokens = fields.pop("on_tokens")
            reply = await super().generate(input_ids, sampling_params, **fields)
            on_tokens([pair[1] for pair in reply["meta_info"]["output_token_logprobs"]])
            return {"meta_info": reply["meta_info"]}

    from tests.fake_client import reply as made

    client = use(Streaming(lambda number, ids, params: made("ab", "abort" if number == 1 else "stop", number)))
    came: list[int] = []
    sample = Sample(index=0, tokens=[1, 2, 3], prompt="x")
    params = {"max_new_tokens": 8}
    sample = asyncio.run(generate(make_args(), sample, params, on_tokens=came.extend))
    assert sample.tokens[3:] == came
    assert len(came) == 4
    assert (sample.status, sample.weight_versions) == (Status.COMPLETED, ["1", "2"])
    assert [request[0] for request in client.requests] == [[1, 2, 3], [1, 2, 3, *came[:2]]]
    assert sample.response, "of the tokens: a stream has no text"
