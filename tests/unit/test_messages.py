"""Chat messages and tools in the many forms that rows have them in, as a template gets them."""

from __future__ import annotations

import json
import logging
import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.data.rows.conversation import render
from slime.data.rows.dataset import PromptDataset, load_prompts, train_prompt_spec
from slime.data.rows.messages import RowError, messages_of_json, without_arrow_nulls
from slime.rollout.tokenizer import load_tokenizer
from slime.utils.errors import BadInputError
from tests import chat_templates

NUM_GPUS = 0

Args = Callable[..., Namespace]
Write = Callable[..., str]
Make = Callable[[str], Path]
Row = dict[str, Any]
FAMILIES = tuple(name for name in vars(chat_templates) if name[0].isalpha() and name.isupper())
WITH_CALLS = tuple(name for name in FAMILIES if name not in ("GLM_4", "LLAMA_3", "KIMI_K2"))


def parts(*texts: str) -> list[Row]:
    return [{"type": "text", "text": text} for text in texts]


def call(arguments: Any, **more: Any) -> Row:
    function = {"name": "get", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "get:0", "type": "function", "function": function}], **more}


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer: Make) -> Callable[[str], Any]:
    made: dict[str, Any] = {}

    def get(family: str) -> Any:
        if family not in made:
            made[family] = load_tokenizer(str(make_tokenizer(getattr(chat_templates, family))))
        return made[family]

    return get


def write_parquet(path: Path, rows: list[Row]) -> str:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def load(args: Namespace) -> PromptDataset:
    return load_prompts(train_prompt_spec(args))


@pytest.mark.parametrize("family", FAMILIES)
def test_text_parts_are_text(family: str, tokenizer: Any) -> None:
    def text(*contents: Any) -> str:
        roles = ("system", "user", "assistant", "user")
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        return render(tokenizer(family), messages, None, "{}")

    plain = text("be brief", "what is 2+2?", "it is 4", "sure?")
    assert text(*map(parts, ("be brief", "what is 2+2?", "it is 4", "sure?"))) == plain
    assert text(parts("be ", "brief"), parts("what is ", "2+2?"), parts("it is", " 4"), ["su", "re?"]) == plain


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": "x"}, {"type": "text"}, {"type": "text", "text": 5}, 5]
)
def test_other_parts_are_an_error(part: Any, rollout_args: Args, write_jsonl: Write) -> None:
    rows = [{"prompt": [{"role": "user", "content": [*parts("look: "), part]}], "label": "x"}]
    with pytest.raises(BadInputError, match=r"line 1: part 1 of the content of message 0 (is not|has no) text"):
        load(rollout_args(prompt_data=write_jsonl(rows), apply_chat_template=True))


@pytest.mark.parametrize("family", WITH_CALLS)
def test_arguments_are_objects_or_json(family: str, tokenizer: Any) -> None:
    arguments = {"city": "S\u00e3o Paulo", "days": 2}
    ask, answer = {"role": "user", "content": "q"}, {"role": "tool", "content": "r"}

    def text(message: Row) -> str:
        return render(tokenizer(family), [ask, message, answer], None, "{}")

    expected = text(call(arguments, content=""))
    assert "S\u00e3o Paulo" in expected
    assert '\\"' not in expected
    assert "None" not in expected
    forms: list[Row] = [{"content": None}, {}, {"content": "", "tool_call_id": None, "reasoning_content": None}]
    for form in forms:
        assert text(call(json.dumps(arguments), **form)) == expected
        assert text(call(arguments, **form)) == expected
    empty = {"role": "assistant", "content": "a", "tool_calls": []}
    assert text(empty) == text({"role": "assistant", "content": "a", "tool_calls": None})
    assert text(empty) == text({"role": "assistant", "content": "a"})


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([call("{no", content="")], "the arguments of tool call 0 of message 0 are a string that is not JSON"),
        ([call("[1]", content="")], "the arguments of tool call 0 of message 0 are a list, not an object"),
        ([call(5, content="")], "the arguments of tool call 0 of message 0 are a int, not an object"),
        ([call('{"x": NaN}', content="")], "the object of the arguments of tool call 0 of message 0 is or holds nan"),
        ([call({"x": float("inf")}, content="")], "the object of the arguments of tool call 0 .* is or holds inf"),
        ([call('{"x": 1, "x": 2}', content="")], "call 0 of message 0 are a .* not JSON: it has the key 'x' twice"),
        ([call('{"x": "\\ud800"}', content="")], "of tool call 0 of message 0 has half a character"),
        ([call('{"x": ' * 3000 + "1" + "}" * 3000, content="")], "tool call 0 of message 0 .*nested"),
        ([{"role": "assistant", "content": "", "tool_calls": "get()"}], "'tool_calls' of message 0 is not a list of"),
    ],
)
def test_arguments_of_other_kinds(messages: list[Row], message: str, tokenizer: Any) -> None:
    with pytest.raises(RowError, match=message):
        render(tokenizer("QWEN_3"), messages, None, "{}")


def test_no_tools_are_none(rollout_args: Args, write_jsonl: Write, make_tokenizer: Make) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "q"}], "label": "x", "tools": tools} for tools in ([], "[]", None, "")
    ]
    for family in ("LLAMA_3_1", "QWEN_3"):
        checkpoint = str(make_tokenizer(getattr(chat_templates, family)))
        dataset = load(rollout_args(prompt_data=write_jsonl(rows), apply_chat_template=True, hf_checkpoint=checkpoint))
        assert len({str(dataset[i].prompt) for i in range(4)}) == 1
        assert [dataset[i].metadata for i in range(4)] == [{}] * 4


def test_parquet_gives_what_jsonl_gives(
    rollout_args: Args, write_jsonl: Write, make_tokenizer: Make, tmp_path: Path
) -> None:
    """Arrow gives all structs of a column the same keys, with null for those that a row lacks."""

    def tool(name: str, **properties: Any) -> Row:
        return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}

    ask = {"role": "user", "content": "q"}
    answer = {"role": "assistant", "content": "a", "reasoning_content": "r"}
    rows = [
        {
            "prompt": [ask, call({"city": "Rome"}, content=""), {"role": "tool", "content": "5"}],
            "label": {"target": ["x"]},
            "tools": [tool("weather", city={"type": "string", "enum": ["a", None]})],
            "metadata": {"difficulty": {"level": 1}},
        },
        {
            "prompt": [ask, answer, ask],
            "label": {"score": 1},
            "tools": [tool("add", x={"type": "number"}, y={"type": "number"}), tool("now")],
            "metadata": {"source": "b"},
        },
    ]
    jsonl, parquet = write_jsonl(rows), write_parquet(tmp_path / "rows.parquet", rows)
    for family in ("QWEN_3", "GLM_4_5", "LLAMA_3_1"):
        checkpoint = str(make_tokenizer(getattr(chat_templates, family)))
        first, second = (
            load(rollout_args(prompt_data=path, apply_chat_template=True, hf_checkpoint=checkpoint))
            for path in (jsonl, parquet)
        )
        for i in range(2):
            assert first[i].prompt == second[i].prompt
            assert (first[i].metadata, first[i].label) == (second[i].metadata, second[i].label)
            assert first[i].tokens == second[i].tokens
    pairs = [("k", 1), ("l", 2)]
    assert without_arrow_nulls({"a": None, "b": [None, {"c": None}], "d": pairs}) == {"b": [None, {}], "d": pairs}


def test_a_map_of_parquet_is_an_object(rollout_args: Args, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    kind = pyarrow.map_(pyarrow.string(), pyarrow.string())
    columns = {"prompt": ["q"], "label": ["x"], "metadata": pyarrow.array([[("rm_type", "math")]], kind)}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "map.parquet")
    assert load(rollout_args(prompt_data=str(tmp_path / "map.parquet")))[0].metadata == {"rm_type": "math"}


def test_prompts_as_json_text(rollout_args: Args, write_jsonl: Write) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    rows = [
        {"prompt": prompt, "label": "x"} for prompt in (messages, json.dumps(messages), f" {json.dumps(messages)}\n")
    ]
    dataset = load(rollout_args(prompt_data=write_jsonl(rows), apply_chat_template=True))
    assert len({str(dataset[i].prompt) for i in range(3)}) == 1
    # Without a template it is text like any other, and so is a list of something else.
    dataset = load(rollout_args(prompt_data=write_jsonl(rows[1:2])))
    assert dataset[0].prompt == json.dumps(messages)
    for text in ("[1, 2]", "[]", "[no", '[{"content": "x"}]', '["role"]', "[" * 100_000):
        assert messages_of_json(text, "it") == text
    text = '[{"a": 1, "a": 2}]'
    assert messages_of_json(text, "it") == text, "a list of something else, whatever is in it"


BAD_TEXTS = {
    '[{"role": "user", "content": "q", "top_p": NaN}]': "is or holds nan",
    '[{"role": "user", "content": "q", "top_p": -Infinity}]': "is or holds -inf",
    '[{"role": "user", "content": "q", "content": "r"}]': "cannot be read: it has the key 'content' twice",
    '[{"role": "user", "content": "half \\ud83d"}]': "has half a character",
}


@pytest.mark.parametrize("text", BAD_TEXTS)
def test_messages_as_json_text_have_nothing_that_no_sample_can_carry(
    text: str, rollout_args: Args, write_jsonl: Write
) -> None:
    path = write_jsonl([{"prompt": text, "label": "x"}])
    message = re.escape(BAD_TEXTS[text])
    with pytest.raises(BadInputError, match=rf"'prompt' \(--input-key\) is JSON text of messages, which {message}"):
        load(rollout_args(prompt_data=path, apply_chat_template=True))
    assert load(rollout_args(prompt_data=path))[0].prompt == text, "without a template it is text like any other"


@pytest.mark.parametrize("tools", [5, "calculator", {"name": "add"}])
def test_tools_in_the_metadata_that_are_none(tools: Any, rollout_args: Args, write_jsonl: Write) -> None:
    path = write_jsonl([{"prompt": "q", "label": "x", "metadata": {"tools": tools}}])
    kind = type(tools).__name__
    with pytest.raises(BadInputError, match=rf"'tools' in 'metadata' \(--metadata-key\) is a {kind}, not a list of"):
        load(rollout_args(prompt_data=path, apply_chat_template=True))
    assert load(rollout_args(prompt_data=path))[0].metadata == {"tools": tools}, "a function of the user's may read it"


@pytest.mark.parametrize("choices", [3, "ABCD", True])
def test_choices_that_are_none_are_seen_when_the_file_is_read(
    choices: Any, rollout_args: Args, write_jsonl: Write
) -> None:
    path = write_jsonl([{"prompt": "q", "label": "A", "metadata": {"choices": choices, "rm_type": "gpqa"}}])
    with pytest.raises(
        BadInputError, match=rf"'choices' in 'metadata' \(--metadata-key\) is a {type(choices).__name__}"
    ):
        load(rollout_args(prompt_data=path))
    fine = [{"prompt": "q", "label": "A", "metadata": {"choices": c}} for c in (["x", "y"], {"A": "x"}, [], None)]
    assert len(load(rollout_args(prompt_data=write_jsonl(fine), rm_type="gpqa"))) == len(fine)


@pytest.mark.parametrize(("number", "text"), [(5, "5"), (0, "0"), (-3, "-3"), (1.5, "1.5")])
def test_numbers_are_text(number: float, text: str, rollout_args: Args, write_jsonl: Write, tmp_path: Path) -> None:
    rows = [{"prompt": number, "label": "x"}]
    for path in (write_jsonl(rows), write_parquet(tmp_path / "numbers.parquet", rows)):
        assert load(rollout_args(prompt_data=path))[0].prompt == text
        prompt = load(rollout_args(prompt_data=path, apply_chat_template=True))[0].prompt
        assert prompt == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def test_a_key_that_no_template_reads(
    rollout_args: Args, write_jsonl: Write, make_tokenizer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    said = {"role": "assistant", "content": "a1", "thinking": "because", "tool_call_id": "0"}
    rows = [{"prompt": [{"role": "user", "content": "q"}, said, {"role": "user", "content": "r"}], "label": "x"}] * 3
    checkpoint = str(make_tokenizer(chat_templates.QWEN_3))
    with caplog.at_level(logging.WARNING):
        load(rollout_args(prompt_data=write_jsonl(rows), apply_chat_template=True, hf_checkpoint=checkpoint))
    (line,) = [
        record.getMessage() for record in caplog.records if "the chat template does not read" in record.getMessage()
    ]
    assert line.startswith("messages have the key 'thinking', which the chat template does not read")
    assert line.endswith("reads content, name, reasoning_content, role, tool_calls")
