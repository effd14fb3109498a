"""Flags of hooks and of debug data: what is wrong with them is one line, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.options.debug import TrackingOptions
from slime.options.eval_datasets import EvalOptions
from slime.options.flags.schema import flag_of, hook_fields
from slime.options.hooks import HookOptions
from tests.command_line import Fails, Flags, Parse, refused

NUM_GPUS = 0
FIELDS = {
    field.name: field
    for field in hook_fields((HookOptions, EvalOptions, TrackingOptions))
    if field.metadata["help"].startswith("Function (")
}
DISK = "--update-weight-transport disk "
REPLAY = "--load-debug-rollout-data d/{rollout_id}.pt"


@pytest.fixture(autouse=True)
def directory(launch_directory: Path) -> Path:
    return launch_directory


@pytest.mark.parametrize("name", FIELDS)
def test_every_hook_is_checked_when_flags_are_read(name: str, directory: Path, fails: Fails, parse: Parse) -> None:
    field = FIELDS[name]
    flag, names, (call,) = flag_of(field), field.metadata["hook"], field.metadata["call"]
    parameters = ", ".join(call.positional)
    mine = directory / "mine.py"  # whole paths: what a relative one names is loaded once a process
    mine.write_text(
        f"def {names[0]}({parameters}, **others): pass\n"
        f"def none(): pass\ndef more({parameters}, needed): pass\n"
        "values = 3\n"
    )
    assert getattr(parse(f"{DISK}{flag} {mine}"), name) == f"{mine}:{names[0]}"
    assert fails(f"{DISK}{flag} {mine}:none").startswith(
        f"{flag} {mine}:none: it is called as ({call.parameters}), and"
    )
    assert "missing a required argument: 'needed'" in fails(f"{DISK}{flag} {mine}:more")
    assert f"{flag} {mine}:values: 'values' is a int, not a function" in fails(f"{DISK}{flag} {mine}:values")


@pytest.mark.parametrize(
    ("flag", "takes"),
    [
        ("--custom-advantage-function-path", "(args, rollout_data)"),
        ("--custom-reward-post-process-path", "(args, samples)"),
        ("--custom-pg-loss-reducer-function-path", "(total_lengths, response_lengths, loss_masks, calculate_per"),
    ],
)
def test_so_are_those_of_the_algorithm(flag: str, takes: str, directory: Path, fails: Fails) -> None:
    mine = directory / "mine.py"
    mine.write_text("def none(): pass\n")
    assert fails(f"{flag} {mine}:none").startswith(f"{flag} {mine}:none: it is called as {takes}")


def test_a_hook_of_the_disk_transport(directory: Path, fails: Fails) -> None:
    (directory / "mine.py").write_text("def post_write(args, version_dir, rollout_engines): pass\n")
    expected = (
        "--custom-update-weight-post-write-path needs --update-weight-transport disk: no other transport writes files"
    )
    assert fails(f"--custom-update-weight-post-write-path {directory}/mine.py") == expected


def test_dump_details_is_both_templates(directory: Path, parse: Parse) -> None:
    args = parse("--dump-details {details}")
    paths = (args.save_debug_rollout_data.format(rollout_id=3), args.save_debug_train_data.format(rollout_id=3, rank=1))
    assert paths == (f"{directory}/{{details}}/rollout_data/3.pt", f"{directory}/{{details}}/train_data/3_1.pt")
    args = parse("--dump-details d --save-debug-rollout-data x{rollout_id}")
    assert args.save_debug_rollout_data == f"{directory}/x{{rollout_id}}"
    assert args.save_debug_train_data == f"{directory}/d/train_data/{{rollout_id}}_{{rank}}.pt"


@refused(
    f"""
--save-debug-train-data {{step}} -> only {{rollout_id}} and {{rank}} are filled in, and braces of its own are
--save-debug-rollout-data {{rollout_id}}{{rank}} -> only {{rollout_id}} is filled in, and braces of its own are
{REPLAY} --save-debug-rollout-data d/{{rollout_id}}.pt -> --save-debug-rollout-data and --load-debug-rollout-
{REPLAY} --num-epoch 1 less --num-rollout -> {{rollout_id}}.pt needs --num-rollout: there are no epochs of recorded
--load-debug-rollout-data-subsample 0.5 -> --load-debug-rollout-data-subsample 0.5 needs --load-debug-
{REPLAY} --load-debug-rollout-data-subsample 0 -> must be above 0, not 0
{REPLAY} --load-debug-rollout-data-subsample 1.5 -> must be at most 1, not 1.5
{REPLAY} --load-debug-rollout-data-subsample 0.25 --num-steps-per-rollout 8
    -> keeps 1 of --rollout-batch-size 4 groups, whose 4 samples are not a multiple of the 8 steps of a rollout
--profile-target train_actor train_overall -> train_actor train_overall: train_overall has all of them
--profile-target train_actors -> argument --profile-target: invalid choice: 'train_actors'
--profile-target train_actor --profile-step-start 2 -> --profile-step-start 2 is not before --profile-step-
--memory-snapshot-dir d -> --memory-snapshot-dir d needs --record-memory-history
--memory-snapshot-num-steps 2 --memory-recorder torch -> --memory-snapshot-num-steps 2 needs --record-memory-history
--record-memory-history --memory-snapshot-num-steps 0 -> must be at least 1, not 0
--record-memory-history --memory-snapshot-dir /proc/none -> --memory-snapshot-dir /proc/none:
--record-memory-history --debug-rollout-only -> --record-memory-history has no effect with --debug-rollout-only: noth
--record-memory-history --memory-recorder memray -> --memory-recorder memray needs --memory-snapshot-num-steps: a host
--use-pytorch-profiler -> --use-pytorch-profiler is not available: use --profile-target
"""
)
def test_debug_data(flags: Flags, message: str, fails: Fails) -> None:
    assert message in fails(*flags)


def test_parts_of_training_to_record(directory: Path, parse: Parse) -> None:
    args = parse("--profile-target train_actor train_log_probs")
    assert args.profile_target == ["train_actor", "train_log_probs"]
    (directory / "c.yaml").write_text("profile_target: [train_overall]\n")
    assert parse("--custom-config-path c.yaml").profile_target == ["train_overall"]


def test_no_two_kinds_of_data_are_the_same_files(fails: Fails) -> None:
    """A rollout's file has no rank."""
    words = "--save-debug-train-data d/{rollout_id}%s --save-debug-rollout-data d/{rollout_id}%s"
    assert "only {rollout_id} is filled in" in fails(words.replace("%s", "_{rank}"))


@pytest.mark.parametrize(("words", "batch"), [("0.5", 8), ("1", 16), ("0.5 --num-steps-per-rollout 2", 4)])
def test_a_subsample_makes_steps_smaller(words: str, batch: int, parse: Parse) -> None:
    args = parse(f"{REPLAY} --load-debug-rollout-data-subsample {words}")
    assert args.global_batch_size == batch
    assert args.train_iters == 3 * args.num_steps_per_rollout
