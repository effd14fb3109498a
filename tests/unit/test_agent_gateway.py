"""The gateway with the clients that agents use, OpenAI's and Anthropic's; the engine says what it is told to."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from aiohttp import web
from transformers import AutoTokenizer

from slime.agent.adapters.api import warn_left_out
from slime.agent.gateway import Gateway
from slime.agent.rendering import TurnRenderer
from slime.agent.rollout import AgentError, generate
from slime.agent.session import Budget, Generated, Session
from slime.data import Sample
from slime.observability import trace
from tests import chat_templates

NUM_GPUS = 0
PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
FUNCTION = {"name": "ls", "description": "", "parameters": PATH | {"additionalProperties": False}, "strict": True}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
CALL = '<tool_call>\n{"name": "ls", "arguments": {"path": "/"}}\n</tool_call>'
END = "<|im_end|>"


@pytest.fixture(scope="module")
def renderer(make_tokenizer: Callable[[str | None], Path]) -> TurnRenderer:
    return TurnRenderer(AutoTokenizer.from_pretrained(str(make_tokenizer(chat_templates.QWEN_3))))


class Engine:
    """Answers by the texts that it was given, a token at a time."""

    def __init__(self, renderer: TurnRenderer, *answers: str, reason: str = "stop") -> None:
        self._renderer, self.answers, self._reason = renderer, list(answers), reason
        self.asked: list[tuple[list[int], dict[str, Any]]] = []
        self.cancelled = 0
        self.pause: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0)

    async def generate(
        self, prompt: list[int], params: dict[str, Any], on_tokens: Callable[[Sequence[int]], None] | None
    ) -> Generated:
        self.asked.append((prompt, params))
        ids = self._renderer._tokenizer(self.answers.pop(0), add_special_tokens=False)["input_ids"]
        ids = ids[: params["max_new_tokens"]]
        try:
            for token in ids:
                await self.pause()
                if on_tokens is not None:
                    on_tokens([token])
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        log_probs = [-0.5] * len(ids)
        return Generated(ids, log_probs, self._reason, [("7", len(ids))], {"cached_tokens": 3})

    async def read_calls(self, parser: str, text: str, tools: Any) -> list[Any]:
        assert parser == "llama3"
        call = json.loads(text.removeprefix("<|python_tag|>"))
        return [{"name": call["name"], "input": call["arguments"]}]


def session(renderer: TurnRenderer, *answers: str, reason: str = "stop", **options: Any) -> tuple[Session, Engine]:
    engine = Engine(renderer, *answers, reason=reason)
    return Session(engine, renderer, **options), engine


async def served(made: Session, use: Callable[[str, str], Awaitable[Any]], gateway: Gateway | None = None) -> Any:
    """What ``use`` gives, with the gateway's address and the session's key."""
    gateway = gateway or Gateway()
    runner = web.AppRunner(gateway.app(), handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        return await use(f"http://127.0.0.1:{runner.addresses[0][1]}", gateway.open_session(made))
    finally:
        await runner.cleanup()


def of_openai(made: Session, use: Callable[[openai.AsyncOpenAI], Awaitable[Any]], *, in_path: bool = False) -> Any:
    async def run(url: str, key: str) -> Any:
        base = f"{url}/sessions/{key}/v1" if in_path else f"{url}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="any" if in_path else key, max_retries=0) as client:
            return await use(client)

    return asyncio.run(served(made, run))


def of_anthropic(made: Session, use: Callable[[anthropic.AsyncAnthropic], Awaitable[Any]]) -> Any:
    async def run(url: str, key: str) -> Any:
        async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:
            return await use(client)

    return asyncio.run(served(made, run))


ASK: list[Any] = [{"role": "user", "content": "What is there?"}]
ANSWERS = (f"<think>\nHm.\n</think>\n\nI look.\n{CALL}{END}", f"<think>\nSo.\n</think>\n\nNothing \u00fcber.{END}")


def test_turns_are_within_the_span_of_the_sample_whose_session_it_is(renderer: TurnRenderer, tmp_path: Path) -> None:
    trace.begin(str(tmp_path), "rollout_manager")
    try:
        with trace.span("rollout/generating", sample=3):
            made, _ = session(renderer, ANSWERS[1])
        of_openai(made, lambda client: client.chat.completions.create(model="any", messages=ASK))
        trace.flush()
    finally:
        trace._forget()
    lines = (tmp_path / "trace" / "rollout_manager.jsonl").read_text().splitlines()
    sample, turn = map(json.loads, lines)
    assert (turn["name"], turn["sample"], turn["parent"]) == ("agent/turn", 3, sample["id"])


def check_what_was_asked(engine: Engine, made: Session) -> None:
    """Two turns, the second behind the first, token for token; both are trained."""
    (first, params), (second, _) = engine.asked
    text = made.memory.renderer.decode(second)
    assert text.startswith(made.memory.renderer.decode(first) + ANSWERS[0])
    assert text.endswith("<tool_response>\na b\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert params["max_new_tokens"] == 512
    (sample,) = made.samples(Sample(index=1), 1.0)
    assert sample.loss_mask is not None
    trained = [
        token for token, mask in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True) if mask
    ]
    assert made.memory.renderer.decode(trained) == "".join(ANSWERS)
    assert sample.weight_versions == ["7", "7"]
    assert sample.metadata["agent"]["turns"] == 2
    assert sample.metadata["agent"]["forks"] == 0


@pytest.mark.parametrize("in_path", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_openais_client_has_a_tool_called(renderer: TurnRenderer, stream: bool, in_path: bool) -> None:
    made, engine = session(renderer, *ANSWERS, params={"max_new_tokens": 512, "temperature": 1.0})

    async def ask(client: openai.AsyncOpenAI, messages: list[Any]) -> Any:
        how: dict[str, Any] = {"model": "m", "messages": messages, "tools": TOOLS, "temperature": 0.1, "seed": 3}
        if not stream:
            return (await client.chat.completions.create(**how)).choices[0]
        async with client.chat.completions.stream(**how, stream_options={"include_usage": True}) as events:
            kinds = {event.type async for event in events}
            assert {"chunk", "content.delta"} <= kinds
            return (await events.get_final_completion()).choices[0]

    async def use(client: openai.AsyncOpenAI) -> None:
        assert [model.id async for model in client.models.list()] == ["slime"]
        first = await ask(client, ASK)
        assert first.finish_reason == "tool_calls"
        assert first.message.content == "I look."
        (call,) = first.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("ls", {"path": "/"})
        again = {"role": "assistant", "content": "I look. ", "tool_calls": [call.model_dump(exclude={"index"})]}
        again["tool_calls"][0]["function"]["arguments"] = ' {"path":"/"}'  # and its thoughts are gone
        result = {"role": "tool", "tool_call_id": call.id, "content": "a b"}
        second = await ask(client, [*ASK, again, result])
        assert (second.finish_reason, second.message.content) == ("stop", "Nothing \u00fcber.")

    of_openai(made, use, in_path=in_path)
    check_what_was_asked(engine, made)
    assert engine.asked[0][1]["temperature"] == 1.0, "as it is trained, whatever the client asks for"


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_client_has_a_tool_called(renderer: TurnRenderer, stream: bool) -> None:
    made, engine = session(renderer, *ANSWERS, params={"max_new_tokens": 512})
    tools: list[Any] = [{"name": "ls", "description": "", "input_schema": FUNCTION["parameters"]}]

    async def ask(client: anthropic.AsyncAnthropic, messages: list[Any]) -> Any:
        how: dict[str, Any] = {"model": "m", "max_tokens": 1024, "messages": messages, "tools": tools}
        if not stream:
            return await client.messages.create(**how)
        async with client.messages.stream(**how) as events:
            kinds = [event.type async for event in events]
            assert {"thinking", "text", "content_block_start", "content_block_stop", "message_stop"} <= set(kinds)
            return await events.get_final_message()

    async def use(client: anthropic.AsyncAnthropic) -> None:
        first = await ask(client, ASK)
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
        assert (first.content[0].thinking, first.content[1].text) == ("Hm.", "I look.")
        assert (first.content[2].name, first.content[2].input) == ("ls", {"path": "/"})
        assert first.stop_reason == "tool_use"
        assert first.usage.input_tokens + first.usage.cache_read_input_tokens == len(engine.asked[0][0])
        again = {"role": "assistant", "content": [block.model_dump() for block in first.content]}
        result = {
            "type": "tool_result",
            "tool_use_id": first.content[2].id,
            "content": [{"type": "text", "text": "a b"}],
        }
        messages = [*ASK, again, {"role": "user", "content": [result]}]
        count = await client.messages.count_tokens(model="m", messages=messages, tools=tools)
        second = await ask(client, messages)
        assert second.content[-1].text == "Nothing \u00fcber."
        assert second.stop_reason == "end_turn"
        assert count.input_tokens == len(engine.asked[1][0])

    of_anthropic(made, use)
    check_what_was_asked(engine, made)


@pytest.mark.parametrize("kept", [False, True], ids=["items", "previous_response_id"])
@pytest.mark.parametrize("stream", [False, True])
def test_openais_client_has_responses(renderer: TurnRenderer, stream: bool, kept: bool) -> None:
    made, engine = session(renderer, *ANSWERS, params={"max_new_tokens": 512})
    tools: list[Any] = [{"type": "function", **FUNCTION}]

    async def ask(client: openai.AsyncOpenAI, given: Any, **more: Any) -> Any:
        how: dict[str, Any] = {"model": "m", "input": given, "tools": tools, **more}
        if not stream:
            return await client.responses.create(**how)
        async with client.responses.stream(**how) as events:
            kinds = [event.type async for event in events]
            assert {"response.created", "response.output_text.delta", "response.completed"} <= set(kinds)
            return await events.get_final_response()

    async def use(client: openai.AsyncOpenAI) -> None:
        first = await ask(client, "What is there?")
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        assert first.output_text == "I look."
        call = first.output[-1]
        assert (call.name, json.loads(call.arguments)) == ("ls", {"path": "/"})
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "a b"}
        if kept:
            second = await ask(client, [result], previous_response_id=first.id)
        else:
            items = [item.model_dump(exclude={"parsed_arguments"}) for item in first.output]
            second = await ask(client, [{"role": "user", "content": "What is there?"}, *items, result])
        assert (second.output_text, second.status) == ("Nothing \u00fcber.", "completed")
        assert second.usage.input_tokens == len(engine.asked[1][0])

    of_openai(made, use)
    check_what_was_asked(engine, made)


def test_who_has_no_key_gets_nothing(renderer: TurnRenderer) -> None:
    made, engine = session(renderer, "a")

    async def use(url: str, key: str) -> None:
        async with aiohttp.ClientSession() as client:
            for path, headers in (
                ("/v1/chat/completions", {}),
                ("/v1/chat/completions", {"Authorization": "Bearer default"}),
                ("/v1/responses", {"Authorization": f"Basic {key}"}),
                ("/v1/messages", {"X-Api-Key": key[:-1]}),
                ("/v1/messages/count_tokens", {}),
                ("/sessions/default/v1/chat/completions", {}),
            ):
                body = {"messages": ASK, "user": key, "metadata": {"session_id": key}}
                async with client.post(url + path, json=body, headers=headers) as reply:
                    assert reply.status == 401, path
                    told = await reply.json()
                    assert "no session of this key is open" in str(told)
                    assert (told.get("type") == "error") == path.startswith("/v1/messages")
            async with client.get(f"{url}/v1/models") as reply:
                assert reply.status == 401
            async with client.get(f"{url}/healthz") as reply:
                assert reply.status == 200

    asyncio.run(served(made, use))
    assert engine.asked == []


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("chat/completions", {}, "messages is not a list of objects"),
        ("chat/completions", {"messages": []}, "is an empty list of messages"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "has neither 'content' nor 'tool_calls'"),
        ("chat/completions", {"messages": [{"role": "priest", "content": "?"}]}, "priest"),
        ("chat/completions", {"messages": ASK, "n": 2}, "n must be 1"),
        ("chat/completions", {"messages": ASK, "max_tokens": 0}, "must be a positive integer, not 0"),
        ("chat/completions", {"messages": ASK, "tools": TOOLS, "tool_choice": "required"}, "'required' is not served"),
        ("chat/completions", {"messages": ASK, "tools": [{"type": "web"}]}, "tools is not a list of functions"),
        ("chat/completions", {"messages": ASK, "response_format": {"type": "json_object"}}, "grammar"),
        ("responses", {"input": 3}, "input is neither text nor a list of items"),
        ("responses", {"input": "?", "previous_response_id": "resp_1"}, "the session has no such response"),
        ("responses", {"input": [{"type": "computer_call"}]}, "'computer_call' is not served"),
        ("messages", {"messages": ASK, "max_tokens": 5, "tool_choice": {"type": "any"}}, "'required' is not served"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "type 'image'"),
        ("messages", {"messages": [{"role": "user", "content": 3}]}, "needs a role"),
        ("messages", {"messages": ASK, "tools": [{"type": "bash_20250124", "name": "bash"}]}, "client's own"),
    ],
)
def test_what_no_turn_can_be_made_of_is_refused_in_words(
    renderer: TurnRenderer, path: str, body: dict[str, Any], words: str
) -> None:
    made, engine = session(renderer, "a")

    async def use(url: str, key: str) -> None:
        async with aiohttp.ClientSession() as client:
            for stream in (False, True):
                headers = {"Authorization": f"Bearer {key}"}
                async with client.post(f"{url}/v1/{path}", json=body | {"stream": stream}, headers=headers) as reply:
                    assert reply.status == 400
                    told = await reply.json()
            assert words in told["error"]["message"]
            assert told["error"]["type"] == "invalid_request_error"
            async with client.post(f"{url}/v1/{path}", data=b"{", headers=headers) as reply:
                assert reply.status == 400
                assert "the body is not JSON" in (await reply.json())["error"]["message"]

    asyncio.run(served(made, use))
    assert engine.asked == []
    assert made.memory.counters.turns == 0


def asked_text(renderer: TurnRenderer, path: str, body: dict[str, Any]) -> str:
    """The prompt that a body becomes."""
    made, engine = session(renderer, f"Good.{END}")

    async def use(url: str, key: str) -> None:
        async with aiohttp.ClientSession() as client:
            headers = {"Authorization": f"Bearer {key}"}
            async with client.post(f"{url}/v1/{path}", json=body, headers=headers) as reply:
                assert reply.status == 200, await reply.text()

    asyncio.run(served(made, use))
    return renderer.decode(engine.asked[0][0])


def test_codexs_tools_that_are_no_functions_are_left_out(
    renderer: TurnRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    warn_left_out.cache_clear()
    others = [{"type": "web_search"}, {"type": "image_generation"}]
    tools = [{"type": "function", **FUNCTION}, *others]
    for _ in range(2):
        text = asked_text(renderer, "responses", {"input": "?", "tools": tools, "store": False, "include": ["x"]})
        assert '"ls"' in text
        assert "web_search" not in text
    assert [caplog.text.count(f"tool of type {tool['type']!r}") for tool in others] == [1, 1]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "c2VjcmV0"}}


@pytest.mark.parametrize("api", ["messages", "responses"])
def test_an_image_that_a_tool_has_read_is_left_out_and_the_agent_goes_on(renderer: TurnRenderer, api: str) -> None:
    if api == "messages":
        use = {"type": "tool_use", "id": "call_1", "name": "ls", "input": {"path": "/a.png"}}
        parts = [{"type": "text", "text": "a.png"}, IMAGE]
        result = {"type": "tool_result", "tool_use_id": "call_1", "content": parts}
        given = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result, IMAGE]}]
        body: dict[str, Any] = {"messages": [*ASK, *given], "max_tokens": 9}
    else:
        call = {"type": "function_call", "call_id": "call_1", "name": "ls", "arguments": "{}"}
        image = {"type": "input_image", "image_url": "data:image/png;base64,c2VjcmV0"}
        output = {"type": "function_call_output", "call_id": "call_1"}
        body = {"input": [*ASK, call, output | {"output": [{"type": "input_text", "text": "a.png"}, image]}]}
    text = asked_text(renderer, api, body)
    assert "a.png" in text
    assert text.count("image left out: only text can be read]") == (2 if api == "messages" else 1)
    assert "c2VjcmV0" not in text


def test_what_claude_code_says_as_the_system_in_between_is_said_by_the_user(renderer: TurnRenderer) -> None:
    given = [*ASK, {"role": "system", "content": "Skills: a."}, {"role": "user", "content": "Go on."}]
    text = asked_text(renderer, "messages", {"messages": given, "max_tokens": 9})
    assert "<|im_start|>user\n<system-reminder>\nSkills: a.\n</system-reminder><|im_end|>" in text


def test_claude_code_finds_somebody_at_the_address(renderer: TurnRenderer) -> None:
    async def use(url: str, key: str) -> None:
        async with aiohttp.ClientSession() as client, client.head(url) as reply:
            assert reply.status == 200

    asyncio.run(served(session(renderer)[0], use))


@pytest.mark.parametrize(
    ("budget", "answers", "words"),
    [
        (Budget(turns=2), 2, "the session has had its 2 turns"),
        (Budget(tokens=4), 2, "the session has had its 4 tokens"),
        (Budget(seconds=1e-9), 0, "the session has had its 1e-09 seconds"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_session_takes_no_more_than_its_budget(
    renderer: TurnRenderer, budget: Budget, answers: int, words: str, stream: bool
) -> None:
    made, engine = session(renderer, *["abc"] * 3, budget=budget)

    async def use(client: openai.AsyncOpenAI) -> None:
        for _ in range(answers):
            await client.chat.completions.create(model="m", messages=ASK)
        with pytest.raises(openai.RateLimitError, match=words):
            await client.chat.completions.create(model="m", messages=ASK, stream=stream)

    of_openai(made, use)
    made_tokens = [len(node.output) for node in made.memory.trajectory.nodes]
    assert made_tokens == ([3, 1] if budget.tokens else [3] * answers)
    assert len(engine.asked) == answers


def test_where_the_context_is_full_an_answer_is_empty_and_cut(renderer: TurnRenderer) -> None:
    length = len(renderer.first(ASK))
    for room, text in ((2, "ab"), (0, "")):
        made, engine = session(renderer, "abc", reason="length", budget=Budget(context=length + room))

        async def use(client: openai.AsyncOpenAI, text: str = text) -> None:
            reply = await client.chat.completions.create(model="m", messages=ASK)
            assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (text, "length")

        of_openai(made, use)
        assert len(engine.asked) == bool(room)


def test_calls_of_another_form_are_read_by_the_engine(renderer: TurnRenderer) -> None:
    call = '<|python_tag|>{"name": "ls", "arguments": {}}'
    made, _ = session(renderer, f"So: {call}", parser="llama3")

    async def use(client: openai.AsyncOpenAI) -> None:
        message = (await client.chat.completions.create(model="m", messages=ASK, tools=TOOLS)).choices[0].message
        assert message.content == "So:"
        assert message.tool_calls is not None
        assert message.tool_calls[0].function.name == "ls"  # type: ignore[union-attr]

    of_openai(made, use)


@pytest.mark.parametrize(("budget", "bound"), [(Budget(context=900), 900), (Budget(), None)])
def test_a_turn_without_a_bound_of_its_own_has_the_contexts(renderer: TurnRenderer, budget: Budget, bound: Any) -> None:
    made, engine = session(renderer, END, params={"max_new_tokens": None, "stop": None}, budget=budget)
    of_openai(made, lambda client: client.chat.completions.create(model="m", messages=ASK))
    ((prompt, params),) = engine.asked
    assert params == {"max_new_tokens": 4096 if bound is None else bound - len(prompt), "stop": None}


def test_an_evaluation_without_an_agent_is_told() -> None:
    """Of training flags say so at once."""
    with pytest.raises(AgentError, match="needs --custom-agent-function-path"):
        asyncio.run(generate(Namespace(custom_agent_function_path=None), Sample(), {"max_new_tokens": 1}))
