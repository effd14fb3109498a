"""Thoughts, words and tool calls of a turn: the same at its end as while it comes, in whatever pieces."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from slime.agent.parsing import (
    MARKERS,
    ParsedModelOutput,
    Splitter,
    parse_model_output,
    parse_tool_uses,
    parse_xml_tool_uses,
    parsed,
    parser_of,
    tagged_calls,
)
from tests import chat_templates

NUM_GPUS = 0
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "path": {"type": "string"}, "o": {"type": "object"}},
}
TOOLS = [{"type": "function", "function": {"name": "ls", "parameters": SCHEMA}}]
JSON_CALL = '<tool_call>\n{"name": "ls", "arguments": {"path": "1", "n": 2}}\n</tool_call>'
QWEN_CALL = (
    "<tool_call>\n<function=ls>\n<parameter=path>\n1\n</parameter>\n<parameter=n>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
GLM_CALL = (
    "<tool_call>ls\n<arg_key>path</arg_key>\n<arg_value>1</arg_value>\n<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n"
    "</tool_call>"
)
CALL = {"name": "ls", "input": {"path": "1", "n": 2}}


def whole(
    text: str, tools: Any = TOOLS, *, opened: bool = False, marker: str = MARKERS["tags"], read: Any = None
) -> ParsedModelOutput:
    splitter = Splitter(opened=opened, marker=marker if tools else None)
    splitter.feed(text)
    splitter.finish()
    return parsed(splitter, read or (lambda calls: tagged_calls(calls, tools)))


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (JSON_CALL, [CALL]),
        (QWEN_CALL, [CALL]),
        (GLM_CALL, [CALL]),
        (f"{JSON_CALL}\n{QWEN_CALL} and {GLM_CALL}", [CALL] * 3),
        ('<tool_call>{"name": "ls", "arguments": "{\\"n\\": 1}"}</tool_call>', [{"name": "ls", "input": {"n": 1}}]),
        ('<tool_call>{"name": "ls"}</tool_call>', [{"name": "ls", "input": {}}]),
        ("<tool_call>\n<function=ls>\n</function>\n</tool_call>", [{"name": "ls", "input": {}}]),
        ("<tool_call>ls</tool_call>", [{"name": "ls", "input": {}}]),
        (
            '<tool_call><function=ls><parameter=o>{"a": [1]}</parameter>'
            "<parameter=n>x</parameter></function></tool_call>",
            [{"name": "ls", "input": {"o": {"a": [1]}, "n": "x"}}],
        ),
        (
            "<tool_call><function=cat><parameter=n>\n 2\n3\n</parameter></function></tool_call>",
            [{"name": "cat", "input": {"n": " 2\n3"}}],
        ),
        ("no call", []),
    ],
)
def test_calls_are_read_in_each_form(text: str, calls: list[Any]) -> None:
    assert tagged_calls(text, TOOLS) == calls


NULLABLE: dict[str, Any] = {"type": ["string", "null"]}
DEFINED = {"$defs": {"Point": {"type": "object"}, "Name": {"type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}}}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (NULLABLE, "123", "123"),
        (NULLABLE, "null", None),
        (NULLABLE, "None", "None"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string", "nullable": True}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "123", "123"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "123", "123"),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, "123", 123),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"anyOf": [{"type": "integer"}, {"description": "anything"}]}, "123", "123"),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": "integer"}]}, "123", 123),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"type": "integer", "enum": [1, 2]}, "1", 1),
        ({"enum": ["a", None]}, "null", None),
        ({"const": "1"}, "1", "1"),
        ({"const": 1}, "1", 1),
        ({"$ref": "#/$defs/Point"}, '{"x": "1"}', {"x": "1"}),
        ({"$ref": "#/$defs/Name"}, "123", "123"),
        ({"allOf": [{"$ref": "#/$defs/Point"}], "description": "d"}, "{}", {}),
        ({"$ref": "#/$defs/Loop"}, "123", "123"),
        ({"$ref": "#/$defs/none"}, "123", "123"),
        ({"$ref": "http://elsewhere"}, "123", "123"),
        ({"type": "array", "items": {"type": "string"}}, '["1", 2]', ["1", 2]),
        ({"type": "array"}, "a, b", "a, b"),
        ({"type": ["object", "string"]}, '{"a": 1}', '{"a": 1}'),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "1", 1),
        ({"type": "number"}, "NaN", "NaN"),
        ({"description": "d"}, "123", "123"),
        (True, "123", "123"),
        (None, "123", "123"),
    ],
)
def test_a_value_between_tags_is_text_unless_its_schema_says_that_it_cannot_be(
    schema: Any, text: str, value: Any
) -> None:
    parameters = {"type": "object", "properties": {"a": schema}} | DEFINED
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for call in (
        f"<tool_call><function=f><parameter=a>\n{text}\n</parameter></function></tool_call>",
        f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>",
    ):
        (found,) = tagged_calls(call, tools)
        assert (found["input"]["a"], type(found["input"]["a"])) == (value, type(value))


@pytest.mark.parametrize("parameters", [None, {}, [], {"properties": None}, {"properties": ["a"]}])
def test_an_argument_of_a_tool_without_a_schema_is_text(parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    text = "<tool_call>f<arg_key>a</arg_key><arg_value>123</arg_value></tool_call>"
    assert tagged_calls(text, tools) == [{"name": "f", "input": {"a": "123"}}]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n{",
        '<tool_call>{"name": "ls"',
        '<tool_call>{"name": "ls", "arguments": {}',
        '<tool_call>{"name": "ls", "arguments": [1]}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>what do I want?</tool_call>",
        "<tool_call></tool_call>",
        f"{JSON_CALL}<tool_call>",
    ],
)
def test_a_call_that_cannot_be_read_is_said_so_and_stays_words(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        tagged_calls(text, TOOLS)
    assert whole(f"I look.\n{text}") == ParsedModelOutput("", f"I look.\n{text}", [], True)


WHOLE: list[tuple[str, bool, Any, ParsedModelOutput]] = [
    ("Hello.\n\nYou.", False, TOOLS, ParsedModelOutput("", "Hello.\n\nYou.")),
    ("<think>\nHm.\n</think>\n\nHello.", False, TOOLS, ParsedModelOutput("Hm.", "Hello.")),
    ("\nHm.\n</think>\n\nHello. ", True, TOOLS, ParsedModelOutput("Hm.", "Hello. ")),
    ("\nHm", True, TOOLS, ParsedModelOutput("Hm", "")),
    ("<think></think>", False, TOOLS, ParsedModelOutput("", "")),
    ("<thin", False, TOOLS, ParsedModelOutput("", "<thin")),
    (f"<think>a < b</think>I look.\n\n{JSON_CALL}", False, TOOLS, ParsedModelOutput("a < b", "I look.", [CALL])),
    (f"{QWEN_CALL}\n{GLM_CALL}\n", False, TOOLS, ParsedModelOutput("", "", [CALL, CALL])),
    (f"a {JSON_CALL}", False, None, ParsedModelOutput("", f"a {JSON_CALL}")),
    ("a <tool", False, TOOLS, ParsedModelOutput("", "a <tool")),
    ("a <tool_cal b", False, TOOLS, ParsedModelOutput("", "a <tool_cal b")),
    ("", False, TOOLS, ParsedModelOutput()),
    ("I say <think>no</think>.", False, TOOLS, ParsedModelOutput("", "I say <think>no</think>.")),
]


@pytest.mark.parametrize(("text", "opened", "tools", "expected"), WHOLE)
def test_a_turn_is_the_same_whole_and_in_pieces(
    text: str, opened: bool, tools: Any, expected: ParsedModelOutput
) -> None:
    assert whole(text, tools, opened=opened) == expected
    for seed in range(20):
        rng, told = random.Random(seed), {"reasoning": "", "content": ""}
        splitter, rest = Splitter(opened=opened, marker=MARKERS["tags"] if tools else None), text
        while rest:
            size = rng.randrange(1, 8)
            for part, new in splitter.feed(rest[:size]):
                told[part] += new
            rest = rest[size:]
        for part, new in splitter.finish():
            told[part] += new
        assert told == {"reasoning": expected.reasoning, "content": expected.text}
        assert told == {"reasoning": splitter.reasoning, "content": splitter.content}
        assert bool(splitter.calls) == bool(expected.tool_uses)


def test_words_are_told_as_they_come() -> None:
    splitter = Splitter(opened=True, marker="<tool_call>")
    told = [splitter.feed(text) for text in ("Hm", " so", ".\n</thi", "nk>\n\nI ", "look <", "tool_", "call>{")]
    assert told == [
        [("reasoning", "Hm")],
        [("reasoning", " so")],
        [("reasoning", ".")],
        [("content", "I")],
        [("content", " look")],
        [],
        [],
    ]


def test_what_may_be_a_call_of_a_form_that_nobody_knows_is_kept_to_the_end() -> None:
    def read(text: str) -> list[Any]:
        return [json.loads(text)] if text.startswith("{") else []

    assert whole(json.dumps(CALL), marker="", read=read) == ParsedModelOutput("", "", [CALL])
    assert whole("words", marker="", read=read) == ParsedModelOutput("", "words")


@pytest.mark.parametrize(
    ("text", "reasoning", "expected"),
    [
        (f"<think>Hm.</think> I look. {JSON_CALL} ", "qwen3", ParsedModelOutput("Hm.", "I look.", [CALL])),
        ("Hm.</think>I look.", "qwen3", ParsedModelOutput("Hm.", "I look.")),
        ("<think>Hm.</think>I look.", None, ParsedModelOutput("", "<think>Hm.</think>I look.")),
        ("a <tool_call>{", None, ParsedModelOutput("", "a <tool_call>{", [], True)),
    ],
)
def test_a_whole_turn_is_parsed_by_upstreams_names(
    text: str, reasoning: str | None, expected: ParsedModelOutput
) -> None:
    how: dict[str, Any] = {"tool_parser_name": "qwen25", "reasoning_parser_name": reasoning}
    assert parse_model_output(text, tools_schema=TOOLS, **how) == expected
    assert not parse_model_output(text, tools_schema=None, **how).tool_uses


def test_calls_of_tools_that_are_not_there_stay_words() -> None:
    other = QWEN_CALL.replace("=ls>", "=rm>")
    assert parse_xml_tool_uses(f"a {other} b {QWEN_CALL} c", TOOLS) == (f"a {other} b  c", [CALL])
    assert parse_tool_uses(f"a {QWEN_CALL} c", TOOLS, None) == ("a  c", [CALL], False)
    with pytest.raises(ValueError, match="tool parser 'llama3' is an engine's"):
        parse_tool_uses("", TOOLS, "llama3")


@pytest.mark.parametrize(
    ("name", "parser"),
    [
        ("QWEN_2_5", "tags"),
        ("QWEN_3", "tags"),
        ("QWEN_3_5", "tags"),
        ("GLM_4_5", "tags"),
        ("DEEPSEEK_R1", "deepseekv3"),
        ("DEEPSEEK_V3_1", "deepseekv31"),
        ("KIMI_K2_THINKING", "kimi_k2"),
        ("LLAMA_3_1", "llama3"),
        ("LLAMA_3", None),
    ],
)
def test_a_template_tells_how_its_model_calls(name: str, parser: str | None) -> None:
    assert parser_of(getattr(chat_templates, name)) == parser
