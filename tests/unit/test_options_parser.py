"""The parser: strict, later duplicates win, grouped help, flags of the installed packages with a cache."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from slime.entry.arguments import assemble
from slime.options.flags.help import MOST_USED
from slime.options.flags.installed import InstalledFlagsError, PendingFlags
from slime.options.flags.parser import StrictParser, flag_values
from slime.options.flags.patterns import layer_pattern
from slime.options.flags.schema import add_options, option
from slime.options.flags.sglang import CONSISTENT_HASHING, command_line, router_parser
from slime.options.flags.unavailable import explain_flag
from tests.waiting import wait_for

NUM_GPUS = 0


@dataclass
class Example:
    """Example: one of each kind."""

    batch: int = option(4, "Size.", at_least=1)
    rate: float | None = option(None, "Rate.", above=0, at_most=2)
    name: str | None = option(None, "Name.")
    kind: Literal["a", "b"] = option("a", "Kind.", aliases=("--sort",))
    fast: bool = option(False, "Fast.")
    stops: list[str] | None = option(None, "Stops.")
    pairs: list[list[str]] | None = option(None, "Pairs.")
    settings: dict[str, Any] | None = option(None, "Settings.")


@pytest.fixture
def parser() -> StrictParser:
    made = StrictParser(prog="train.py")
    add_options(made, Example)
    return made


@pytest.fixture(scope="module")
def full_parser() -> StrictParser:
    made = StrictParser(prog="train.py")
    assemble(made, [], {})
    return made


def fails(parser: StrictParser, words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one error line of a parse that must fail."""
    with pytest.raises(SystemExit) as stop:
        parser.parse_set(words.split())
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.out == ""
    match = re.fullmatch(r"train\.py: error: ([^\n]+)\n", captured.err)
    assert match
    return match[1]


def test_defaults_are_apart_from_what_is_given(parser: StrictParser) -> None:
    defaults = parser.split_defaults()
    assert defaults["batch"] == 4
    assert defaults["fast"] is False
    assert parser.parse_set([]) == {}
    assert parser.parse_set(["--sort", "b", "--fast"]) == {"kind": "b", "fast": True}


def test_later_duplicates_win_and_repeated_lists_gather(parser: StrictParser) -> None:
    parser.split_defaults()
    words = "--batch 2 --stops x y --batch=8 --stops z --pairs a b --pairs c d"
    given = parser.parse_set(words.split())
    assert given == {"batch": 8, "stops": ["z"], "pairs": [["a", "b"], ["c", "d"]]}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--bach 3 --fsat --zzz", "unknown flag --bach; did you mean --batch?; unknown flag --fsat; did you mean"),
        ("--learning-rate 3", "unknown flag --learning-rate; did you mean --lr?"),
        ("--max-restarts 3", "unknown flag --max-restarts; it is launch's, of scripts/launch.sh"),
        ("--batc 3", "unknown flag --batc; did you mean --batch?"),
        ("--batch 0", "argument --batch: must be at least 1, not 0"),
        ("--batch x", "argument --batch: invalid int value: 'x'"),
        ("--name=", "argument --name: is empty: is a shell variable unset?"),
        ("--stops=", "argument --stops: is empty: is a shell variable unset?"),
        ("--rate 0", "argument --rate: must be above 0, not 0"),
        ("--rate 2.5", "argument --rate: must be at most 2, not 2.5"),
        ("--kind c", "invalid choice: 'c'"),
        ("--settings [1]", "not a JSON object"),
        ("--batch 2 stray", "unexpected argument 'stray' after 2"),
    ],
)
def test_errors_are_one_line_with_status_2(
    parser: StrictParser, words: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in fails(parser, words, capsys)


def test_unknown_flags_name_the_nearest_in_every_source(
    full_parser: StrictParser, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--rolout-batch-size 4 --tensor_model_parallel_size 2 --sglang-mem-fraction 0.8 --router-polcy random"
    line = fails(full_parser, words, capsys)
    assert "unknown flag --rolout-batch-size; did you mean --rollout-batch-size?" in line
    assert "--tensor_model_parallel_size; did you mean --tensor-model-parallel-size?" in line
    assert "--sglang-mem-fraction; did you mean --sglang-mem-fraction-static?" in line
    assert "--router-polcy; did you mean --router-policy?" in line


def test_no_flag_is_suggested_that_would_be_refused(
    full_parser: StrictParser, capsys: pytest.CaptureFixture[str]
) -> None:
    line = fails(full_parser, "--use-slime-ruter --sglang-router-prt 3 --megatron-confg-path x", capsys)
    suggested = re.findall(r"--[-a-z]+", "".join(re.findall(r"did you mean [^;]*", line)))
    assert not [flag for flag in suggested if explain_flag(flag)]


def test_pass_through_keeps_attribute_and_words(full_parser: StrictParser) -> None:
    words = "--sglang-mem-fraction-static 0.5 --sglang-log-level INFO --sglang-mem-fraction-static 0.8 "
    words += "--sglang-context-length 8k --sglang-disable-radix-cache --sglang-no-lora-strict-loading "
    words += "--router-policy round_robin --router-disable-retries --sglang-cuda-graph-bs-decode 1 2 4"
    given = full_parser.parse_set(words.split())
    assert given["sglang_mem_fraction_static"] == 0.8
    assert given["sglang_context_length"] == 8000
    assert given["sglang_disable_radix_cache"] is True
    assert given["sglang_lora_strict_loading"] is False
    assert given["sglang_cuda_graph_bs_decode"] == [1, 2, 4]
    assert given["sglang_words"]["sglang_mem_fraction_static"] == ["--mem-fraction-static", "0.8"]
    assert given["sglang_words"]["sglang_cuda_graph_bs_decode"] == ["--cuda-graph-bs-decode", "1", "2", "4"]
    assert given["router_words"]["router_policy"] == ["--policy", "round_robin"]
    assert given["router_disable_retries"] is True


def test_a_policy_that_the_router_has_and_its_parser_does_not_offer(
    full_parser: StrictParser, capsys: pytest.CaptureFixture[str]
) -> None:
    from sglang_router.router import policy_from_str
    from sglang_router.router_args import RouterArgs

    given = full_parser.parse_set(["--router-policy", CONSISTENT_HASHING])
    values = router_parser(with_address=True).parse_args([*command_line(given["router_words"]), "--port", "1"])
    assert policy_from_str(RouterArgs.from_cli_args(values, use_router_prefix=False).policy) is not None
    assert "invalid choice: 'consistent'" in fails(full_parser, "--router-policy consistent", capsys)


@pytest.mark.parametrize("section", [None, "megatron", "sglang", "router", "all"])
def test_help_is_grouped(section: str | None, full_parser: StrictParser, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        full_parser.parse_set(["--help", *([section] if section else [])])
    out = capsys.readouterr().out
    assert stop.value.code == 0
    flags = {
        None: "--rollout-batch-size INT",
        "megatron": "--tensor-model-parallel-size INT",
        "sglang": "--sglang-mem-fraction-static FLOAT",
        "router": "--router-policy {",
        "all": "--rollout-batch-size INT",
    }
    for other, flag in flags.items():
        assert (flag in out) == (section in (other, "all") or (section is None and other == "all"))
    assert "==SUPPRESS==" not in out
    assert max(map(len, out.splitlines())) <= 160


def test_flag_values_reads_both_forms() -> None:
    assert flag_values(["--a", "1", "--b=2", "--c"]) == [("--a", "1"), ("--b", "2"), ("--c", "")]
    assert flag_values(["--a", "--b", "2", "3"]) == [("--a", ""), ("--b", "2")]


def entries(parser: StrictParser, values: dict[str, Any]) -> dict[str, Any]:
    """What entries of YAML set."""
    namespace = argparse.Namespace()
    for key, value in values.items():
        parser.set_entry(key, value, namespace)
    return vars(namespace)


def test_a_switch_by_its_own_name_does_what_its_flag_does(full_parser: StrictParser) -> None:
    """Whatever it stores: False for --no-..., a word for --fp32."""
    switches = [action for action in full_parser._actions if action.nargs == 0]
    assert len(switches) > 300
    for action in switches:
        for flag in action.option_strings:
            expected = full_parser.parse_set([flag])
            assert entries(full_parser, {flag[2:].replace("-", "_"): True}) == expected, flag
            if action.const is True and "_words" not in str(expected):
                assert entries(full_parser, {flag[2:].replace("-", "_"): False}) == {action.dest: False}, flag


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"precision": "float32"}, {"precision": "float32"}),
        ({"use_distributed_optimizer": False}, {"use_distributed_optimizer": False}),
        ({"no_use_distributed_optimizer": False}, {"use_distributed_optimizer": True}),
        ({"no_check_for_nan_in_loss_and_grad": False}, {"check_for_nan_in_loss_and_grad": True}),
        ({"offload_train": False, "no_offload_rollout": True}, {"offload_train": False, "offload_rollout": False}),
        ({"recompute_granularity": "full"}, {"recompute_granularity": "full"}),
        ({"moe_layer_freq": [0, 1, 1]}, {"moe_layer_freq": [0, 1, 1]}),
        ({"rollout_stop": ["-x", "--y", "--"]}, {"rollout_stop": ["-x", "--y", "--"]}),
        ({"eval_prompt_data": ["a", "f"]}, {"eval_prompt_data": [["a", "f"]]}),
        ({"eval_prompt_data": [["a", "f"], ["b", "-g"], "h"]}, {"eval_prompt_data": [["a", "f"], ["b", "-g"], ["h"]]}),
        ({"train_env_vars": {"A": "1"}, "rm_type": None}, {"train_env_vars": {"A": "1"}, "rm_type": None}),
        (
            {"sglang_json_model_override_args": {"a": 1}},
            {
                "sglang_json_model_override_args": '{"a": 1}',
                "sglang_words": {"sglang_json_model_override_args": ["--json-model-override-args", '{"a": 1}']},
            },
        ),
    ],
)
def test_entries_go_through_their_flags(values: Any, expected: Any, full_parser: StrictParser) -> None:
    assert entries(full_parser, values) == expected


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("bf16", False, "bf16: False is not true, all that --bf16 can say: leave it out, or set precision"),
        ("precision", True, "precision: True is not one of bfloat16, float16, float32"),
        ("recompute_granularity", True, "--recompute-granularity takes a value, not True"),
        ("lr", [1, 2], "argument --lr: invalid float value"),
        ("run_dir", ["a"], "run_dir: --run-dir does not take ['a']"),
        ("run_dir", {"a": 1}, "run_dir: --run-dir does not take {'a': 1}"),
        ("rollout_stop", [], "argument --rollout-stop: expected at least one argument"),
        ("rollout_stop", ["END", ""], "argument --rollout-stop: is empty"),
        ("rollout_stop", "", "argument --rollout-stop: is empty"),
        ("rollout_sample_hook_path", [[""]], "argument --rollout-sample-hook-path: is empty"),
        ("lora_target_modules", [""], "argument --lora-target-modules: is empty"),
        ("transformer_impl", "inference_optimized", "--transformer-impl inference_optimized is not available yet"),
    ],
)
def test_entries_that_flags_do_not_take(key: str, value: Any, expected: str, full_parser: StrictParser) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        entries(full_parser, {key: value})


def test_lists_for_flags_that_gather_single_values(parser: StrictParser) -> None:
    parser.add_argument("--one", action="append")
    parser.add_argument("--two", nargs=2)
    parser.split_defaults()
    assert entries(parser, {"one": ["a", "b"], "two": [1, 2]}) == {"one": ["a", "b"], "two": ["1", "2"]}
    with pytest.raises(ValueError, match="argument --two: expected 2 values, not 3"):
        entries(parser, {"two": [1, 2, 3]})


def test_what_is_required_is_checked_of_all_that_is_given(
    parser: StrictParser, capsys: pytest.CaptureFixture[str]
) -> None:
    parser.add_argument("--url", "-u", required=True)
    either = parser.add_mutually_exclusive_group(required=True)
    for flag in ("--left", "--right"):
        either.add_argument(flag, action="store_true")
    parser.split_defaults()
    assert parser.parse_set([]) == {}
    parser.check_required(["right", "url"])
    with pytest.raises(SystemExit):
        parser.check_required(["batch"])
    assert capsys.readouterr().err == "train.py: error: --left or --right is missing; --url/-u is missing\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [("4", 4), ("[0,1,1]", [0, 1, 1]), ("[0]*1+[1]*3", [0, 1, 1, 1]), ("([1]*2+[0])*2", [1, 1, 0, 1, 1, 0])],
)
def test_layer_patterns(text: str, value: int | list[int]) -> None:
    assert layer_pattern(text) == value


@pytest.mark.parametrize("text", ["__import__('os')", "[1]*10**9", "x", "[0]+", "[1]*99999999", "[[1]]"])
def test_layer_patterns_refuse_other_expressions(text: str) -> None:
    with pytest.raises(Exception, match="neither a number nor a list"):
        layer_pattern(text)


WRITES_ONE = "import sys, json, pathlib; pathlib.Path(sys.argv[1]).write_text(json.dumps([{'flags': ['--x']}]))"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_flags_are_read_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert PendingFlags("pytest", WRITES_ONE).result() == [{"flags": ["--x"]}]
    assert len(list(cache.rglob("pytest-*.json"))) == 1
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("read again"))
    assert PendingFlags("pytest", WRITES_ONE).result() == [{"flags": ["--x"]}]


@pytest.mark.parametrize("content", ["", "{", '{"a": 1}', "[]", '[{"no": "flags"}]', "[3]", "\x00"])
def test_a_broken_cache_is_read_anew(cache: Path, content: str) -> None:
    PendingFlags("pytest", WRITES_ONE).result()
    (file,) = cache.rglob("pytest-*.json")
    file.write_text(content)
    assert PendingFlags("pytest", WRITES_ONE).result() == [{"flags": ["--x"]}]
    assert json.loads(file.read_text()) == [{"flags": ["--x"]}]


def test_parsing_works_where_no_cache_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert PendingFlags("pytest", WRITES_ONE).result() == [{"flags": ["--x"]}]


def test_a_reading_that_is_left_ends(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = psutil.Process().children()
    with PendingFlags("pytest", "import time; time.sleep(600)"):
        (process,) = [child for child in psutil.Process().children() if child not in others]
    assert not process.is_running()
    monkeypatch.setattr("slime.options.flags.installed.READ_TIMEOUT", 0.2)
    with pytest.raises(InstalledFlagsError, match=r"reading the flags of pytest .* took more than"):
        PendingFlags("pytest", "import time; time.sleep(599)").result()


def test_a_reading_that_is_left_does_not_wait_for_what_it_started(cache: Path, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    starts = "child = subprocess.Popen(['sleep', '100'])"
    tells = f"pathlib.Path({str(pid)!r}).write_text(str(child.pid))"
    with PendingFlags("pytest", f"import pathlib, subprocess, time; {starts}; {tells}; time.sleep(600)"):
        wait_for(lambda: pid.exists() and pid.read_text(), "its program is started")
    child = psutil.Process(int(pid.read_text()))
    assert child.status() != psutil.STATUS_ZOMBIE
    child.kill()


def test_a_package_that_is_not_installed_has_no_flags(cache: Path) -> None:
    assert PendingFlags("no-such-package-here", "raise SystemExit(1)").result() == []


def test_a_package_that_does_not_import_is_named(cache: Path) -> None:
    with pytest.raises(InstalledFlagsError, match=r"reading the flags of pytest .* failed: .*no_such_module"):
        PendingFlags("pytest", "import no_such_module").result()
    assert not list(cache.rglob("*.json"))


def test_options_import_no_engine() -> None:
    code = "import slime.entry.arguments, sys; print({'torch', 'sglang', 'megatron', 'ray'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "set()"


def shown(parser: StrictParser, words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command line prints that ends with status 0."""
    with pytest.raises(SystemExit) as stop:
        parser.parse_set(words.split())
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_help_begins_with_what_is_used_most(full_parser: StrictParser, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(full_parser, "--help", capsys)
    top = out.partition("\noptions:\n")[0]
    flags = re.findall(r"^  (--[a-z-]+)", top, re.MULTILINE)
    assert flags == list(MOST_USED)
    assert len(flags) < 20
    everything = shown(full_parser, "--help all", capsys)
    assert all(f"\n  {flag} " in everything for flag in flags)


@pytest.mark.parametrize(
    ("word", "flags", "others"),
    [
        ("rollout", ("--rollout-function-path PATH", "--rollout-sample-hook-path PATH:FUNCTION"), ("--kl-coef",)),
        ("Off-policy", ("--use-tis",), ("--kl-coef",)),
        ("lora", ("--lora-rank INT",), ("--kl-coef",)),
        ("checkpoint", ("--save STR",), ("--kl-coef",)),
    ],
)
def test_help_of_one_group(
    word: str, flags: tuple[str, ...], others: tuple[str, ...], full_parser: StrictParser, capsys: Any
) -> None:
    out = shown(full_parser, f"--help {word}", capsys)
    assert all(flag in out for flag in flags)
    assert not any(flag in out for flag in others)


@pytest.mark.parametrize(
    ("words", "group", "said"),
    [
        ("--help --kl-coef", "Algorithm: ", ["--kl-coef FLOAT", "(default 0.0)"]),
        ("-h --rollout-batch-size 3 --no-such", "Batches: ", ["Prompts of one rollout"]),
        ("--help=--tis-threshold", "Off-policy correction: ", ["--tis-clip FLOAT", "(default 2.0)"]),
        ("--help --colocate", "Cluster: ", ["Default: off."]),
        ("--help --custom-rm-path", "Reward: ", ["PATH:FUNCTION", "Default: not set."]),
        ("--help --tensor-model-parallel-size", "Megatron", ["(default 1)"]),
        ("--help --sglang-mem-fraction-static", "SGLang: ", ["FLOAT"]),
    ],
)
def test_help_of_one_flag(words: str, group: str, said: list[str], full_parser: StrictParser, capsys: Any) -> None:
    out = shown(full_parser, words, capsys)
    assert out.startswith(group)
    assert all(text in " ".join(out.split()) for text in said)
    assert len(re.findall(r"^  --", out, re.MULTILINE)) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--help --kl-ceof", "--help --kl-ceof: unknown flag --kl-ceof; did you mean --kl-coef?"),
        ("--help --use-slime-router", "the router is sglang-router"),
        ("--help nothing", "there are the groups cluster, deadlines"),
    ],
)
def test_help_on_what_there_is_not(words: str, said: str, full_parser: StrictParser, capsys: Any) -> None:
    assert said in fails(full_parser, words, capsys)


def test_help_into_a_pipe_that_nobody_reads_is_no_error(
    full_parser: StrictParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(SystemExit) as stop:
            full_parser.parse_set(["--help", "all"])
        monkeypatch.undo()
    assert stop.value.code == 0
