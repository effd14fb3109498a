"""slime.driver.process: an error of a user's function names the program that checks it."""

from __future__ import annotations

import shlex
from argparse import Namespace
from pathlib import Path

import pytest

from slime.driver import process
from slime.driver.process import contract_hint
from slime.ray.supervision import CallError, InputError, RunError
from tests.plugin_contracts import (
    test_plugin_generate_contracts,
    test_plugin_path_loading_contracts,
    test_plugin_rollout_contracts,
    test_plugin_runtime_hook_contracts,
)

NUM_GPUS = 0
FILES = (
    *(test_plugin_generate_contracts, test_plugin_path_loading_contracts),
    *(test_plugin_rollout_contracts, test_plugin_runtime_hook_contracts),
)
CONTRACTS = {contract.flag: Path(str(file.__file__)).name for file in FILES for contract in file.CONTRACTS}


@pytest.mark.parametrize("flag", CONTRACTS)
def test_what_failed_is_checked(flag: str) -> None:
    message = f"rollout 0: {flag} /my/env.py:own raised KeyError: 'x'\nTraceback ..."
    hint = contract_hint(Namespace(), message)
    assert hint.startswith("\ntest this function in seconds: python3 ")
    program, *words = shlex.split(hint.partition("python3 ")[2])
    assert Path(program).name == CONTRACTS[flag]
    assert Path(program).is_file()
    assert words == [flag, "/my/env.py:own"]


def test_a_reward_is_checked_after_the_generate_function_that_it_may_read_from() -> None:
    args = Namespace(custom_generate_function_path="my.env:generate")
    hint = contract_hint(args, "--custom-rm-path f.py:rm must return a number")
    assert hint.endswith(" --custom-rm-path f.py:rm --custom-generate-function-path my.env:generate")


def test_the_check_reads_the_rows_that_the_run_reads() -> None:
    args = Namespace(prompt_data="my rows.jsonl", input_key="messages", label_key=None, apply_chat_template=True)
    args.max_turns, args.reward_key = 3, "score"
    hint = contract_hint(args, "--custom-rm-path f.py:rm must return a number")
    rows = "--prompt-data 'my rows.jsonl' --input-key messages --apply-chat-template --reward-key score --max-turns 3"
    assert hint.endswith(f" --custom-rm-path f.py:rm {rows}")


@pytest.mark.parametrize(
    "message",
    [
        "engine 0 died",
        "all rewards are 0: check --custom-rm-path and --label-key",
        "--rollout-function-path slime.rollout.sglang_rollout.generate_rollout raised ValueError",
        "--no-such-path f.py:rm raised",
    ],
)
def test_other_errors_have_no_check(message: str) -> None:
    assert contract_hint(Namespace(), message) == ""


@pytest.mark.parametrize("of_user", [True, False])
def test_what_the_user_gave_is_no_fault_of_the_host(
    of_user: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process, "check_patches", lambda *_: None)
    message = "rollout 0: the rollout manager failed: sample 3: the reward is a dict"
    error = CallError(message, is_of_user=of_user)

    def train(args: Namespace) -> None:
        raise error

    with pytest.raises(SystemExit):
        process.run_driver(train, Namespace(dry_run=None, num_rollout=None))
    assert ("look for what is wrong with this host" in capsys.readouterr().err) != of_user


@pytest.mark.parametrize(("error", "is_told"), [(RunError, True), (CallError, True), (InputError, False)])
def test_the_last_line_of_a_run_says_how_to_try_it(
    error: type[RunError], is_told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process, "check_patches", lambda *_: None)

    def train(args: Namespace) -> None:
        raise error("--dynamic-sampling-filter-path f.py:keep raised KeyError: 'x'")

    args = Namespace(dry_run=None, num_rollout=None)
    with pytest.raises(SystemExit):
        process.run_driver(train, args)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("test_plugin_path_loading_contracts.py --dynamic-sampling-filter-path f.py:keep") == is_told
