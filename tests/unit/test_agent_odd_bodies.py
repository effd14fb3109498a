"""What clients and models write that has another form than it should: agents get an answer in their API's form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web
from transformers import AutoTokenizer

from slime.agent import session
from slime.agent.gateway import Gateway
from slime.agent.parsing import parser_of
from slime.agent.rendering import TurnRenderer
from slime.agent.session import Generated, Session
from tests import chat_templates
from tests.small_rollout import CHATML

NUM_GPUS = 0
END = "<|im_end|>"
ASK: list[Any] = [{"role": "user", "content": "x"}]
NO_TOOLS = CHATML.partition("{% endif %}")[2]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@pytest.fixture(scope="module")
def renderer(make_tokenizer: Callable[[str | None], Path]) -> TurnRenderer:
    return TurnRenderer(AutoTokenizer.from_pretrained(str(make_tokenizer(chat_templates.QWEN_3))))


class Engine:
    """Answers by these texts; an exception is raised."""

    def __init__(self, renderer: TurnRenderer, *answers: str | Exception) -> None:
        self._renderer, self._answers, self.prompts = renderer, list(answers), list[list[int]]()

    async def generate(self, prompt: list[int], params: Any, on_tokens: Any) -> Generated:
        self.prompts.append(prompt)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        ids = self._renderer.encode(answer)
        return Generated(ids, [-0.5] * len(ids), "stop")

    async def read_calls(self, parser: str, text: str, tools: Any) -> list[Any]:
        raise NotImplementedError


def ask_all(made: Session, use: Callable[[str, dict[str, str]], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        gateway = Gateway()
        runner = web.AppRunner(gateway.app(), handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            key = gateway.open_session(made)
            return await use(f"http://127.0.0.1:{runner.addresses[0][1]}", {"Authorization": f"Bearer {key}"})
        finally:
            await runner.cleanup()

    return asyncio.run(run())


async def posted(url: str, headers: dict[str, str], body: Any) -> tuple[int, str]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with aiohttp.ClientSession() as client, client.post(url, data=data, headers=headers) as reply:
        return reply.status, await reply.text()


def calling(calls: Any) -> list[Any]:
    return [*ASK, {"role": "assistant", "content": "", "tool_calls": calls}, *ASK]


def tools(*functions: Any) -> dict[str, Any]:
    return {"messages": ASK, "tools": [{"type": "function", "function": {"name": "f", **each}} for each in functions]}


ODD: list[tuple[str, Any, str]] = [
    (CHAT, tools({"name": " "}), "tool 0 has an empty name"),
    (CHAT, tools({}, {}), "tool 1 (f): another tool has this name"),
    (CHAT, tools({"parameters": "x"}), "tool 0 (f): its parameters must be a JSON schema, an object, not 'x'"),
    (CHAT, tools({"parameters": {"properties": ["a"]}}), "tool 0 (f): properties of its parameters must be an object"),
    (CHAT, tools({"parameters": {"properties": {"a": "integer"}}}), "tool 0 (f): properties of its parameters"),
    (RESPONSES, {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": []}]}, "tool 0 (f): its"),
    (MESSAGES, {"messages": ASK, "tools": [{"name": "f", "input_schema": "x"}]}, "tool 0 (f): its parameters must be"),
    (CHAT, {"messages": [*ASK, {"role": "asistant", "content": "x"}]}, "message 1 is of the role 'asistant'"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "has no text: {'type': 'text'}"),
    (CHAT, {"messages": ASK, "response_format": "json"}, "is not what /v1/chat/completions takes"),
    (CHAT, {"messages": ASK, "stream_options": "x", "stream": True}, "is not what /v1/chat/completions takes"),
    (CHAT, {"messages": ASK, "tools": [{"function": "f"}]}, "is not what /v1/chat/completions takes"),
    (CHAT, {"messages": [{"role": "user", "content": [1]}]}, "content of message 0"),
    (CHAT, {"messages": calling("abc")}, "tool_calls of a message is not a list of calls, but 'abc'"),
    (CHAT, {"messages": calling([1])}, "tool_calls of a message is not a list of calls"),
    (CHAT, {"messages": calling([{"function": None}])}, "tool_calls of a message is not a list of calls"),
    (RESPONSES, {"input": "x", "text": "y"}, "is not what /v1/responses takes"),
    (RESPONSES, {"input": "x", "previous_response_id": ["a"]}, "is not what /v1/responses takes"),
    (RESPONSES, {"input": [{"type": "reasoning", "content": 5}]}, "is not what /v1/responses takes"),
    (MESSAGES, {"messages": ASK, "tool_choice": "auto"}, "is not what /v1/messages takes"),
    (MESSAGES, {"messages": ASK, "tools": 5}, "is not what /v1/messages takes"),
    (MESSAGES, b"[" * 100_000, "the body is not JSON"),
    (f"{MESSAGES}/count_tokens", {"messages": ASK, "tools": 5}, "is not what /v1/messages takes"),
]


@pytest.mark.parametrize(("path", "body", "words"), ODD)
def test_a_body_of_another_form_is_refused_in_words(renderer: TurnRenderer, path: str, body: Any, words: str) -> None:
    engine = Engine(renderer)
    status, text = ask_all(Session(engine, renderer), lambda url, key: posted(url + path, key, body))
    assert status == 400
    assert words in json.loads(text)["error"]["message"]
    assert not engine.prompts


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_what_nobody_expected_is_told_in_the_apis_form(renderer: TurnRenderer, path: str, stream: bool) -> None:
    made = Session(Engine(renderer, KeyError("lost")), renderer)
    status, text = ask_all(made, lambda url, key: posted(url + path, key, {"messages": ASK, "stream": stream}))
    assert (status, json.loads(text)["error"]["message"]) == (500, "the turn has failed: KeyError('lost')")
    assert made.memory.counters.turns == 0


def test_a_body_that_is_too_large_is_told_in_the_apis_form(
    renderer: TurnRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.agent.gateway._MOST_BYTES", 1000)
    body = {"messages": [{"role": "user", "content": "x" * 2000}]}
    status, text = ask_all(Session(Engine(renderer), renderer), lambda url, key: posted(url + MESSAGES, key, body))
    assert (status, json.loads(text)["error"]["message"]) == (413, "Request Entity Too Large")


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/v1/messages", "/v1/embeddings"])
def test_a_path_that_is_not_served_is_told_which_are(renderer: TurnRenderer, path: str) -> None:
    """As to a client whose base_url has one /v1 too few, or too many."""
    made = Session(Engine(renderer), renderer)
    status, text = ask_all(made, lambda url, key: posted(url + path, key, {"messages": ASK}))
    words = json.loads(text)["error"]["message"]
    assert (status, "base_url that ends in /v1" in words, CHAT in words) == (404, True, True)


@pytest.mark.parametrize(("template", "warnings"), [(chat_templates.QWEN_3, 0), (CHATML, 1), (NO_TOOLS, 2)])
def test_tools_that_a_template_has_no_place_for_are_told_of_once(
    make_tokenizer: Callable[[str | None], Path], caplog: pytest.LogCaptureFixture, template: str, warnings: int
) -> None:
    """Of both ways: the model is not told of them, and what it calls is not read."""
    own = TurnRenderer(AutoTokenizer.from_pretrained(str(make_tokenizer(template))))
    made = Session(Engine(own, "a" + END, "a" + END), own, parser=parser_of(template))

    async def use(url: str, key: dict[str, str]) -> None:
        for _ in range(2):
            assert (await posted(url + CHAT, key, tools({})))[0] == 200

    session._warn_unread.cache_clear()
    ask_all(made, use)
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("tools are given")]
    assert len(told) == warnings


def test_what_is_refused_is_not_asked_again(renderer: TurnRenderer) -> None:
    """By OpenAI's client, which tries again after 500 by itself, with pauses."""
    engine = Engine(renderer, *(KeyError("lost") for _ in range(3)))

    async def use(url: str, key: dict[str, str]) -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key["Authorization"].split()[1]) as client:
            with pytest.raises(openai.InternalServerError):
                await client.chat.completions.create(model="m", messages=ASK)

    ask_all(Session(engine, renderer), use)
    assert len(engine.prompts) == 1


PRIVATE = "\U000f0004"
"""Of what the renderer marks special tokens with."""


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ("cut \ud83d", "cut \ufffd"),  # half an emoji, as an agent in JavaScript cuts a tool's output
        ("\ud83d\ude00 \\ud83d", "\U0001f600 \\ud83d"),
        (f"{PRIVATE}0\U000f0005", f"{PRIVATE}0\U000f0005"),
        (f"{PRIVATE}99999\U000f0005", f"{PRIVATE}99999\U000f0005"),
    ],
)
@pytest.mark.parametrize("later", [False, True])
def test_any_text_is_read(renderer: TurnRenderer, said: str, read: str, later: bool) -> None:
    engine = Engine(renderer, f"a{END}", f"b{END}")
    made = Session(engine, renderer)
    before = [*ASK, {"role": "assistant", "content": "a"}] if later else []

    async def use(url: str, key: dict[str, str]) -> None:
        if later:
            assert (await posted(url + CHAT, key, {"messages": ASK}))[0] == 200
        body = {"messages": [*before, {"role": "user", "content": said}]}
        assert (await posted(url + CHAT, key, body))[0] == 200

    ask_all(made, use)
    assert f"<|im_start|>user\n{read}<|im_end|>" in renderer.decode(engine.prompts[-1])


def call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "ls", "arguments": {arguments}}}\n</tool_call>'


NESTED = call('{"path": ' + "[" * 3000 + "]" * 3000 + "}")


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        (call('{"path": "\\ud83d"}'), '{"path": "\ufffd"}'),
        (call('{"path": NaN}'), None),
        (call('{"path": 1e999}'), None),
        (NESTED, None),
        ("<tool_call>\n<function=ls>\n<parameter=path>\n/\n</parameter>\n</function>\n</tool_call>", '{"path": "/"}'),
    ],
    ids=["half", "nan", "infinite", "nested", "any"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_no_client_could_read_is_no_call(
    renderer: TurnRenderer, said: str, arguments: str | None, stream: bool
) -> None:
    """And the turn is one, with all that the model made; the schema of ``path`` is ``true``: anything."""
    engine = Engine(renderer, said + END, f"b{END}")
    made = Session(engine, renderer, params={"max_new_tokens": 9000})
    tools = [{"name": "ls", "input_schema": {"type": "object", "properties": {"path": True}}}]

    async def use(url: str, key: dict[str, str]) -> tuple[int, str]:
        return await posted(url + MESSAGES, key, {"messages": ASK, "tools": tools, "stream": stream})

    status, text = ask_all(made, use)
    assert status == 200
    assert ("message_stop" in text) == stream
    (node,) = made.memory.trajectory.nodes
    assert renderer.decode(node.output) == said + END
    calls = [each["function"]["arguments"] for each in node.reply.get("tool_calls", ())]
    assert calls == ([] if arguments is None else [arguments])
    assert node.turn.ill_formed == (arguments is None)
