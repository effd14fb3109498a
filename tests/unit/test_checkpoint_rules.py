"""Where a run reads and writes: what is refused as flags are read, and what starts from what is there."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.files.checkpoints import SavedModel, rollouts_done
from slime.files.exports import mark_export
from slime.options.checks import checkpoint_rules
from slime.options.checks.checkpoint_rules import starting_point
from tests.command_line import QWEN3, Fails, Flags, Parse, refused, write_checkpoint, write_model

NUM_GPUS = 0
MARKED = Namespace(hf_checkpoint="model", save="ckpt", load=None)


@pytest.fixture(autouse=True)
def directory(launch_directory: Path) -> Path:
    """The working directory of a test."""
    return launch_directory


@refused(
    """
--load ckpt -> ckpt: there is no checkpoint in it (no latest_checkpointed_iteration.txt)
--load ckpt --save other -> ckpt: there is no checkpoint in it
--load model --save model -> model is a Hugging Face directory: --load is for resuming
--load broken -> broken: iter_0000003 is not a whole checkpoint (no metadata.json in it)
--load gone -> latest_checkpointed_iteration.txt names iter_0000004, but
--load converted -> --load converted: converted/latest_checkpointed_iteration.txt names release, but
--save data.jsonl -> --save {directory}/data.jsonl: it is not a directory
--save data.jsonl/x/ckpt -> /data.jsonl/x/ckpt: {directory}/data.jsonl is not a directory
--save-hf data.jsonl/{rollout_id} -> --save-hf data.jsonl/{rollout_id}: {directory}/data.jsonl is no
--run-dir data.jsonl -> --run-dir {directory}/data.jsonl: it is not a directory
--save link/ckpt -> /link/ckpt: {directory}/link is a link to elsewhere, which is not there
--save /proc/x -> --save /proc/x: no directory can be made in /proc:
--update-weight-transport disk --update-weight-disk-dir /proc/x -> --update-weight-disk-dir /proc/x: no dir
--run-dir /proc -> --run-dir /proc: no directory can be made in it:
--load torch_dist -> torch_dist is one checkpoint: name the directory above it to resume, or start from its
--load of_adapters/iter_0000002 -> iter_0000002 is one checkpoint: name the directory above it to resume$
--load foreign -> --load {directory}/foreign holds adapters and no model: name the model they belong to
--load kept --save-hf kept -> would replace {directory}/kept (--load): name a directory of its own
--ref-load kept --save-hf kept -> would replace {directory}/kept (--ref-load): name a directory of its own
--save ended -> --save {directory}/ended has checkpoints of another run, the latest of rollout 3, counted from 0: go on
--load torch_dist --save ended -> go on with that run by --load {directory}/ended, or save to another
--load converted --ref-load model -> --load converted holds weights to start from
--ref-load bare -> --ref-load {directory}/bare: there are neither *.safetensors nor a checkpoint
--ckpt-step 3 -> --ckpt-step 3 needs --load
--load ended --ckpt-step 5 -> --ckpt-step 5: --load {directory}/ended has no iter_0000005; it has iter_0000001, iter_
--load ended --ckpt-step 1 --save ended -> --save {directory}/ended is --load, and its latest is iter_0000003, which
--load model --ckpt-step 0 -> --ckpt-step 0: --load {directory}/model has no iter_0000000; it has no checkpoint$
--load converted --ckpt-step 0 -> --ckpt-step 0: --load {directory}/converted has no iter_0000000; it has no checkpoint$
--ref-ckpt-step 3 -> --ref-ckpt-step 3 needs --ref-load
--ref-load ended --ref-ckpt-step 2 -> --ref-load {directory}/ended has no iter_0000002; it has iter_0000001, iter_
"""
)
def test_what_is_no_checkpoint_and_no_place(fails: Fails, directory: Path, flags: Flags, message: str) -> None:
    (directory / "torch_dist").mkdir()
    (directory / "torch_dist" / "metadata.json").touch()
    (directory / "link").symlink_to("elsewhere")
    (directory / "converted").mkdir()
    (directory / "converted" / "latest_checkpointed_iteration.txt").write_text("release")
    write_checkpoint(directory / "broken", "3", {})
    (directory / "broken" / "iter_0000003" / "metadata.json").unlink()
    for name, step in (("of_adapters", "2"), ("foreign", "release")):
        write_checkpoint(directory / name, step, {"adapters": {"rank": 8, "alpha": 16.0, "target_modules": ["q_proj"]}})
    write_checkpoint(directory / "kept", "release", {})
    for step in ("1", "3"):
        write_checkpoint(directory / "ended", step, {})
    write_checkpoint(directory / "gone", "4", {})
    (directory / "gone" / "iter_0000004").rename(directory / "gone" / "iter_0000003")
    (directory / "bare").mkdir()
    (directory / "bare" / "config.json").write_text(json.dumps(QWEN3))
    assert message.replace("{directory}", str(directory)) in f"{fails(*flags)}$"


@pytest.mark.parametrize(
    "common", [{"iteration": 100}, {"args": Namespace(num_layers=4), "optimizer": {}}, b"half a file", b""]
)
def test_a_run_goes_on_with_checkpoints_of_slime_only(directory: Path, common: Any, fails: Fails, parse: Parse) -> None:
    """Those of Megatron-LM's own runs, upstream's among them, are weights to start from."""
    write_checkpoint(directory / "ckpt", "100", {})
    parse("--load ckpt --save ckpt")
    file = directory / "ckpt" / "iter_0000100" / "common.pt"
    if isinstance(common, bytes):
        file.write_bytes(common)
    else:
        torch.save(common, file)
    expected = (
        f"--load {file.parent} is not a checkpoint of a run of slime (its common.pt is Megatron-LM's own, or damaged): "
        f"to start from its weights name it by --ref-load {directory}/ckpt, not by --load, and save elsewhere"
    )
    assert fails("--load ckpt --save ckpt") == expected
    assert starting_point(parse("--ref-load ckpt")) == f"training starts from {directory}/ckpt (--ref-load)"


@pytest.mark.parametrize("dump", ["", " --dump-details d"])
def test_a_checkpoint_that_is_not_there_is_told_once(directory: Path, fails: Fails, dump: str) -> None:
    """Whoever else has to know whether the run is resumed looks for it too."""
    for step in ("2", "5"):
        write_checkpoint(directory / "ckpt", step, {})
    words, place = f"--load ckpt --save ckpt{dump}", directory / "ckpt"
    assert fails(f"{words} --ref-load ckpt --ckpt-step 7") == (
        f"--ckpt-step 7: --load {place} has no iter_0000007; it has iter_0000002, iter_0000005"
    )
    (place / "iter_0000005").rename(place / "iter_0000003")
    latest = f"{place}/latest_checkpointed_iteration.txt names iter_0000005"
    assert fails(words) == f"--load {place}: {latest}, but {place} has iter_0000002, iter_0000003"


def test_weights_are_asked_for_only_where_they_are_read(directory: Path, parse: Parse) -> None:
    (directory / "model" / "model.safetensors").unlink()
    write_model(directory / "ref")
    replay = "--load-debug-rollout-data dump/{rollout_id}.pt"
    parse("--debug-rollout-only --sglang-load-format dummy")
    assert parse(f"{replay} --ref-load ref").ref_load == str(directory / "ref")
    (directory / "ref" / "model.safetensors").rename(directory / "ref" / "metadata.json")
    parse(f"{replay} --ref-load ref")
    write_checkpoint(directory / "ckpt", "3", {})
    parse(f"{replay} --load ckpt")


def test_a_run_may_load_what_a_conversion_wrote(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, parse: Parse
) -> None:
    """Then it starts from these weights, and there is nothing to resume."""
    write_checkpoint(directory / "converted", "release", {})
    monkeypatch.setenv("HOME", str(directory))
    for load, others in (
        ("converted", ""),
        ("converted", "--ref-load converted/"),
        ("converted", "--use-kl-loss"),
        ("~/converted", "--ref-load converted"),
    ):
        args = parse(f"--load {load} {others}")
        assert (args.load, args.ref_load) == (None, str(directory / "converted"))
        assert f"warning: --load {load} holds weights only" in capsys.readouterr().err


def test_a_checkpoint_is_read_once(directory: Path, monkeypatch: pytest.MonkeyPatch, parse: Parse) -> None:
    """On a slow file system that is what a start waits for."""
    write_checkpoint(directory / "ckpt", "1", {})
    read: list[Path] = []
    monkeypatch.setattr(checkpoint_rules, "saved_model", lambda path: read.append(path) or SavedModel(path))
    parse("--load ckpt")
    assert read == [directory / "ckpt" / "iter_0000001"]


def test_a_fresh_run_may_load_from_where_it_saves(capsys: pytest.CaptureFixture[str], parse: Parse) -> None:
    parse("--load ckpt --save ckpt/")
    assert "warning" not in capsys.readouterr().err
    parse("--load ckpt --debug-rollout-only")


def test_a_run_may_save_where_it_goes_on_and_beside_converted_weights(directory: Path, parse: Parse) -> None:
    write_checkpoint(directory / "ckpt", "3", {})
    write_checkpoint(directory / "converted", "release", {})
    (directory / "link").symlink_to("ckpt")
    for words in ("--load ckpt --save link", "--save ckpt --debug-rollout-only", "--save converted"):
        parse(words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", "training starts from {directory}/model (--hf-checkpoint)"),
        ("--ref-load ref", "training starts from {directory}/ref (--ref-load)"),
        ("--random-weights", "training starts from random weights (--random-weights)"),
        ("--random-weights --ref-load ref", "training starts from random weights (--random-weights)"),
        ("--load converted", "training starts from {directory}/converted (--load)"),
        ("--load ckpt --ref-load ref", "training goes on from {directory}/ckpt/iter_0000001 (--load)"),
        ("--load ckpt --random-weights", "training goes on from {directory}/ckpt/iter_0000001 (--load)"),
        (
            "--load new --save new",
            "there is no checkpoint in --load {directory}/new yet: training starts from {directory}/model "
            "(--hf-checkpoint)",
        ),
        (
            "--load new --save new --random-weights",
            "there is no checkpoint in --load {directory}/new yet: training starts from random weights "
            "(--random-weights)",
        ),
        ("--debug-rollout-only --ref-load ref", ""),
        ("--debug-rollout-only --load converted --ref-load ref", ""),
    ],
)
def test_a_run_says_from_which_weights_it_starts(directory: Path, words: str, expected: str, parse: Parse) -> None:
    write_model(directory / "ref")
    write_checkpoint(directory / "converted", "release", {})
    write_checkpoint(directory / "ckpt", "1", {})
    assert starting_point(parse(words)) == expected.replace("{directory}", str(directory))


@refused(
    """
--save-hf model -> --save-hf {directory}/model would replace {directory}/model (--hf-checkpoint): name a
--save-hf . -> would replace {directory} (the directory where this was started)
--save-hf .. -> would replace {directory} (the directory where this was started)
--save ckpt --save-hf ckpt -> would replace {directory}/ckpt (--save)
--save out/ckpt --save-hf out -> --save-hf {directory}/out would replace {directory}/out/ckpt (--save)
--run-dir run --save-hf run -> would replace {directory}/run (--run-dir)
--save a/3/ckpt --save-hf a/{rollout_id} -> would replace {directory}/a/3/ckpt (--save)
--save-hf alias -> --save-hf {directory}/alias would replace {directory}/model (--hf-checkpoint)
--save-hf mine -> --save-hf {directory}/mine: {directory}/mine has other things in it than an earlier
--save-hf exports/{rollout_id:02d} -> {directory}/exports/01 has other things in it than an earlier export
--save-hf hf_{step} -> --save-hf hf_{step}: only {rollout_id} is filled in
--lora-rank 4 --lora-alpha 8 --save-lora mine -> --save-lora {directory}/mine: {directory}/mine has other
--lora-rank 4 --lora-alpha 8 --save-lora x --save-hf x -> would replace {directory}/x (--save-lora)
"""
)
def test_exports_replace_nothing_else(fails: Fails, directory: Path, flags: Flags, message: str) -> None:
    (directory / "alias").symlink_to("model")
    for name in ("mine", "exports/01"):
        (directory / name).mkdir(parents=True)
        (directory / name / "thesis.txt").write_text("mine")
    assert message.replace("{directory}", str(directory)) in fails(*flags)
    assert (directory / "mine" / "thesis.txt").exists()


@pytest.mark.parametrize("words", ["--save-hf hf", "--save ckpt --save-hf ckpt/hf_{rollout_id}", "--save-hf empty"])
def test_exports_replace_their_own_kind(directory: Path, words: str, parse: Parse) -> None:
    (directory / "empty").mkdir()
    for name in ("hf", "ckpt/hf_3"):
        (directory / name).mkdir(parents=True)
        (directory / name / "model.safetensors").touch()
        mark_export(directory / name, MARKED, 3)
    parse(words)


def test_exports_of_earlier_rollouts_may_have_notes(directory: Path, fails: Fails, parse: Parse) -> None:
    write_checkpoint(directory / "ckpt", "5", {})
    for rollout_id in (2, 7):
        export = directory / f"hf_{rollout_id}"
        export.mkdir()
        mark_export(export, MARKED, rollout_id)
        (export / "scores.json").touch()
        words = "--load ckpt --save-hf hf_{rollout_id}"
        if rollout_id == 2:
            parse(words)
            again = fails(f"{words} --start-rollout-id 0")
            assert f"{export} has other things in it" in again, "it will be written again"
        else:
            assert f"{export} has other things in it than an earlier export (scores.json)" in fails(words)
    (directory / "hf_2").rename(directory / "hf_8")
    (directory / "hf_7" / "scores.json").unlink()
    assert "hf_8 has other things" in fails(words), "it is in the place of one to come"


def test_a_last_export_that_will_be_written_again_has_no_notes(directory: Path, fails: Fails, parse: Parse) -> None:
    """That of another run, or one whose files are gone, is missing for a run that is over."""
    write_checkpoint(directory / "ckpt", "5", {})
    words, last = "--load ckpt --save-hf hf_{rollout_id}", directory / "hf_5"
    last.mkdir()
    mark_export(last, parse(words), 5)
    (last / "scores.json").touch()
    parse(words)
    (last / "scores.json").unlink()
    mark_export(last, MARKED, 5)
    (last / "scores.json").touch()
    assert "hf_5 has other things in it than an earlier export (scores.json)" in fails(words)


def test_a_run_without_trainers_replaces_no_export(directory: Path, parse: Parse) -> None:
    """And does not look into the checkpoints that it will not resume from."""
    write_checkpoint(directory / "gone", "4", {})
    (directory / "gone" / "iter_0000004").rename(directory / "gone" / "iter_0000003")
    (directory / "hf").mkdir()
    (directory / "hf" / "thesis.txt").write_text("mine")
    parse("--debug-rollout-only --load gone --save-hf hf")


@pytest.mark.parametrize("damage", [None, "", "[]", '{"files": 1}', "{}"])
def test_what_came_into_an_export_later_is_not_replaced(
    directory: Path, damage: str | None, fails: Fails, parse: Parse
) -> None:
    (directory / "hf").mkdir()
    (directory / "hf" / "model.safetensors").touch()
    mark_export(directory / "hf", MARKED, 3)
    parse("--save-hf hf")
    if damage is None:
        (directory / "hf" / "notes").mkdir()
    else:
        (directory / "hf" / "slime_export.json").write_text(damage)
    other = "model.safetensors" if damage is not None else "notes"
    assert f"other things in it than an earlier export ({other})" in fails("--save-hf hf")


def test_a_run_goes_on_with_the_parameters_that_it_trained(directory: Path, parse: Parse, fails: Fails) -> None:
    for name, trained in (("all", None), ("some", {"freeze_params_name_list": ["^embedding", "mlp"]})):
        write_checkpoint(directory / name, "3", {"trained": trained})
    frozen = "--freeze-params-name-list mlp ^embedding"
    for words in ("--load all", f"--load some {frozen}"):
        assert starting_point(parse(words)).startswith("training goes on from")
    start = "has optimizer state of what its run trained, by"
    assert f"{start} neither, and this run has {frozen.replace('mlp ^embedding', '^embedding mlp')}:" in fails(
        f"--load all {frozen}"
    )
    for words, ours in (("", "neither"), ("--only-train-params-name-list mlp", "--only-train-params-name-list mlp")):
        line = fails(f"--load some {words}")
        assert f"{start} --freeze-params-name-list ^embedding mlp, and this run has {ours}: take the former" in line


def test_the_chosen_checkpoint_is_read(directory: Path, parse: Parse) -> None:
    for step in ("1", "3"):
        write_checkpoint(directory / "ended", step, {"distributed_optimizer": True})
    for words, step in (("", 3), ("--ckpt-step 1", 1), ("--ckpt-step 3 --save ended", 3)):
        args = parse(f"--load ended {words}")
        assert starting_point(args) == f"training goes on from {directory}/ended/iter_000000{step} (--load)"
        assert rollouts_done(args.load, args.ckpt_step) == step + 1
    args = parse("--ref-load ended --ref-ckpt-step 1")
    assert args.ref_load == f"{directory}/ended/iter_0000001"
    (directory / "ended" / "latest_checkpointed_iteration.txt").write_text("7")  # which was lost
    assert parse("--load ended --ckpt-step 1").ckpt_step == 1
