"""What a command line says of multi-token prediction (MTP) heads."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.models import family_of, hf_config, weight_shape
from tests.command_line import QWEN3, Fails, Flags, Parse, refused, write_checkpoint, write_model

NUM_GPUS = 0

HEADS = {"num_nextn_predict_layers": 1}
MIMO = {**QWEN3, **HEADS, "model_type": "mimo", "attention_bias": True}
TRAINS = "--hf-checkpoint mimo --enable-mtp-training"
DRAFT = "--sglang-speculative-draft-model-path"
EAGLE3 = f"--sglang-speculative-algorithm EAGLE3 {DRAFT} other"
DRAFTS = f"{TRAINS} --sglang-speculative-algorithm EAGLE"
DISAGGREGATE = "--rollout-num-gpus 1"


@pytest.fixture
def directory(launch_directory: Path) -> Path:
    for name, config in (("mimo", MIMO), ("other", MIMO), ("qwen3", QWEN3 | HEADS)):
        write_model(launch_directory / name, config)
    return launch_directory


def test_config_json_says_how_many_heads_there_are(directory: Path, parse: Parse) -> None:
    args = parse(TRAINS)
    assert (args.mtp_num_layers, args.mtp_loss_scaling_factor, args.pushes_heads) == (1, 0.2, False)
    assert parse(f"{TRAINS} --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1").mtp_num_layers == 1
    parse("--hf-checkpoint mimo --mtp-num-layers 1")  # as upstream's scripts say: without training
    parse("--hf-checkpoint mimo --mtp-num-layers 0")
    config = hf_config(directory / "mimo")
    family, shape = family_of(config), weight_shape(config, with_heads=True)
    assert family.sources("mtp.layers.0.eh_proj.weight", shape) == ["model.mtp_layers.0.input_proj.weight"]
    assert not any(name.startswith("mtp.") for name in family.parameters(weight_shape(config)))


def test_engines_that_draft_by_the_heads_are_given_them(
    directory: Path, capsys: pytest.CaptureFixture[str], parse: Parse
) -> None:
    assert parse(DRAFTS).pushes_heads
    assert parse(f"{DRAFTS} --sglang-speculative-draft-model-path mimo").pushes_heads
    assert not parse("--hf-checkpoint mimo --sglang-speculative-algorithm EAGLE").pushes_heads
    assert parse(DRAFTS.replace("EAGLE", "eagle")).pushes_heads  # SGLang reads it so too
    assert not parse(DRAFTS.replace("EAGLE", "NGRAM")).pushes_heads
    assert not parse(f"{DRAFTS} --sglang-speculative-draft-model-path other").pushes_heads
    assert "engines are not given the heads" in capsys.readouterr().err
    itself = f"--hf-checkpoint mimo --sglang-speculative-algorithm STANDALONE {DRAFT} mimo"  # a second copy of it
    unnamed = itself.removesuffix(f" {DRAFT} mimo")
    lines = {DRAFTS: False, f"{DRAFTS} {DRAFT} mimo": False, EAGLE3: True, itself: True, unnamed: True}
    lines |= {f"{DRAFT} other": False, f"--sglang-speculative-algorithm NGRAM {DRAFT} other": False}
    assert {words: parse(words).drafts_apart for words in lines} == lines
    disk = parse(f"{DRAFTS} {DISAGGREGATE} --update-weight-transport disk", without="--colocate")
    assert disk.pushes_heads


def test_engines_apart_are_given_no_heads_by_their_transport(directory: Path, parse: Parse, fails: Fails) -> None:
    words = f"{DRAFTS} --sglang-config models.yaml"
    for slots in (2, 3):
        (directory / "models.yaml").write_text(f"sglang: [{{name: a, server_groups: [{{num_gpus: {slots}}}]}}]")
        if slots == 2:
            assert parse(words).pushes_heads
        else:
            assert "drops them of distributed: use disk, or tensor with --colocate and no engines apart" in fails(words)
    assert parse(f"{words} --update-weight-transport disk").pushes_heads


@refused(
    f"""
{EAGLE3} {DISAGGREGATE} --update-weight-transport disk less --colocate
    -> {DRAFT}, --sglang-speculative-algorithm EAGLE3: with --update-weight-t
{EAGLE3} --check-weight-update-equal -> {DRAFT}, --sglang-speculative-algorithm EAGLE3: with --check-
--sglang-speculative-algorithm standalone --check-weight-update-equal
    -> --sglang-speculative-algorithm standalone: with --check-weight-update-equal SGLang would load
--enable-mtp-training -> has no MTP heads (num_nextn_predict_layers of config.json)
--hf-checkpoint qwen3 --enable-mtp-training -> the heads of qwen3 cannot be trained
{TRAINS} --mtp-num-layers 2 -> --mtp-num-layers is 2, config.json means 1
{TRAINS} --mtp-num-layers 0 -> --mtp-num-layers is 0, config.json means 1
--hf-checkpoint mimo --mtp-num-layers 2 -> --mtp-num-layers is 2, config.json means 1
--mtp-loss-scaling-factor 0.1 -> --mtp-loss-scaling-factor 0.1 needs --enable-mtp-training
{TRAINS} --mtp-num-layers 2 --allow-config-mismatch -> trains all 1 heads of config.json
{TRAINS} --lora-rank 4 -> --enable-mtp-training cannot be used with --lora-rank
{TRAINS} --pipeline-model-parallel-size 2 --overlap-grad-reduce --overlap-param-gather
    -> --pipeline-model-parallel-size above 1 cannot be used with --overlap-param-gather
{DRAFTS} {DISAGGREGATE} less --colocate -> SGLang takes heads by --update-weight-transport tensor or disk
"""
)
def test_what_cannot_be(directory: Path, fails: Fails, flags: Flags, message: str) -> None:
    assert message in fails(*flags)


def test_a_run_goes_on_with_heads_or_without_as_it_began(directory: Path, fails: Fails, parse: Parse) -> None:
    write_checkpoint(directory / "with", "2", {"heads": True})
    write_checkpoint(directory / "without", "2", {"heads": False})
    write_checkpoint(directory / "old", "2", {"adapters": None})  # of a version that did not know of heads
    assert f"--load {directory}/with/iter_0000002 was saved with --enable-mtp-training" in fails(
        "--hf-checkpoint mimo --load with"
    )
    for name in ("without", "old"):
        assert f"{name}/iter_0000002 was saved without --enable-mtp-training" in fails(f"{TRAINS} --load {name}")
        parse(f"--hf-checkpoint mimo --load {name}")
    parse(f"{TRAINS} --load with")
