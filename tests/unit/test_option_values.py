"""Values that no flag takes: one line each, by the type of the flag."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

import pytest

from slime.entry.arguments import assemble
from slime.options.flags.parser import StrictParser
from slime.options.flags.sglang import PassThrough
from slime.options.flags.values import problem_of, shortened
from tests.command_line import Fails, Parse

NUM_GPUS = 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size: must be at least 1, not 0"),
        ("--pipeline-model-parallel-size 0", "must be at least 1"),
        ("--context-parallel-size 0", "must be at least 1"),
        ("--expert-model-parallel-size 0", "must be at least 1"),
        ("--expert-tensor-parallel-size 0", "must be at least 1"),
        ("--num-virtual-stages-per-pipeline-rank 0", "must be at least 1"),
        ("--num-layers-per-virtual-pipeline-stage 0", "must be at least 1"),
        ("--lr nan", "--lr: must be a finite number, not nan"),
        ("--lr -1", "--lr: must be at least 0"),
        ("--clip-grad nan", "must be a finite number"),
        ("--adam-beta1 2", "--adam-beta1: must be below 1"),
        ("--adam-beta2 1", "--adam-beta2: must be below 1"),
        ("--weight-decay -0.1", "--weight-decay: must be at least 0"),
        ("--seed 99999999999999999999", "--seed: must be an integer of 64 bits, not one of 67"),
        ("--seed 5000000000", "--seed: must be at most 4294967295"),
        ("--seed -1", "--seed: must be at least 0"),
        ("--rollout-seed -1", "--rollout-seed: must be at least 0"),
        ("--rollout-stop-token-ids 5 -5", "--rollout-stop-token-ids: must be at least 0"),
        ("--rollout-timeout inf", "--rollout-timeout: must be a finite number"),
        ("--rollout-temperature inf", "--rollout-temperature: must be a finite number"),
        ("--entropy-coef=-inf", "--entropy-coef: must be a finite number"),
        ("--sglang-mem-fraction-static nan", "--sglang-mem-fraction-static: must be a finite number"),
        ("--sglang-context-length 99999999999999999999", "must be an integer of 64 bits, not one of 67"),
        ("--router-request-timeout-secs 99999999999999999999", "must be an integer of 64 bits"),
        ("--q-lora-rank inf", "--q-lora-rank: invalid value: 'inf'"),
        ('--apply-chat-template-kwargs {"a":NaN}', "must be a finite number, not nan"),
        ('--apply-chat-template-kwargs {"a":"\\u0000"}', "has a NUL byte in it"),
        ("--custom-rm-path builtins:True", "'True' is a bool, not a function or class"),
        ("--custom-config-path model", "--custom-config-path model: it is not a file"),
        ("--custom-config-path none.yaml", "--custom-config-path none.yaml: there is no such file"),
        ("--hf-checkpoint ~nobody-here/x", "--hf-checkpoint ~nobody-here/x: there is no such directory"),
        ("--prompt-data ~nobody-here/x.jsonl", "--prompt-data ~nobody-here/x.jsonl: there is no such file"),
        ("--save \udc80", "--save: is not UTF-8"),
        (f"--load {'x' * 5000}", "there is no checkpoint in it"),
        ("--lr=--", "argument --lr: invalid float value: '--'"),
        ("--hf-checkpoint=--", "--hf-checkpoint --: there is no such directory"),
    ],
)
def test_one_line(launch_directory: Path, fails: Fails, words: str, expected: str) -> None:
    assert expected in fails(words)


@pytest.mark.parametrize("function", ["builtins.print", "builtins:int", "sys:exit", "math:sqrt", "itertools:chain"])
@pytest.mark.parametrize("name", ["custom_loss_function", "data_source", "custom_reward_post_process"])
def test_functions_of_modules_in_c_load_or_are_refused(
    launch_directory: Path, parse: Parse, capsys: pytest.CaptureFixture[str], function: str, name: str
) -> None:
    with contextlib.suppress(SystemExit):
        parse(f"--{name.replace('_', '-')}-path {function}")
    assert "Traceback" not in capsys.readouterr().err


ODD = """
def add_arguments(parser): raise SystemExit(3)
def f(args): pass
class Shy:
    def __getattr__(self, name): raise RuntimeError(name)
    def __call__(self, *args): return True
shy = Shy()
def __getattr__(name):
    if name == "lazy": raise RuntimeError("no GPU")
    raise AttributeError(name)
"""


@pytest.mark.parametrize("flag", ["--custom-rollout-log-function-path", "--custom-loss-function-path"])
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("odd.py:lazy", "asking it for 'lazy' raised RuntimeError: no GPU"),
        ("odd.py:shy", "asking it for its parameters raised RuntimeError: "),
        ("own.py:f", "its add_arguments raised SystemExit: 3"),
        ("shy.py:f", "asking it for 'add_arguments' raised RuntimeError: add_arguments"),
    ],
)
def test_functions_that_raise_when_they_are_asked_for_something(
    launch_directory: Path, fails: Fails, flag: str, function: str, expected: str
) -> None:
    (launch_directory / "own.py").write_text(ODD)
    (launch_directory / "odd.py").write_text(ODD.replace("add_arguments", "others"))
    (launch_directory / "shy.py").write_text("def __getattr__(name): raise RuntimeError(name)\ndef f(): pass")
    assert fails(f"{flag} {function}").startswith(f"{flag} {function}: {expected}")


FLAGS = """
def odd(text):
    if text != "2": raise RuntimeError("no " + text)
    return 2
def add_arguments(parser):
    parser.add_argument("--own-number", type=odd, default={default!r}, help="100% of it")
    parser.add_argument("--own-share", default="50%")
def f(args, *values, **others): return True
"""


def test_types_and_texts_of_a_users_own_flags(launch_directory: Path, parse: Parse, fails: Fails) -> None:
    words = "--custom-rollout-log-function-path flags{}.py:f "
    for default in "23":
        (launch_directory / f"flags{default}.py").write_text(FLAGS.replace("{default!r}", repr(default)))
    assert parse(words.format(2)).own_number == 2
    expected = "argument --own-number: its type or choices raised RuntimeError: no "
    assert fails(words.format(3)) == f"{expected}3"
    assert fails(words.format(2) + "--own-number 7") == f"{expected}7"
    (launch_directory / "own.yaml").write_text("own_number: 5")
    assert fails(words.format(2) + "--custom-config-path own.yaml") == f"--custom-config-path own.yaml: {expected}5"


def test_help_of_a_users_own_flags(launch_directory: Path, parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    (launch_directory / "flags.py").write_text(FLAGS.replace("{default!r}", "'2'"))
    with pytest.raises(SystemExit) as end:
        parse("--custom-rollout-log-function-path flags.py:f --help all")
    assert end.value.code == 0
    assert "100% of it (default 2)." in " ".join(capsys.readouterr().out.split())


def test_two_dashes_are_a_value_behind_an_equals_sign(launch_directory: Path, parse: Parse) -> None:
    args = parse("--save=-- --rollout-stop=--")
    assert (args.save, args.rollout_stop) == (str(launch_directory / "--"), ["--"])


def test_a_module_that_ends_the_process_is_named(launch_directory: Path, fails: Fails) -> None:
    (launch_directory / "ends.py").write_text("raise SystemExit(3)")
    assert "ends.py failed: SystemExit: 3" in fails("--custom-rm-path ends.py:f")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xff\xfe", "it is not UTF-8 (byte 0)"),
        (b"- a", "not a mapping of names to values"),
        (b"text", "not a mapping of names to values"),
        (b"1: 2", "not a mapping of names to values"),
        (b"lr: 1\nlr: 2", "the key 'lr' is there twice in line 2, column 1"),
        (b"a: [{b: 1, b: 2}]", "the key 'b' is there twice in line 1, column 12"),
        (b"a: [1", "while parsing a flow sequence in line 1, column 4"),
        (b"a: 2020-99-99", "month must be in 1..12"),
        (b"[" * 20000, "it is nested too deeply"),
        (b"a: &x [*x]", "it refers to itself"),
        (b'save: "\\0"', "--save: has a NUL byte in it"),
        (b"lr: .nan", "--lr: must be a finite number"),
        (b"tensor_model_parallel_size: 0", "must be at least 1, not 0"),
        (b"seed: 1" + b"0" * 30, "--seed: must be an integer of 64 bits"),
    ],
)
def test_yaml_files_that_cannot_be_meant(launch_directory: Path, fails: Fails, content: bytes, expected: str) -> None:
    (launch_directory / "own.yaml").write_bytes(content)
    assert expected in fails("--custom-config-path own.yaml")


def test_a_file_that_another_editor_marked_as_utf_8_is_read(launch_directory: Path, parse: Parse) -> None:
    (launch_directory / "own.yaml").write_bytes(b"\xef\xbb\xbflr: 0.25")
    assert parse("--custom-config-path own.yaml").lr == 0.25


def test_evaluation_datasets_take_finite_numbers_only(launch_directory: Path, fails: Fails) -> None:
    text = "datasets:\n  a:\n    path: data.jsonl\n    {}\n"
    for entry, expected in (("temperature: .inf", "a finite number"), ("stop_token_ids: [-5]", "must be at least 0")):
        (launch_directory / "eval.yaml").write_text(text.format(entry))
        assert expected in fails("--eval-interval 1 --eval-config eval.yaml")


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
def test_every_number_of_the_table_is_finite(value: str) -> None:
    parser = StrictParser()
    assemble(parser)
    taken = []
    for action in parser._actions:
        kind: Any = action.convert if isinstance(action, PassThrough) else action.type
        if getattr(kind, "__name__", "") in ("int", "float", "_integer", "positive", "_human_int"):
            flag = action.option_strings[0]
            try:
                parser.set_entry(action.dest, value, argparse.Namespace())
            except ValueError:
                continue
            taken.append(flag)
    assert not taken


def test_what_can_be_no_value() -> None:
    assert [problem_of(value) for value in (1, 0.5, "x", None, True, [1, "x"], {"a": 2}, 2**62)] == [None] * 8
    for value in (float("nan"), 2**64, -(2**70), "\0", "\udc80", [float("inf")], {"a": {"b": [2**63]}}, {"\0": 1}):
        assert problem_of(value), value


def test_long_words_are_cut_in_an_error() -> None:
    line = shortened(f"--save {'x' * 5000}/end: it is too long")
    assert line.startswith("--save xxx")
    assert "(5005 characters)" in line
    assert line.endswith("x/end: it is too long")
    assert len(line) < 400
