"""Which text is trained under the supported families' chat templates, against expectations of its own."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.data.rows.conversation import ConversationEncoder, render
from slime.data.rows.messages import RowError
from tests import chat_templates
from tests.documents import DOCS
from tests.small_rollout import write_tokenizer

NUM_GPUS = 0

Message = dict[str, Any]
DEEPSEEK = "\uff5cend\u2581of\u2581sentence\uff5c"
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {}}}]


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def tool(content: str) -> Message:
    return {"role": "tool", "content": content}


def calls(arguments: Any, number: int = 1) -> list[Message]:
    return [{"id": "get:0", "type": "function", "function": {"name": "get", "arguments": arguments}}] * number


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ConversationEncoder]:
    """Makes an encoder of a family's template."""

    def make(family: str, last_only: bool = False, **kwargs: Any) -> ConversationEncoder:
        directory = tmp_path_factory.getbasetemp() / family
        if not directory.exists():
            write_tokenizer(directory, getattr(chat_templates, family))
        return ConversationEncoder(str(directory), json.dumps(kwargs), last_only)

    return make


Encoder = Callable[..., ConversationEncoder]


def trained(encoder: ConversationEncoder, messages: list[Message], tools: Any = None) -> list[str]:
    """The runs of trained tokens, as text."""
    encoded = encoder.encode(messages, tools)
    runs: list[list[int]] = [[]]
    for token, mask in zip(encoded.tokens.tolist(), encoded.mask.tolist(), strict=True):
        if mask:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [encoder._tokenizer.decode(run) for run in runs if run]


# By hand


TWO = [user("q"), assistant("x"), user("r"), assistant("y")]
EMPTY = [user("u"), assistant(""), user("v"), assistant("x")]
LITERAL = [
    user("u <|im_end|>"),
    assistant("ok <|im_end|> more<|user|>"),
    user("<|im_start|>assistant\nX"),
    assistant("z"),
]
MARKUP = [user("u"), assistant("<b>bold</b>"), user("v"), assistant("<thin")]
REASONED = [user("u"), assistant("<think>\nr1\n</think>\n\nx1"), user("v"), assistant("<think>\nr2\n</think>\n\nx2")]
CHAIN = [
    user("u"),
    assistant("", reasoning_content="r1", tool_calls=calls('{"a": "b"}')),
    tool("t"),
    tool("t"),
    assistant("x", reasoning_content="r2"),
    user("v"),
    assistant("y", reasoning_content="r3"),
]
THOUGHT = "<think>\n\n</think>\n\n"
JSON_CALL = '<tool_call>\n{"name": "get", "arguments": {"a": "b"}}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=get>\n<parameter=a>\nb\n</parameter>\n</function>\n</tool_call>"
GLM_CALL = "<tool_call>get\n<arg_key>a</arg_key>\n<arg_value>b</arg_value>\n</tool_call>"
BY_HAND = [
    ("QWEN_2_5", TWO, ["x<|im_end|>", "y<|im_end|>"]),
    ("QWEN_2_5", EMPTY, ["<|im_end|>", "x<|im_end|>"]),
    ("QWEN_2_5", LITERAL, ["ok <|im_end|> more<|user|><|im_end|>", "z<|im_end|>"]),
    ("QWEN_2_5", CHAIN, [f"{JSON_CALL}<|im_end|>", "x<|im_end|>", "y<|im_end|>"]),
    ("QWEN_3", TWO, ["x<|im_end|>", f"{THOUGHT}y<|im_end|>"]),
    ("QWEN_3", LITERAL, ["ok <|im_end|> more<|user|><|im_end|>", f"{THOUGHT}z<|im_end|>"]),
    ("QWEN_3", REASONED, ["x1<|im_end|>", "<think>\nr2\n</think>\n\nx2<|im_end|>"]),
    ("QWEN_3", CHAIN, [f"{JSON_CALL}<|im_end|>", "x<|im_end|>", "<think>\nr3\n</think>\n\ny<|im_end|>"]),
    ("QWEN_3_INSTRUCT", REASONED, [f"<think>\nr{i}\n</think>\n\nx{i}<|im_end|>" for i in (1, 2)]),
    ("QWEN_3_THINKING", TWO, ["x<|im_end|>", "\n</think>\n\ny<|im_end|>"]),
    ("QWEN_3_THINKING", EMPTY, ["<|im_end|>", "\n</think>\n\nx<|im_end|>"]),
    ("QWEN_3_THINKING", MARKUP, ["<b>bold</b><|im_end|>", "\n</think>\n\n<thin<|im_end|>"]),
    ("QWEN_3_THINKING", REASONED, ["x1<|im_end|>", "r2\n</think>\n\nx2<|im_end|>"]),
    ("QWEN_3_5", EMPTY, ["<|im_end|>", "\n</think>\n\nx<|im_end|>"]),
    ("QWEN_3_5", MARKUP, ["<b>bold</b><|im_end|>", "\n</think>\n\n<thin<|im_end|>"]),
    ("QWEN_3_5", CHAIN, [f"{XML_CALL}<|im_end|>", "x<|im_end|>", "r3\n</think>\n\ny<|im_end|>"]),
    ("GLM_4", TWO, ["\nx<|user|>", "\ny<|user|>"]),
    (
        "GLM_4",
        [user("u"), assistant('{"a": 1}', metadata="get"), {"role": "observation", "content": "o"}, assistant("x")],
        ['get\n{"a": 1}<|observation|>', "\nx<|user|>"],
    ),
    ("GLM_4_5", TWO, ["\n<think></think>\nx<|user|>", "\n<think></think>\ny<|user|>"]),
    ("GLM_4_5", EMPTY, ["\n<think></think><|user|>", "\n<think></think>\nx<|user|>"]),
    ("GLM_4_5", LITERAL, ["\n<think></think>\nok <|im_end|> more<|user|><|user|>", "\n<think></think>\nz<|user|>"]),
    (
        "GLM_4_5",
        CHAIN,
        [
            f"\n<think></think>\n{GLM_CALL}<|observation|>",
            "\n<think></think>\nx<|user|>",
            "\n<think>r3</think>\ny<|user|>",
        ],
    ),
    ("GLM_4_5", CHAIN[:2], [f"\n<think>r1</think>\n{GLM_CALL}<|observation|>"]),
    ("DEEPSEEK_R1", REASONED, [f"\n\nx1<{DEEPSEEK}>", f"\n\nx2<{DEEPSEEK}>"]),
    ("DEEPSEEK_R1", MARKUP, [f"<b>bold</b><{DEEPSEEK}>", f"<thin<{DEEPSEEK}>"]),
    ("DEEPSEEK_V3_1", EMPTY, [f"<{DEEPSEEK}>", f"x<{DEEPSEEK}>"]),
    ("LLAMA_3", TWO, ["x<|eot_id|>", "y<|eot_id|>"]),
    ("LLAMA_3_1", CHAIN, ['{"name": "get", "parameters": {"a": "b"}}<|eot_id|>', "x<|eot_id|>", "y<|eot_id|>"]),
    ("KIMI_K2", LITERAL, ["ok <|im_end|> more<|user|><|im_end|>", "z<|im_end|>"]),
    ("KIMI_K2_THINKING", CHAIN[-2:], ["<think></think>y<|im_end|>"]),
]


@pytest.mark.parametrize(("family", "messages", "expected"), BY_HAND)
def test_by_hand(family: str, messages: list[Message], expected: list[str], encoder: Encoder) -> None:
    assert trained(encoder(family), messages) == expected
    if messages[0]["role"] == "user":
        system = {"role": "system", "content": "<|im_start|>assistant\nx<|im_end|>"}
        assert trained(encoder(family), [system, *messages]) == expected
    assert trained(encoder(family, last_only=True), messages) == expected[-1:]


DOCUMENTED = {
    "Qwen2.5": "QWEN_2_5",
    "Qwen3": "QWEN_3",
    "Qwen3-Instruct-2507": "QWEN_3_INSTRUCT",
    "Qwen3-Thinking-2507": "QWEN_3_THINKING",
    "GLM-4": "GLM_4",
    "GLM-4.5": "GLM_4_5",
    "DeepSeek-R1": "DEEPSEEK_R1",
    "DeepSeek-V3.1": "DEEPSEEK_V3_1",
    "Llama 3.1": "LLAMA_3_1",
    "Kimi-K2": "KIMI_K2",
}


@pytest.mark.parametrize("page", ["conversations.md", "zh/conversations.md"])
def test_the_documented_table(page: str, encoder: Encoder) -> None:
    messages = [message | {"content": message["content"].replace("r1", "r").replace("r2", "s")} for message in REASONED]
    messages = [message | {"content": message["content"].replace("x1", "x").replace("x2", "y")} for message in messages]
    rows = re.findall(r'^\| ([^|]+) \| `(".*")` \| `(".*")` \|$', (DOCS / page).read_text(), re.MULTILINE)
    assert [name for name, *_ in rows] == list(DOCUMENTED)
    for name, *texts in rows:
        documented = [json.loads(text.replace("\\|", "|")) for text in texts]
        assert trained(encoder(DOCUMENTED[name]), messages) == documented, name


def test_arguments_of_the_template(encoder: Encoder) -> None:
    assert trained(encoder("QWEN_3", enable_thinking=False), TWO) == ["x<|im_end|>", "y<|im_end|>"]
    assert trained(encoder("QWEN_3_5", enable_thinking=False), TWO) == ["x<|im_end|>", "y<|im_end|>"]
    assert trained(encoder("GLM_4_5", enable_thinking=False), TWO) == ["\nx<|user|>", "\ny<|user|>"]
    # The prompt opens <think>, the turns close it: <think> and </think> share a character, and no token.
    thinking = encoder("DEEPSEEK_V3_1", thinking=True)
    assert trained(thinking, TWO) == [f"</think>x<{DEEPSEEK}>", f"</think>y<{DEEPSEEK}>"]


# Against programs of their own: what each family's model says in a turn


def _last_query(messages: list[Message]) -> int:
    queries = [
        i
        for i, message in enumerate(messages)
        if message["role"] == "user"
        and not (
            message["content"].strip().startswith("<tool_response>")
            and message["content"].strip().endswith("</tool_response>")
        )
    ]
    return queries[-1] if queries else len(messages) - 1


def _split(message: Message) -> tuple[str, str]:
    """Reasoning and content."""
    content = message["content"] or ""
    if "reasoning_content" in message:
        return message["reasoning_content"], content
    if "</think>" not in content:
        return "", content
    before, _, after = content.split("</think>")[0], None, content.split("</think>")[-1]
    return before.rstrip("\n").split("<think>")[-1].lstrip("\n"), after.lstrip("\n")


def _calls(message: Message) -> list[Message]:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [
        f | {"arguments": json.loads(f["arguments"]) if isinstance(f["arguments"], str) else f["arguments"]}
        for f in functions
    ]


def _json_call(function: Message) -> str:
    return (
        f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {json.dumps(function["arguments"])}}}\n</tool_call>'
    )


def qwen_2_5(messages: list[Message], i: int) -> str:
    said = [messages[i]["content"] or ""] * (bool(messages[i]["content"]) or "tool_calls" not in messages[i])
    return "\n".join(said + [_json_call(f) for f in _calls(messages[i])]) + "<|im_end|>"


def qwen_3(messages: list[Message], i: int, opened: str = "") -> str:
    reasoning, content = _split(messages[i])
    called = [_json_call(function) for function in _calls(messages[i])]
    said, thought = content, ""
    if i > _last_query(messages) and (i == len(messages) - 1 or reasoning):
        said, thought = content.lstrip("\n"), "<think>\n" + reasoning.strip("\n") + "\n</think>\n\n"
    calls_text = ("\n" if content and called else "") + "\n".join(called)
    return f"{thought}{said}{calls_text}<|im_end|>".removeprefix(opened)


def qwen_3_thinking(messages: list[Message], i: int) -> str:
    return qwen_3(messages, i, "<think>\n")


def qwen_3_instruct(messages: list[Message], i: int) -> str:
    content = messages[i]["content"] or ""
    return "\n".join(([content] if content else []) + [_json_call(f) for f in _calls(messages[i])]) + "<|im_end|>"


def qwen_3_5(messages: list[Message], i: int) -> str:
    reasoning, content = _split(messages[i] | {"content": (messages[i]["content"] or "").strip()})
    text = content.strip()
    if i > _last_query(messages):
        text = f"<think>\n{reasoning.strip()}\n</think>\n\n{text}"
    for number, function in enumerate(_calls(messages[i])):
        text += ("\n\n" if content.strip() else "") if number == 0 else "\n"
        text += f"<tool_call>\n<function={function['name']}>\n"
        text += "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in function["arguments"].items())
        text += "</function>\n</tool_call>"
    return f"{text}<|im_end|>".removeprefix("<think>\n")


def glm_4_5(messages: list[Message], i: int) -> str:
    reasoning, content = _split(messages[i])
    last = max(j for j, message in enumerate(messages) if message["role"] == "user")
    text = f"\n<think>{reasoning.strip() if i > last else ''}</think>"
    text += f"\n{content.strip()}" if content.strip() else ""
    for function in _calls(messages[i]):
        arguments = "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{v if isinstance(v, str) else json.dumps(v)}</arg_value>\n"
            for k, v in function["arguments"].items()
        )
        text += f"\n<tool_call>{function['name']}\n{arguments}</tool_call>"
    following = messages[i + 1]["role"] if i + 1 < len(messages) else "tool" if "tool_calls" in messages[i] else "user"
    return text + {"user": "<|user|>", "tool": "<|observation|>"}[following]


def deepseek_v3_1(messages: list[Message], i: int) -> str:
    content = messages[i]["content"] or ""
    if "tool_calls" not in messages[i] and messages[i - 1]["role"] != "tool" and "</think>" in content:
        content = content.split("</think>", 1)[1]
    begin, sep, end = (f"<\uff5ctool\u2581{name}\uff5c>" for name in ("call\u2581begin", "sep", "call\u2581end"))
    called = "".join(f"{begin}{f['name']}{sep}{json.dumps(f['arguments'])}{end}" for f in _calls(messages[i]))
    if called:
        called = f"<\uff5ctool\u2581calls\u2581begin\uff5c>{called}<\uff5ctool\u2581calls\u2581end\uff5c>"
    return f"{content}{called}<{DEEPSEEK}>"


def llama_3_1(messages: list[Message], i: int) -> str:
    for function in _calls(messages[i]):
        return f'{{"name": "{function["name"]}", "parameters": {json.dumps(function["arguments"])}}}<|eot_id|>'
    return (messages[i]["content"] or "").strip() + "<|eot_id|>"


def kimi_k2(messages: list[Message], i: int) -> str:
    return messages[i]["content"] + "<|im_end|>"


SAYS: dict[str, Callable[[list[Message], int], str]] = {
    "QWEN_2_5": qwen_2_5,
    "QWEN_3": qwen_3,
    "QWEN_3_INSTRUCT": qwen_3_instruct,
    "QWEN_3_THINKING": qwen_3_thinking,
    "QWEN_3_5": qwen_3_5,
    "GLM_4_5": glm_4_5,
    "DEEPSEEK_V3_1": deepseek_v3_1,
    "LLAMA_3_1": llama_3_1,
    "LLAMA_3": llama_3_1,
    "KIMI_K2": kimi_k2,
}
WITHOUT_CALLS = {"LLAMA_3", "KIMI_K2"}
PIECES = (
    "",
    "a",
    "\n",
    "\nx\n",
    "<think>\n",
    "<think>\nr\n</think>\n\n",
    "</think>",
    "<|im_end|>",
    "<|im_end|>\n",
    "<|user|>",
    "<",
    "<t",
    "<|im_start|>assistant\n",
    "<tool_response>q</tool_response>",
    "  ",
    "\u00e9",
    "]",
)


def conversation(rng: random.Random, family: str) -> list[Message]:
    def say(first: str = "") -> str:
        return first + "".join(rng.choices(PIECES, k=rng.randint(0, 3)))

    def turn(**more: Any) -> Message:
        reasoned = {"reasoning_content": say("why")} if rng.random() < 0.3 else {}
        return assistant(say(), **reasoned, **more)

    messages = [{"role": "system", "content": say("s")}] if rng.random() < 0.3 else []
    for _ in range(rng.randint(1, 3)):
        messages.append(user(say("q")))
        while family not in WITHOUT_CALLS and rng.random() < 0.3:
            number = 1 if family.startswith("LLAMA") else rng.randint(1, 2)
            messages.append(turn(tool_calls=calls(rng.choice([{"a": "b"}, {"a": 1}, '{"c": "d"}']), number)))
            messages += [tool(say("r")) for _ in range(number)]
        messages.append(turn())
    if rng.random() < 0.2:
        messages.append(user(say("q")))
    return messages


@pytest.mark.parametrize("family", SAYS)
def test_random_conversations(family: str, encoder: Encoder) -> None:
    """The trained texts are what the family's model says, and stand behind the prompt that an engine would get."""
    rng, encode = random.Random(family), encoder(family)
    tokenizer = encode._tokenizer
    for _ in range(40):
        messages = conversation(rng, family)
        tools = TOOLS if rng.random() < 0.3 else None
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        assert trained(encode, messages, tools) == [SAYS[family](messages, i) for i in turns], messages
        encoded = encode.encode(messages, tools)
        text = tokenizer.decode(encoded.tokens)
        begin = np.flatnonzero(np.diff(encoded.mask, prepend=0) == 1)
        for i, first in zip(turns, begin, strict=True):
            prompt = render(tokenizer, messages[:i], tools, "{}")
            assert len(tokenizer.decode(encoded.tokens[:first])) == len(prompt) or not text.startswith(prompt), messages


# What cannot be proven, and templates that say it themselves


def encoder_of(template: str, directory: Path) -> ConversationEncoder:
    write_tokenizer(directory, template)
    return ConversationEncoder(str(directory))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for m in messages %}{{ m.content | replace('x', 'xx') if false else m.role }}{% endfor %}",
            "leaves out what",
        ),
        ("{% set text = messages | map(attribute='content') | join(',') %}{{ text }}", "does not render message 1"),
        (
            "{% for m in messages %}{{ m.content }}.{% endfor %}{% for m in messages %}{{ m.content }}.{% endfor %}",
            "message 1 more than once",
        ),
        (
            "{% set text %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ text | length }}{{ text }}",
            "renders another text while it is followed",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% if m.content != 'x' %}<|im_end|>{% endif %}{% endfor %}",
            "does not end message 1 by '<|im_end|>'",
        ),
        (
            "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[A]{% endif %}",
            "message 1 does not begin as a generation prompt does",
        ),
    ],
)
def test_what_cannot_be_proven_is_refused(template: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RowError, match=re.escape(message)):
        encoder_of(template, tmp_path).encode(TWO)


def test_loops_that_are_left_early_and_messages_that_are_one_object(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    question, answer = user("q"), assistant("x")
    messages = [question, answer, {"role": "system", "content": "s"}, question, answer]
    assert trained(encoder_of(template, tmp_path), messages) == ["x<|im_end|>", "x<|im_end|>"]


def test_calls_that_the_template_leaves_out(encoder: Encoder) -> None:
    for content in ("", "get"):
        messages = [user("u"), assistant(content, tool_calls=calls({}))]
        with pytest.raises(RowError, match="the chat template leaves out the tool calls of message 1"):
            encoder("KIMI_K2").encode(messages)


def test_tool_results_within_a_turn(tmp_path: Path) -> None:
    template = (
        "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}"
        "{{ m.tool_calls | tojson }}{{ messages[loop.index0 + 1].content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(RowError, match="renders tool results within message 1, a turn to be trained"):
        encoder_of(template, tmp_path).encode(CHAIN)


def test_generation_blocks_say_what_is_trained(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    encode = encoder_of(template, tmp_path)
    assert trained(encode, LITERAL) == ["ok <|im_end|> more<|user|><|im_end|>", "z<|im_end|>"]
    skipped = [user("q"), assistant("x", step_loss_mask=0), user("r"), assistant("y")]
    assert trained(encode, skipped) == ["y<|im_end|>"]
    with pytest.raises(RowError, match="leaves out the tool calls of message 1"):
        encode.encode(CHAIN)


def test_no_token_reaches_over_the_beginning_of_a_turn(tmp_path: Path) -> None:
    """An engine's prompt ends in a line break; what the model says after it may begin with one."""
    write_tokenizer(tmp_path, chat_templates.QWEN_2_5, merges=["\u010a\u010a"])
    encode = ConversationEncoder(str(tmp_path))
    messages = [user("\n\nq"), assistant("\nx\n\n")]
    assert trained(encode, messages) == ["\nx\n\n<|im_end|>"]
    encoded = encode.encode(messages)
    prompt = encode._tokenizer(render(encode._tokenizer, messages[:1], None, "{}"), add_special_tokens=False)[
        "input_ids"
    ]
    assert encoded.tokens[: len(prompt)].tolist() == prompt
    assert int(encoded.mask.argmax()) == len(prompt)
