"""Turns that do not come to their end: engines that fail, clients that go away, sessions that are closed."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from openai.types.responses import ResponseError, ResponseFailedEvent

from slime.agent.gateway import Gateway
from slime.agent.rendering import TurnRenderer
from slime.agent.session import SessionError
from tests.unit.test_agent_gateway import ASK, of_anthropic, of_openai, renderer, served, session

__all__ = ["renderer"]  # a fixture
NUM_GPUS = 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_has_had_no_turn(renderer: TurnRenderer, stream: bool) -> None:
    made, engine = session(renderer, "a" * 50, "b")
    begun = asyncio.Event()

    async def pause() -> None:
        begun.set()
        await asyncio.sleep(0.05)

    async def use(url: str, key: str) -> None:
        engine.pause = pause
        headers = {"Authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession() as client:
            body = {"messages": ASK, "stream": stream}
            asking = asyncio.create_task(client.post(f"{url}/v1/chat/completions", json=body, headers=headers))
            await asyncio.wait_for(begun.wait(), 60)
            if stream:
                (await asking).close()
            asking.cancel()
        for _ in range(200):
            if engine.cancelled:
                break
            await asyncio.sleep(0.05)
        engine.pause = lambda: asyncio.sleep(0)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
            reply = await client.chat.completions.create(model="m", messages=ASK)
            assert reply.choices[0].message.content == "b"

    asyncio.run(served(made, use))
    assert engine.cancelled == 1
    assert made.memory.counters.turns == 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_is_told_in_the_apis_form(renderer: TurnRenderer, stream: bool) -> None:
    made, engine = session(renderer, "ab", "ab")
    failed = 0

    async def pause() -> None:
        nonlocal failed
        failed += 1
        if failed % 2 == 0:
            raise SessionError(503, "the rollout has enough samples")

    engine.pause = pause

    async def use(client: anthropic.AsyncAnthropic) -> None:
        how: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": ASK}

        async def ask() -> None:
            if not stream:
                await client.messages.create(**how)
            async with client.messages.stream(**how) as events:
                await events.get_final_message()

        with pytest.raises(anthropic.APIStatusError, match="the rollout has enough samples"):
            await ask()

    of_anthropic(made, use)
    assert made.memory.counters.turns == 0


def test_a_response_that_fails_in_its_middle_says_so_as_openais_does(renderer: TurnRenderer) -> None:
    made, engine = session(renderer, "abcd")
    errors = iter([None, None, SessionError(503, "the rollout has enough samples")])

    async def pause() -> None:
        if (error := next(errors)) is not None:
            raise error

    engine.pause = pause

    async def use(client: openai.AsyncOpenAI) -> None:
        events = [event async for event in await client.responses.create(model="m", input="?", stream=True)]
        assert "response.output_text.delta" in [event.type for event in events]
        last = events[-1]
        assert isinstance(last, ResponseFailedEvent)
        assert (last.sequence_number, last.response.status) == (len(events) - 1, "failed")
        assert last.response.error == ResponseError(code="server_error", message="the rollout has enough samples")
        assert last.response.id == events[0].response.id  # type: ignore[union-attr]

    of_openai(made, use)
    assert made.memory.counters.turns == 0


def test_a_closed_session_ends_its_turns_and_takes_no_more(renderer: TurnRenderer) -> None:
    made, engine = session(renderer, "a" * 50)
    gateway = Gateway()
    begun = asyncio.Event()

    async def pause() -> None:
        begun.set()
        await asyncio.sleep(60)

    engine.pause = pause

    async def use(url: str, key: str) -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
            asking = asyncio.create_task(client.chat.completions.create(model="m", messages=ASK))
            await asyncio.wait_for(begun.wait(), 60)
            assert await gateway.close_session(key, wait=0.05) is made
            with pytest.raises(openai.APIError):
                await asyncio.wait_for(asking, 60)
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="m", messages=ASK)
            assert await gateway.close_session(key) is None

    asyncio.run(served(made, use, gateway))
    assert engine.cancelled == 1
