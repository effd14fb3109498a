"""Reading prompt files: slices, formats, templates, filters, and the message of every bad row."""

from __future__ import annotations

import json
import logging
import random
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.data.rows.dataset import PromptDataset, load_prompts, train_prompt_spec
from slime.data.rows.reading import open_rows, split_slice, value_of
from slime.rollout.tokenizer import load_tokenizer
from slime.utils.errors import BadInputError

NUM_GPUS = 0

Args = Callable[..., Namespace]
Write = Callable[..., str]


def load(args: Namespace) -> PromptDataset:
    return load_prompts(train_prompt_spec(args))


def rows(n: int) -> list[dict[str, Any]]:
    return [{"prompt": f"question {i}", "label": str(i)} for i in range(n)]


def values(path: str) -> list[dict[str, Any]]:
    found = [value_of(row)[0] for row in open_rows(path).raw_rows()]
    return [value for value in found if value is not None]


def write_parquet(path: Path, values: list[dict[str, Any]]) -> str:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(values), path, row_group_size=7)
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_slices_are_pythons(kind: str, tmp_path: Path, write_jsonl: Write) -> None:
    n = random.randrange(15, 40)
    path = write_jsonl(rows(n)) if kind == "jsonl" else write_parquet(tmp_path / "d.parquet", rows(n))
    bounds: list[int | None] = [None, 0, 3, n - 1, n, n + 9, -1, -4, -n, -n - 5]
    for start in bounds:
        for stop in bounds:
            text = f"{path}@[{'' if start is None else start}:{'' if stop is None else stop}]"
            got = [value["label"] for value in values(text)]
            assert got == [str(i) for i in range(n)][start:stop], text


def test_slice_syntax() -> None:
    assert split_slice("a/b.jsonl@[ -5 : ]") == (Path("a/b.jsonl"), slice(-5, None))
    assert split_slice("a@b.jsonl") == (Path("a@b.jsonl"), slice(None))
    for wrong in ("x.jsonl@[1:2:3]", "x.jsonl@[3]", "x.jsonl@[a:b]", "x.jsonl@[-:]", f"x@[{'1' * 5000}:]"):
        with pytest.raises(ValueError, match=r"path@\[start:stop\]"):
            split_slice(wrong)


def test_blank_lines_are_no_rows_but_lines(write_jsonl: Write) -> None:
    path = write_jsonl([rows(1)[0], "", "   ", rows(2)[1]])
    file = open_rows(path)
    assert [file.where(row.number) for row in file.raw_rows()] == [f"{path}, line 1", f"{path}, line 4"]
    assert [value["label"] for value in values(path + "@[-1:]")] == ["1"]


def test_files_that_do_not_read(rollout_args: Args, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--prompt-data: there is no file .*nothing.jsonl"):
        load(rollout_args(prompt_data=str(tmp_path / "nothing.jsonl")))
    (tmp_path / "x.csv").write_text("a,b")
    with pytest.raises(ValueError, match=r"x.csv: unknown suffix '.csv'; use .jsonl, .json, .ndjson or .parquet"):
        load(rollout_args(prompt_data=str(tmp_path / "x.csv")))
    (tmp_path / "x.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match=r"x.parquet is not a readable parquet file"):
        load(rollout_args(prompt_data=str(tmp_path / "x.parquet")))


def test_strings_are_taken_as_they_are_and_tokenised_once(rollout_args: Args, write_jsonl: Write) -> None:
    args = rollout_args(prompt_data=write_jsonl([{"prompt": "1 + 1 =", "label": "2", "metadata": None}]))
    dataset = load(args)
    sample = dataset[0]
    assert (sample.prompt, sample.label, sample.metadata) == ("1 + 1 =", "2", {})
    assert load_tokenizer(args.hf_checkpoint).decode(sample.tokens) == "1 + 1 ="
    sample.metadata["x"] = sample.tokens.append(0)
    assert dataset[0].metadata == {}
    assert len(dataset[0].tokens) == 7


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("label", [2, 2.5, True, "2", [2, 3], {"style": "rule", "ground_truth": "2"}])
def test_labels_keep_their_type(label: Any, kind: str, rollout_args: Args, write_jsonl: Write, tmp_path: Path) -> None:
    """A user's reward compares with what stands in the row."""
    data = [{"prompt": "p", "label": label}]
    path = write_jsonl(data) if kind == "jsonl" else write_parquet(tmp_path / "d.parquet", data)
    found = load(rollout_args(prompt_data=path, custom_rm_path="mine.py:rm"))[0].label
    assert (found, type(found)) == (label, type(label))


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1+1?"}],
    "reward_model": {"style": "rule", "ground_truth": "2", "of": {"keys": {"x.y": [3, 4]}}},
    "extra_info": {"question": "1+1?"},
    "extra.info": "literal",
}


def test_dots_lead_into_objects_where_no_column_has_the_name(rollout_args: Args, tmp_path: Path) -> None:
    """So verl's own files work as they are."""
    path = write_parquet(tmp_path / "d.parquet", [VERL])
    for key, label in (("reward_model.ground_truth", "2"), ("extra.info", "literal")):
        args = rollout_args(prompt_data=path, label_key=key, rm_type="math", apply_chat_template=True)
        assert load(args)[0].label == label
    assert load(rollout_args(prompt_data=path, label_key=None, input_key="extra_info.question"))[0].prompt == "1+1?"


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("reward.x", r"there is no key 'reward' \(--label-key reward.x\); the keys are 'data_source', 'extra.info', "),
        ("reward_model.x", r"no key 'x' in 'reward_model' \(--label-key reward_model.x\); the keys are 'ground_tr"),
        ("reward_model.style.x", r"'reward_model.style' \(--label-key reward_model.style.x\) is a str, not an object"),
    ],
)  # fmt: skip
def test_dots_that_lead_nowhere(key: str, message: str, rollout_args: Args, write_jsonl: Write) -> None:
    with pytest.raises(ValueError, match=message):
        load(rollout_args(prompt_data=write_jsonl([VERL]), label_key=key, apply_chat_template=True))


@pytest.mark.parametrize(
    ("changes", "metadata"),
    [
        ({"rm_type": "math"}, None),
        ({"rm_type": "boxed_f1"}, None),
        ({"reward_key": "score"}, {"rm_type": "dapo"}),
        ({"rm_type": "random"}, {"rm_type": "deepscaler"}),
    ],
)
def test_objects_are_no_labels_of_built_in_rewards(
    changes: dict[str, Any], metadata: Any, rollout_args: Args, write_jsonl: Write
) -> None:
    """Nor in a dry run, which reads the rows."""
    row = {"prompt": "p", "reward_model": VERL["reward_model"], "metadata": metadata}
    args = rollout_args(prompt_data=write_jsonl([row]), label_key="reward_model", **changes)
    message = (
        r"line 1: 'reward_model' \(--label-key\) is an object with the keys 'style', 'ground_truth', 'of', which is "
        r"not an answer: name the key too, as in --label-key reward_model.ground_truth"
    )
    with pytest.raises(ValueError, match=message):
        load(args)
    for own in (
        {"custom_rm_path": "mine.py:rm"},
        {"custom_generate_function_path": "mine.py:generate"},
        {"data_source_path": "mine.py:Source"},
        {"rollout_sample_hook_path": ["mine.py:hook"]},
        {"rm_type": "random"} if metadata is None else {"metadata_key": None, "rm_type": "gpqa"},
    ):
        assert load(rollout_args(**(vars(args) | own)))[0].label == VERL["reward_model"]


def test_rows_may_name_all_rewards_themselves(rollout_args: Args, write_jsonl: Write) -> None:
    named, other = ({"prompt": "p", "label": "1", "metadata": metadata} for metadata in ({"rm_type": "f1"}, None))
    args = rollout_args(prompt_data=write_jsonl([named] * 3), rm_type=None)
    assert [load(args)[row].metadata for row in range(3)] == [{"rm_type": "f1"}] * 3
    args.prompt_data = write_jsonl([named, other, named, other])
    message = (
        r"^--prompt-data \S+: 2 of 4 rows have no rm_type in 'metadata' \(--metadata-key\), the first is \S+, line 2: "
        r"name one for all rows by --rm-type, or give --custom-rm-path$"
    )
    for skip_bad_rows in (False, True):
        args.skip_bad_rows = skip_bad_rows
        with pytest.raises(ValueError, match=message):
            load(args)
    for own in ({"rm_type": "f1"}, {"custom_rm_path": "mine.py:rm"}, {"custom_generate_function_path": "mine.py:f"}):
        assert len(load(rollout_args(**(vars(args) | own)))) == 4


@pytest.mark.parametrize(
    ("rm_type", "changes", "lacks"),
    [
        ("boxed_math", {"label_key": None}, "compares responses with the expected answers: --label-key is missing"),
        ("dapo", {}, "answers with an object: --reward-key must be score or acc"),
        ("remote_rm", {}, "needs --rm-url"),
        ("remote_rm", {"rm_url": "judge:8000"}, "needs an address in --rm-url, such as http://"),
    ],
)
def test_a_row_names_no_reward_that_lacks_a_flag(
    rm_type: str, changes: dict[str, Any], lacks: str, rollout_args: Args, write_jsonl: Write
) -> None:
    """As where a flag names it; engines would have started before it is asked."""
    path = write_jsonl([{"prompt": "p", "label": "1", "metadata": {"rm_type": rm_type}}])
    args = rollout_args(prompt_data=path, rm_type="random", **changes)
    with pytest.raises(ValueError, match=rf"'metadata' \(--metadata-key\) names rm_type {rm_type}, which {lacks}"):
        load(args)
    for own in (
        {"label_key": "label", "reward_key": "acc", "rm_url": "https://judge.example/score"},
        {"debug_train_only": True},
        {"custom_rm_path": "mine.py:rm"},
    ):
        assert len(load(rollout_args(**(vars(args) | own)))) == 1


@pytest.mark.parametrize("label", ["", "  ", [], ["", " "], "\\boxed{}"])
def test_empty_labels_are_none_of_built_in_rewards(label: Any, rollout_args: Args, write_jsonl: Write) -> None:
    args = rollout_args(prompt_data=write_jsonl([{"prompt": "p", "label": label}]), rm_type="f1")
    with pytest.raises(ValueError, match=r"line 1: 'label' \(--label-key\) is empty: no response equals it"):
        load(args)
    assert load(rollout_args(**(vars(args) | {"rm_type": "random"})))[0].label == label


@pytest.mark.parametrize("prompt", ["hello", [{"role": "user", "content": "hello"}]])
def test_chat_template_and_tools(prompt: Any, rollout_args: Args, write_jsonl: Write) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    data = [{"prompt": prompt, "label": "x"}, {"prompt": prompt, "label": "x", "tools": json.dumps(tools)}]
    dataset = load(rollout_args(prompt_data=write_jsonl(data), apply_chat_template=True))
    plain = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert dataset[0].prompt == plain
    assert dataset[1].prompt == f"<|im_start|>system\n{json.dumps(tools)}<|im_end|>\n{plain}"
    assert dataset[1].metadata == {"tools": tools}


def test_chat_template_kwargs(rollout_args: Args, write_jsonl: Write, make_tokenizer: Callable[..., Path]) -> None:
    template = "{{ messages[0].content }}|{{ mood }}"
    args = rollout_args(
        prompt_data=write_jsonl(rows(1)),
        hf_checkpoint=str(make_tokenizer(template)),
        apply_chat_template=True,
        apply_chat_template_kwargs={"mood": "glad"},
    )
    assert load(args)[0].prompt == "question 0|glad"


def test_template_missing_or_refusing(
    rollout_args: Args, write_jsonl: Write, make_tokenizer: Callable[..., Path]
) -> None:
    path = write_jsonl(rows(2))
    with pytest.raises(ValueError, match=r"--apply-chat-template: the tokenizer of .* has no chat template"):
        load(rollout_args(prompt_data=path, hf_checkpoint=str(make_tokenizer(None)), apply_chat_template=True))
    refusing = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="line 1: the chat template refuses the conversation: roles must alternate"):
        load(rollout_args(prompt_data=path, hf_checkpoint=str(make_tokenizer(refusing)), apply_chat_template=True))


def test_metadata_is_parsed(rollout_args: Args, write_jsonl: Write) -> None:
    data = [
        {"prompt": "p", "label": "x", "metadata": {"rm_type": "f1"}},
        {"prompt": "p", "label": "x", "metadata": '{"session_id": "s", "n": [1, 2]}'},
    ]
    dataset = load(rollout_args(prompt_data=write_jsonl(data)))
    assert [dataset[i].metadata for i in range(2)] == [{"rm_type": "f1"}, {"session_id": "s", "n": [1, 2]}]


BAD_ROWS: list[tuple[Any, str]] = [
    ('{"prompt": "p"', "not JSON: Expecting ',' delimiter at column 15; one object a line"),
    ('{"prompt": "é", label: "x"}', "not JSON: Expecting property name enclosed in double quotes at column 17; one"),
    ("[1, 2]", "a JSON object is expected, this is an array"),
    ({"question": "p", "label": "x"}, r"there is no key 'prompt' \(--input-key\); the keys are 'label', 'question'"),
    ({"prompt": "p"}, r"there is no key 'label' \(--label-key\); the keys are 'prompt'"),
    ({"prompt": True, "label": "x"}, r"'prompt' \(--input-key\) is a bool; a string or a list of chat messages"),
    ({"prompt": [], "label": "x"}, "is an empty list of messages"),
    ({"prompt": [{"content": "x"}], "label": "x"}, "message 0 of 'prompt' .* is not an object with a 'role'"),
    ({"prompt": [{"role": "user"}], "label": "x"}, "message 0 of 'prompt' .* has neither 'content' nor 'tool_calls'"),
    ({"prompt": [{"role": "user", "content": "x"}, {"role": "user", "content": None}], "label": "x"}, "message 1 of"),
    ({"prompt": [{"role": "user", "content": "x"}], "label": "x"}, "holds chat messages: add --apply-chat-template"),
    ({"prompt": "", "label": "x"}, r"'prompt' \(--input-key\) is empty"),
    ({"prompt": "p", "label": None}, r"'label' \(--label-key\) is null"),
    ({"prompt": "p", "label": "x", "metadata": "{no"}, r"'metadata' \(--metadata-key\) is a string that is not JSON"),
    ({"prompt": "p", "label": "x", "metadata": "[1]"}, r"'metadata' \(--metadata-key\) is a list, not an object"),
    ({"prompt": "p", "label": "x", "tools": "{}"}, r"'tools' \(--tool-key\) is a dict, not a list of tools"),
    (
        {"prompt": "a\ud83d", "label": "x"},
        r"'prompt' \(--input-key\) has half a character \('\\ud83d', .* at position 1",
    ),
    ({"prompt": "p", "label": ["\udc00"]}, r"'label' \(--label-key\) has half a character"),
    ({"prompt": "p", "label": "x", "metadata": {"\ud800": 1}}, r"'metadata' \(--metadata-key\) has half a character"),
    ({"prompt": "p", "label": float("nan")}, r"'label' \(--label-key\) is .*nan"),
    ('{"prompt": "p", "label": 1e999}', r"'label' \(--label-key\) is .*inf"),
    (
        {"prompt": "p", "label": "x", "metadata": {"a": [float("nan")]}},
        r"'metadata' .* is or holds nan, which is not a number",
    ),
    ({"prompt": "p", "label": "x", "metadata": '{"a": -Infinity}'}, r"'metadata' .* is or holds -inf"),
    ('{"prompt": "p", "label": ' + "[" * 100_000 + "]" * 100_000 + "}", "not JSON: it is nested too deeply"),
    ({"prompt": "p", "label": "x", "metadata": "[" * 100_000}, "is a string that is not JSON: it is nested too deeply"),
    (
        '{"prompt": "p", "label": ' + "[" * 200 + "]" * 200 + "}",
        r"'label' \(--label-key\) is nested more than 100 deep",
    ),
    ('{"prompt": "p", "label": ' + "1" * 5000 + "}", "not JSON: it has a number of too many digits"),
    ('{"prompt": "p", "label": "x", "prompt": "q"}', "not JSON: it has the key 'prompt' twice"),
    ('{"prompt": "p\0", "label": "x"}', "not JSON: it has NUL bytes"),
    ({"prompt": "p", "label": "x", "metadata": {"rm_type": "bogus"}}, "has an unknown rm_type 'bogus': there are"),
    ({"prompt": "p", "label": "x", "metadata": {"rm_type": 7}}, "has an unknown rm_type 7: there are"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
def test_bad_row_is_an_error_or_skipped(row: Any, message: str, rollout_args: Args, write_jsonl: Write) -> None:
    path = write_jsonl([*rows(2), row, *rows(1)])
    with pytest.raises(ValueError, match=message) as error:
        load(rollout_args(prompt_data=path))
    assert str(error.value).startswith(f"--prompt-data {path}, line 3: ")
    dataset = load(rollout_args(prompt_data=path, skip_bad_rows=True))
    assert (len(dataset), dataset.num_bad) == (3, 1)


def test_the_first_bad_rows_and_their_number_are_shown(
    rollout_args: Args, write_jsonl: Write, caplog: pytest.LogCaptureFixture
) -> None:
    bad = ["{", {"label": "x"}, {"prompt": "", "label": "x"}, "[]", {"prompt": None, "label": "x"}, "}", "{"]
    path = write_jsonl([*rows(1), *bad, *rows(2)])
    with pytest.raises(BadInputError) as error:
        load(rollout_args(prompt_data=path))
    *shown, total = str(error.value).splitlines()
    assert [line.partition(": ")[0] for line in shown] == [f"--prompt-data {path}, line {n}" for n in range(2, 7)]
    assert total.startswith("--prompt-data: 7 of 10 rows are bad, the first 5 are above (--skip-bad-rows leaves")
    assert "2 x not JSON: Expecting property name enclosed in double quotes" in total
    dataset = load(rollout_args(prompt_data=path, skip_bad_rows=True))
    assert (len(dataset), dataset.num_bad) == (3, 7)
    assert f"skipped: 7 rows of {path} in all: 2 x not JSON: Expecting property name" in caplog.text


def test_what_is_wrong_with_every_row_is_one_line(rollout_args: Args, write_jsonl: Write) -> None:
    path = write_jsonl(rows(40))
    with pytest.raises(BadInputError) as error:
        load(rollout_args(prompt_data=path, label_key="answer"))
    assert str(error.value).startswith(f"--prompt-data {path}, line 1: there is no key 'answer' (--label-key")
    assert str(error.value).endswith(" (the same in all 40 rows)")
    assert len(str(error.value).splitlines()) == 1


def test_whatever_a_tokenizer_raises_is_of_its_row(
    rollout_args: Args, write_jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = rollout_args(prompt_data=write_jsonl(rows(1500)))
    tokenizer = type(load_tokenizer(args.hf_checkpoint))
    real = tokenizer.__call__

    def raising(self: Any, given: Any, **kwargs: Any) -> Any:
        if "question 1200" in given:
            raise ZeroDivisionError("odd")
        return real(self, given, **kwargs)

    monkeypatch.setattr(tokenizer, "__call__", raising)
    with pytest.raises(BadInputError, match="line 1201: the tokenizer fails: ZeroDivisionError: odd "):
        load(args)
    args.skip_bad_rows = True
    dataset = load(args)
    assert (len(dataset), dataset.num_bad, dataset[1200].label) == (1499, 1, "1201")


@pytest.mark.parametrize("fails", ["1 // 0", "messages[5].content.nothing", "10.0 ** 999", "raise_exception('no')"])
def test_whatever_a_template_raises_is_of_its_row(
    fails: str, rollout_args: Args, write_jsonl: Write, make_tokenizer: Callable[..., Path]
) -> None:
    template = "{% if messages[0].content == 'question 1' %}{{ " + fails + " }}{% endif %}{{ messages[0].content }}"
    args = rollout_args(prompt_data=write_jsonl(rows(3)), hf_checkpoint=str(make_tokenizer(template)))
    args.apply_chat_template = True
    with pytest.raises(BadInputError, match="line 2: the chat template refuses the conversation"):
        load(args)
    args.skip_bad_rows = True
    assert [sample.label for sample in load(args)] == ["0", "2"]


def test_columns_of_parquet_that_nobody_asked_for_are_not_read(rollout_args: Args, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "x.parquet"
    table = pyarrow.table(
        {
            "prompt": ["a", "b", "c"],
            "label": ["1", "2", "3"],
            "metadata": pyarrow.array([[("k", "v")], None, []], pyarrow.map_(pyarrow.string(), pyarrow.string())),
            "unread": ["x" * 50_000] * 3,
        }
    )
    pyarrow.parquet.write_table(table, path, compression="none", use_dictionary=False)
    content = bytearray(path.read_bytes())
    start = content.index(b"x" * 1000) - 24  # the header of its page
    content[start : start + 100] = b"\xff" * 100
    path.write_bytes(content)
    dataset = load(rollout_args(prompt_data=str(path)))
    assert [sample.metadata for sample in dataset] == [{"k": "v"}, {}, {}]
    with pytest.raises(BadInputError, match=r"no key 'gone' \(--input-key\); the keys are .*'prompt', 'unread'"):
        load(rollout_args(prompt_data=str(path), input_key="gone"))
    args = rollout_args(prompt_data=str(path), label_key="unread", skip_bad_rows=True)
    with pytest.raises(
        BadInputError, match=r"no row is left of 3 \(3 bad.*3 x row group N cannot be read from here on"
    ):
        load(args)


def test_unread_values_of_jsonl_may_be_anything(rollout_args: Args, write_jsonl: Write) -> None:
    path = write_jsonl([{"prompt": "p", "label": "x", "score": float("nan"), "\ud800": "\ud800"}])
    assert len(load(rollout_args(prompt_data=path))) == 1


def test_a_message_may_be_a_tool_call_alone(rollout_args: Args, write_jsonl: Write) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    messages = [{"role": "user", "content": "1+1"}, call, {"role": "tool", "content": "2"}]
    args = rollout_args(prompt_data=write_jsonl([{"prompt": messages, "label": "x"}]))
    args.custom_generate_function_path = "my.generate"
    assert load(args)[0].prompt == messages


def test_a_template_that_refuses_measured_messages(
    rollout_args: Args, write_jsonl: Write, make_tokenizer: Callable[..., Path]
) -> None:
    template = (
        "{% if messages[0].content == 'no' %}{{ raise_exception('refused') }}{% endif %}{{ messages[0].content }}"
    )
    path = write_jsonl([{"prompt": [{"role": "user", "content": c}], "label": "x"} for c in ("yes", "no")])
    args = rollout_args(prompt_data=path, hf_checkpoint=str(make_tokenizer(template)), rollout_max_prompt_len=9)
    args.custom_generate_function_path = "my.generate"
    with pytest.raises(ValueError, match="line 2: the chat template refuses the conversation: refused"):
        load(args)
    args.skip_bad_rows = True
    assert (len(load(args)), load(args).num_bad) == (1, 1)


def test_not_utf8_and_bad_parquet_row(rollout_args: Args, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"prompt": "\xff", "label": "x"}\n')
    with pytest.raises(ValueError, match=r"x.jsonl, line 1: not UTF-8"):
        load(rollout_args(prompt_data=str(path)))
    parquet = write_parquet(tmp_path / "x.parquet", [{"prompt": "a", "label": "b"}, {"prompt": None, "label": "b"}])
    with pytest.raises(ValueError, match=r"x.parquet, row 2: 'prompt' \(--input-key\) is a NoneType"):
        load(rollout_args(prompt_data=parquet))


def test_parquet_columns(rollout_args: Args, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    values = [{"prompt": messages, "label": "x", "metadata": {"a": 1}}, {"prompt": messages, "label": "y"}]
    args = rollout_args(prompt_data=write_parquet(tmp_path / "x.parquet", values), apply_chat_template=True)
    dataset = load(args)
    assert dataset[1].prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert [dataset[i].metadata for i in range(2)] == [{"a": 1}, {}]


@pytest.mark.parametrize("messages", [False, True])
def test_length_filter_counts(messages: bool, rollout_args: Args, write_jsonl: Write) -> None:
    lengths = [random.randrange(1, 60) for _ in range(50)] + [30, 31]
    texts = ["x" * n for n in lengths]
    data = [{"prompt": [{"role": "user", "content": t}] if messages else t, "label": "x"} for t in texts]
    # Templates add 2 special tokens, "user\n", "\n" and the generation prompt "<|im_start|>assistant\n".
    limit = 30 + (2 + 5 + 1 + 11 if messages else 0)
    args = rollout_args(prompt_data=write_jsonl(data), rollout_max_prompt_len=limit)
    if messages:
        args.custom_generate_function_path = "my.generate"
    dataset = load(args)
    assert len(dataset) == sum(n <= 30 for n in lengths)
    assert dataset.num_too_long == sum(n > 30 for n in lengths)


def test_rows_left_out_are_a_warning(rollout_args: Args, write_jsonl: Write, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "slime"):
        load(rollout_args(prompt_data=write_jsonl(rows(3))))
        assert [record.levelname for record in caplog.records] == ["INFO"]
        caplog.clear()
        long = {"prompt": "x" * 50, "label": ""}
        path = write_jsonl([*rows(3), long, "{"])
        load(rollout_args(prompt_data=path, rollout_max_prompt_len=40, skip_bad_rows=True))
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert "3 prompts of 5 rows (1 bad, 1 longer than 40 tokens)" in caplog.text


def test_a_tokenizer_of_its_own_code_is_refused(rollout_args: Args, write_jsonl: Write, tmp_path: Path) -> None:
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    mark = tmp_path / "ran"
    (checkpoint / "code.py").write_text(f"open({str(mark)!r}, 'w')\nclass Mine: pass\n")
    config = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["code.Mine", None]}}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(config))
    (checkpoint / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer does not load: put a tokenizer.json beside the weights"):
        load(rollout_args(prompt_data=write_jsonl(rows(1)), hf_checkpoint=str(checkpoint)))
    (checkpoint / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"--hf-checkpoint .*: its tokenizer does not load: (?!put)"):
        load(rollout_args(prompt_data=write_jsonl(rows(1)), hf_checkpoint=str(checkpoint)))
    assert not mark.exists()


def test_a_directory_without_a_tokenizer_is_told(rollout_args: Args, write_jsonl: Write, tmp_path: Path) -> None:
    """transformers makes one of a single token for it, by which every prompt would be empty."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(ValueError, match=r"--hf-checkpoint .*: no files of a tokenizer are in it"):
        load(rollout_args(prompt_data=write_jsonl(rows(1)), hf_checkpoint=str(tmp_path)))


def test_nothing_left_is_an_error(rollout_args: Args, write_jsonl: Write) -> None:
    path = write_jsonl([*rows(3), "{"])
    with pytest.raises(ValueError, match=r"no row is left of 4 \(1 bad, 3 longer than 2 tokens\)"):
        load(rollout_args(prompt_data=path, rollout_max_prompt_len=2, skip_bad_rows=True))


def test_more_rows_than_a_batch(rollout_args: Args, write_jsonl: Write) -> None:
    dataset = load(rollout_args(prompt_data=write_jsonl(rows(2500))))
    picked = random.randrange(2500)
    assert dataset[picked].label == str(picked)
    assert vars(dataset[picked])["source_row"].endswith(f"line {picked + 1}")


@pytest.mark.parametrize(
    ("key", "found", "warned"),
    [
        ("extra_info", {"split": "test"}, False),
        ("extra.deeper", {"a": 1}, False),
        ("metadata", {}, False),  # nobody asked for it
        ("extra_inf", {}, True),
        ("extra.deepe", {}, True),
        ("extra_info.split.deeper", None, False),
    ],
)
def test_metadata_is_found_or_its_key_is_told(
    key: str,
    found: dict[str, Any] | None,
    warned: bool,
    rollout_args: Args,
    write_jsonl: Write,
) -> None:
    row = {"prompt": "1+1=", "label": "2", "extra_info": {"split": "test"}, "extra": {"deeper": {"a": 1}}}
    lacking = [row | {"extra": empty, "extra_info": None} for empty in (None, {})]  # null, as parquet has it, and {}
    path = write_jsonl([row, *lacking, {"prompt": "1+2=", "label": "3"}])
    args = rollout_args(prompt_data=path, metadata_key=key)
    if found is None:
        with pytest.raises(BadInputError, match=f"'{key}' .--metadata-key. leads into a str, not an object"):
            load(args)
        return
    dataset = load(args)
    assert [sample.metadata for sample in dataset] == [found, {}, {}, {}]
    told = (
        f"--prompt-data {path}: no row has anything at '{key}' (--metadata-key); the keys of its rows are 'extra', "
        "'extra_info', 'label', 'prompt'"
    )
    assert dataset.warnings == ([told] if warned else [])
