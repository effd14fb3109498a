"""Options of train_async.py: defaults, what does not go together, and what train.py refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.entry.arguments import parse_args
from tests.command_line import Fails, Flags, Parse, command, failure, refused

NUM_GPUS = 0

SLOT = "--rollout-num-gpus 1"
FULLY_ASYNC = "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async"


pytestmark = pytest.mark.usefixtures("launch_directory")


@pytest.fixture
def parse() -> Parse:
    """Options of train_async.py."""
    return lambda words="", without="": parse_args(
        command(f"{SLOT} {words}", f"--colocate {without}"), asynchronous=True
    )


@pytest.fixture
def async_fails(capsys: pytest.CaptureFixture[str]) -> Fails:
    """The one line that train_async.py fails with."""
    return lambda words, _="": failure(capsys, f"{SLOT} {words}", "--colocate", asynchronous=True)


def test_defaults_and_the_users_example(parse: Parse) -> None:
    args = parse()
    assert (args.asynchronous, args.update_weights_interval) == (True, 1)
    assert (args.async_buffer_size, args.max_weight_staleness) == (1, 1)
    args = parse("--async-buffer-size 4 --update-weights-interval 2")
    assert (args.async_buffer_size, args.update_weights_interval, args.max_weight_staleness) == (4, 2, 1)
    assert not parse_args(command()).asynchronous


def test_engines_without_slots_are_not_advised_to_share(capsys: pytest.CaptureFixture[str]) -> None:
    told = failure(capsys, "", "--colocate", asynchronous=True)
    assert told.endswith("--rollout-num-gpus is missing: give engines slots of their own")
    assert failure(capsys, "", "--colocate").endswith("or share them by --colocate")


@pytest.mark.parametrize(
    "words", ["--update-weights-interval 2", "--async-buffer-size 1", "--max-weight-staleness 0"], ids=str.split
)
def test_train_py_refuses_what_it_cannot_do(words: str, fails: Fails) -> None:
    assert fails(words).startswith(f"{words} only works with train_async.py: train.py pushes weights")
    assert fails(FULLY_ASYNC) == f"{FULLY_ASYNC} generates while the trainer trains: use train_async.py"


def test_a_push_is_due_before_samples_are_too_old(parse: Parse, async_fails: Fails) -> None:
    message = async_fails("--update-weights-interval 4 --max-weight-staleness 2")
    assert "--max-weight-staleness 2 is too small for --update-weights-interval 4" in message
    assert message.endswith("give at least 3")
    parse("--update-weights-interval 4 --max-weight-staleness 3")
    parse("--max-weight-staleness 0")


@refused(
    f"""
--colocate -> --colocate: train_async.py generates while it trains
--debug-rollout-only -> --debug-rollout-only: without training
--update-weights-interval 0 -> must be at least 1
--async-buffer-size -1 -> must be at least 0
--max-weight-staleness -1 -> must be at least 0
{FULLY_ASYNC} --max-weight-staleness 0 -> {FULLY_ASYNC} generates ahead: give --max-weight-staleness 1
{FULLY_ASYNC} --rm-type dapo -> --rm-type dapo answers with an object: --reward-key must be score or acc
{FULLY_ASYNC} --over-sampling-batch-size 8 -> would not heed --over-sampling-batch-size 8: drop it
"""
)
def test_what_cannot_be(flags: Flags, message: str, async_fails: Fails) -> None:
    assert message in async_fails(*flags)


def test_what_a_users_function_may_leave_or_set_is_not_asked_for(parse: Parse) -> None:
    Path("f.py").write_text("def convert(args, samples): ...\ndef hook(args, sample): ...\n")
    for words, without in (
        ("--rm-type dapo --custom-convert-samples-to-train-data-path f.py:convert", ""),
        ("--rm-type math --rollout-sample-hook-path f.py:hook", "--label-key"),
    ):
        parse(f"{FULLY_ASYNC} {words}", without)


@pytest.mark.parametrize(
    "correction", ["", "--use-tis", "--use-rs", "--use-rollout-logprobs", "--max-weight-staleness 0"]
)
def test_old_samples_without_a_correction_are_warned_of(
    correction: str, parse: Parse, capsys: pytest.CaptureFixture[str]
) -> None:
    parse(correction)
    warned = "weights up to 1 versions old" in capsys.readouterr().err
    assert warned == (correction == "")


def test_masking_of_older_tokens_needs_a_way_for_them_to_come_about(
    parse: Parse, fails: Fails, async_fails: Fails
) -> None:
    flag = "--mask-offpolicy-in-partial-rollout"
    (Path.cwd() / "own.py").write_text("def generate_rollout(args, rollout_id, source, evaluation=False): pass\n")
    refused = async_fails(f"{flag} --rollout-function-path own.py")
    assert f"{flag} is for slime's own rollouts: --rollout-function-path " in refused
    assert fails(flag).startswith(f"{flag} has no effect without --partial-rollout or --over-sampling-batch")
    for words in ("", FULLY_ASYNC):
        assert parse(f"{flag} {words}").mask_offpolicy_in_partial_rollout
    assert parse_args(command(f"{flag} --over-sampling-batch-size 64")).mask_offpolicy_in_partial_rollout
