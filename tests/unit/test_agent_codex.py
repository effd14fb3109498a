"""What Codex sends to /v1/responses: tools of plain text and in namespaces, and several messages of developers."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from slime.agent.rendering import TurnRenderer
from slime.data import Sample
from tests.unit.test_agent_gateway import ASK, END, FUNCTION, asked_text, of_openai, renderer, session

__all__ = ["renderer"]  # a fixture
NUM_GPUS = 0
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: LINE+"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edit files.", "format": GRAMMAR}
EDIT = {"type": "namespace", "name": "edit", "tools": [PATCH, {"type": "function", **FUNCTION}]}
INPUT = 'a\n"b"'


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("tools", "space"), [([PATCH, {"type": "function", **FUNCTION}], ""), ([EDIT], "edit")])
def test_tools_of_plain_text_and_in_namespaces_are_called_and_known_again(
    renderer: TurnRenderer, tools: list[Any], space: str, stream: bool
) -> None:
    names = [f"{space}.{name}" if space else name for name in ("apply_patch", "ls")]
    said = f"{call(names[0], input=INPUT)}\n{call(names[1], path='/')}{END}"
    made, engine = session(renderer, said, f"Done.{END}", params={"max_new_tokens": 512})

    async def use(client: openai.AsyncOpenAI) -> None:
        how: dict[str, Any] = {"model": "m", "tools": tools, "store": False}
        if stream:
            events = [event async for event in await client.responses.create(input=ASK, stream=True, **how)]
            told = {event.type: event for event in events}
            assert told["response.custom_tool_call_input.done"].input == INPUT  # type: ignore[union-attr]
            assert json.loads(told["response.function_call_arguments.done"].arguments) == {"path": "/"}  # type: ignore[union-attr]
            output = events[-1].response.output  # type: ignore[union-attr]
        else:
            output = (await client.responses.create(input=ASK, **how)).output
        patch, ls = output
        assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "apply_patch", INPUT)
        assert (ls.type, ls.name, json.loads(ls.arguments)) == ("function_call", "ls", {"path": "/"})
        for item in output:
            assert getattr(item, "namespace", "") == space
        results = [
            {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "applied"},
            {"type": "function_call_output", "call_id": ls.call_id, "output": "a b"},
        ]
        given = [*ASK, *(item.model_dump(exclude_none=True) for item in output), *results]
        assert (await client.responses.create(input=given, **how)).output_text == "Done."

    of_openai(made, use)
    (first, _), (second, _) = engine.asked
    prompt = renderer.decode(first)
    assert all(f'"name": "{name}"' in prompt for name in names)
    assert "Edit files.\\nThe input is text of this grammar:\\nstart: LINE+" in prompt
    assert renderer.decode(second).startswith(prompt + said)
    (sample,) = made.samples(Sample(index=1), 1.0)
    assert sample.metadata["agent"]["forks"] == 0


def test_an_input_that_is_no_text_is_answered_all_the_same(renderer: TurnRenderer) -> None:
    made, _ = session(renderer, '<tool_call>{"name": "apply_patch", "arguments": {"input": [1]}}</tool_call>' + END)

    async def use(client: openai.AsyncOpenAI) -> None:
        (item,) = (await client.responses.create(model="m", input="?", tools=[PATCH])).output  # type: ignore[list-item]
        assert item.input == "[1]"  # type: ignore[union-attr]

    of_openai(made, use)


def test_what_developers_say_is_one_system_message_and_then_the_users(renderer: TurnRenderer) -> None:
    """Templates such as Qwen 3.5's have no system message but the first."""
    said = [("developer", "Sandbox."), ("system", "Dates."), ("user", "Fix it."), ("developer", "Be quick.")]
    given = [{"type": "message", "role": role, "content": text} for role, text in said]
    text = asked_text(renderer, "responses", {"input": given, "instructions": "Use tools."})
    assert text.startswith("<|im_start|>system\nUse tools.\n\nSandbox.\n\nDates.<|im_end|>\n<|im_start|>user\nFix it.")
    assert "<|im_start|>user\n<system-reminder>\nBe quick.\n</system-reminder><|im_end|>" in text
    assert text.count("<|im_start|>system") == 1


@pytest.mark.parametrize("store", [True, False, None])
def test_a_response_is_kept_unless_the_client_keeps_it(renderer: TurnRenderer, store: bool | None) -> None:
    made, engine = session(renderer, f"One.{END}", f"Two.{END}")

    async def use(client: openai.AsyncOpenAI) -> None:
        given = {} if store is None else {"store": store}
        first = await client.responses.create(model="m", input="?", instructions="Count.", **given)  # type: ignore[arg-type]
        more: dict[str, Any] = {"model": "m", "input": "And?", "previous_response_id": first.id, "instructions": "On."}
        if store is False:
            with pytest.raises(openai.BadRequestError, match="the session has no such response"):
                await client.responses.create(**more)
        else:
            assert (await client.responses.create(**more)).output_text == "Two."

    of_openai(made, use)
    if store is not False:
        text = renderer.decode(engine.asked[1][0])
        assert text.startswith("<|im_start|>system\nOn.<|im_end|>\n<|im_start|>user\n?<|im_end|>")
        assert "Count." not in text
