"""Options of on-policy distillation on the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.command_line import Fails, Flags, Parse, refused

NUM_GPUS = 0
OPD = "--use-opd --opd-type megatron"
SERVED = "--use-opd --opd-type sglang"
URL = "--rm-url http://teacher.example:8000"


@pytest.fixture(autouse=True)
def directory(launch_directory: Path) -> Path:
    """The working directory of a test."""
    saved = launch_directory / "saved"
    (saved / "iter_0000004").mkdir(parents=True)
    (saved / "latest_checkpointed_iteration.txt").write_text("4")
    return launch_directory


@refused(
    f"""
--use-opd -> --use-opd needs --opd-type
--opd-type megatron -> --opd-type megatron has no effect without --use-opd
--opd-kl-coef 1 -> --opd-kl-coef 1.0 has no effect without --use-opd
--opd-teacher-load model -> --opd-teacher-load model has no effect without --use-opd
{OPD} -> --opd-type megatron needs --opd-teacher-load
{OPD} --opd-teacher-load /no/such -> --opd-teacher-load /no/such: there is no such directory
{OPD} --opd-teacher-load model --opd-teacher-ckpt-step 3 -> {{cwd}}/model has no iter_0000003; it has no checkpoint
{OPD} --opd-teacher-load saved --opd-teacher-ckpt-step 0 -> /saved has no iter_0000000; it has iter_0000004
{OPD} --opd-teacher-load model --opd-kl-coef -1 -> argument --opd-kl-coef: must be at least 0
{SERVED} {URL} --opd-top-k 65 -> --opd-top-k 65 does not go with --opd-type sglang, whose replies have so many ids
--opd-top-k 5 -> --opd-top-k 5 has no effect without --use-opd
{OPD} --opd-teacher-load model --opd-top-k 301 -> --opd-top-k 301 is more than --vocab-size 300
{OPD} --opd-teacher-load model --opd-top-k 5 --loss-type custom_loss --custom-loss-function-path m.py -> is in the p
{OPD} --opd-teacher-load model --lora-rank 4 -> --opd-type megatron and --lora-rank 4 do not go together
{OPD} --opd-teacher-load model --loss-type sft_loss -> --use-opd has no effect with --loss-type sft_loss
{SERVED} -> --opd-type sglang needs --rm-model-path, --rm-url or --sglang-config, whom to ask
{SERVED} {URL} --rm-type remote_rm -> --rm-type remote_rm needs --rm-model-path or --sglang-config, for --rm-url is
{SERVED} {URL} --opd-teacher-load model -> --opd-teacher-load model has no effect with --opd-type sglang, which asks a
{SERVED} {URL} --rollout-temperature 0.7 -> at temperature 1 alone, as SGLang scores prompts, and --rollout-temperature
{OPD} --opd-teacher-load deep -> of --hf-checkpoint {{cwd}}/model: in the trainers a teacher takes turns in
{OPD} --opd-teacher-load wide -> --opd-teacher-load {{cwd}}/wide: model.embed_tokens.weight is [300, 128]
"""
)
def test_what_does_not_go_together(flags: Flags, message: str, fails: Fails, directory: Path) -> None:
    (directory / "m.py").write_text("def loss_function(args, batch, logits, sum_of_sample_mean): ...\n")
    wide = directory / "wide"
    wide.mkdir()
    for file in (directory / "model").iterdir():
        (wide / file.name).write_bytes(file.read_bytes())
    shutil.copytree(directory / "model", directory / "deep")
    config = json.loads((wide / "config.json").read_text())
    (directory / "deep" / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0, "num_attention_heads": 2}))
    (wide / "config.json").write_text(json.dumps(config | {"hidden_size": 96}))
    assert message.replace("{cwd}", str(directory)) in fails(*flags)


def test_the_teacher_is_the_chosen_checkpoint(directory: Path, parse: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    args = parse(f"{OPD} --opd-teacher-load model")
    assert (args.opd_teacher_load, args.opd_kl_coef) == (f"{directory}/model", 1.0)
    monkeypatch.setattr("slime.convert.weight_check._check_source", lambda *_, **__: None)
    args = parse(f"{OPD} --opd-teacher-load saved --opd-teacher-ckpt-step 4 --opd-kl-coef 0")
    assert (args.opd_teacher_load, args.opd_kl_coef) == (f"{directory}/saved/iter_0000004", 0.0)


def test_a_server_is_asked_by_the_reward_unless_a_function_of_ones_own_is(directory: Path, parse: Parse) -> None:
    (directory / "mine.py").write_text("def reward_func(args, sample, **kwargs): ...\n")
    path = "slime.rollout.on_policy_distillation.reward_func"
    assert parse(f"{SERVED} {URL}", "--rm-type").custom_rm_path == path
    assert parse(f"{SERVED} {URL} --custom-rm-path {path}").custom_rm_path == path
    assert parse(f"{OPD} --opd-teacher-load model", "--rm-type").custom_rm_path == path
    assert parse(f"{OPD} --opd-teacher-load model").custom_rm_path is None
    assert parse(f"{SERVED} --custom-rm-path mine.py").custom_rm_path == f"{directory}/mine.py:reward_func"
    args = parse(f"{SERVED} --rm-model-path model --rm-num-gpus 1")
    assert (args.custom_rm_path, args.rm_type, args.option_warnings) == (path, "math", [])


def serving(*models: dict[str, object]) -> str:
    """Words for a run that serves these beside the actor."""
    actor = {"name": "actor", "server_groups": [{"num_gpus": 2}]}
    Path("models.yaml").write_text(yaml.safe_dump({"sglang": [actor, *models]}))
    return f"{SERVED} --sglang-config models.yaml"


def frozen(name: str, *kinds: str) -> dict[str, object]:
    groups = [{"num_gpus": 1, "worker_type": kind} for kind in kinds or ("regular",)]
    return {"name": name, "model_path": "other", "server_groups": groups}


def test_a_file_must_have_a_teacher_whom_one_can_ask(directory: Path, parse: Parse, fails: Fails) -> None:
    shutil.copytree(directory / "model", directory / "other")
    apart = ("prefill", "decode")
    line = "no model in --sglang-config models.yaml is a teacher"
    assert line in fails(serving())
    assert line in fails(f"{serving()} {URL} --rm-type remote_rm")
    parse(f"{serving()} {URL}")
    parse(f"{serving(frozen('teacher'))} {URL} --rm-type remote_rm")
    parse(serving(frozen("math"), frozen("code")))
    together = "prefill and decode apart and --opd-type sglang do not go together"
    assert f"models.yaml: teacher: {together}" in fails(serving(frozen("teacher", *apart)))
    assert f"models.yaml: code: {together}" in fails(serving(frozen("math"), frozen("code", *apart)))
    parse(serving(frozen("teacher"), frozen("judge", *apart)))


def test_tokenizers_of_a_file_are_compared(directory: Path, parse: Parse, fails: Fails) -> None:
    shutil.copytree(directory / "model", directory / "other")
    for place, ids in (("model", {"a": 0, "b": 1}), ("other", {"a": 1, "b": 0})):
        (directory / place / "tokenizer.json").write_text(json.dumps({"model": {"vocab": ids}}))
    line = f"model_path {directory}/other: its tokenizer is not that of --hf-checkpoint {directory}/model ("
    assert f"models.yaml: teacher: {line}" in fails(serving(frozen("teacher")))
    assert f"models.yaml: math: {line}" in fails(serving(frozen("math")))
    parse(f"{serving(frozen('judge'))} {URL}")  # who is not asked may have any


@pytest.mark.parametrize(
    "words", [f"{OPD} --opd-teacher-load other", f"{SERVED} --rm-model-path other --rm-num-gpus 1"]
)
def test_the_teachers_tokenizer_is_the_students(words: str, directory: Path, parse: Parse, fails: Fails) -> None:
    shutil.copytree(directory / "model", directory / "other")
    tokenizers = [
        {"model": {"vocab": {"a": 0, "b": at}}, "added_tokens": [{"content": "c", "id": 3 - at}]} for at in (1, 2)
    ]
    (directory / "other" / "tokenizer.json").write_text(json.dumps(tokenizers[0]))
    parse(words)
    (directory / "model" / "tokenizer.json").write_text(json.dumps(tokenizers[0]))
    parse(words)
    (directory / "other" / "tokenizer.json").write_text(json.dumps(tokenizers[1]))
    line = fails(words)
    assert f" {directory}/other: its tokenizer is not that of --hf-checkpoint {directory}/model (" in line
    assert " and 3 more): a teacher scores the student's token ids" in line
