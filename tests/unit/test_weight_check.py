"""Weights that could not be loaded, or are another model's: one line as flags are read, for dry runs and others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.entry.arguments import parse_args
from slime.files import hf_reader
from slime.files.checkpoints import LATEST
from slime.files.hf_reader import read_headers
from slime.files.hf_writer import INDEX_NAME
from slime.files.model_directory import stored_weights
from tests.command_line import command, failure, write_headers, write_rows
from tests.parallel import tiny
from tests.stored_models import TARGETS, save_adapters, save_critic, save_model

NUM_GPUS = 0

LORA = f"--lora-rank 4 --lora-target-modules {' '.join(TARGETS)}"
LAYER = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models in several files: ``model``; a wider one, ``wide``; and one of another family, ``moe``."""
    root = tmp_path_factory.mktemp("models")
    wide = tiny.config("qwen3")
    wide.hidden_size = 96
    models = {"model": tiny.model("qwen3"), "wide": tiny.random_model("qwen3", wide), "moe": tiny.model("qwen3_moe")}
    for name, model in models.items():
        model.save_pretrained(root / name, max_shard_size="100KB")
        assert len(list((root / name).glob("*.safetensors"))) > 2
    return root


@pytest.fixture
def directory(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    shutil.copytree(root / "model", tmp_path / "bad")
    write_rows(tmp_path / "data.jsonl")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def file_of(name: str) -> Path:
    """The file of ``bad`` that has a tensor."""
    return Path("bad", json.loads(Path("bad", INDEX_NAME).read_text())["weight_map"][name])


def change_index(change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads(Path("bad", INDEX_NAME).read_text())
    change(index["weight_map"])
    Path("bad", INDEX_NAME).write_text(json.dumps(index))


def to_float8(*, scale: tuple[int, ...] | None, config: bool = True, scales_in: torch.dtype = torch.float32) -> None:
    """One tensor of ``bad``, with scales of that shape."""
    file = file_of(LAYER)
    tensors = load_file(file)
    tensors[LAYER] = tensors[LAYER].to(torch.float8_e4m3fn)
    if scale:
        tensors[f"{LAYER}_scale_inv"] = torch.ones(scale).to(scales_in)
        change_index(lambda files: files.update({f"{LAYER}_scale_inv": file.name}))
    save_file(tensors, file)
    if config:
        values = json.loads(Path("bad", "config.json").read_text())
        values["quantization_config"] = {
            **{"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"},
            "weight_block_size": [32, 32],
        }
        Path("bad", "config.json").write_text(json.dumps(values))


def without_the_tensor() -> None:
    file = file_of(LAYER)
    tensors = load_file(file)
    del tensors[LAYER]
    save_file(tensors, file)


def without_an_index() -> None:
    Path("bad", INDEX_NAME).unlink()


DAMAGES: dict[str, tuple[Callable[[], Any], str]] = {
    "missing file": (lambda: file_of(LAYER).unlink(), f"safetensors is not there, and {INDEX_NAME} names"),
    "truncated": (lambda: file_of(LAYER).write_bytes(file_of(LAYER).read_bytes()[:-4]), "is not whole: it has"),
    "longer": (lambda: file_of(LAYER).write_bytes(file_of(LAYER).read_bytes() + b"1234"), "is not whole: it has"),
    "half a header": (lambda: file_of(LAYER).write_bytes(file_of(LAYER).read_bytes()[:50]), "is damaged: it does not"),
    "empty": (lambda: file_of(LAYER).write_bytes(b""), "safetensors is empty: copy or download it again"),
    "pointer": (
        lambda: file_of(LAYER).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        "is a git-LFS pointer and no weights: run git lfs pull there",
    ),
    "no JSON": (lambda: file_of(LAYER).write_bytes(b"\5" + b"\0" * 7 + b"hello"), "is damaged: it does not begin with"),
    "not in the file": (without_the_tensor, f"has {LAYER} in model-0"),
    "not in the index": (lambda: change_index(lambda files: files.pop(LAYER)), f"fit config.json; missing: {LAYER}:"),
    "one too many": (lambda: change_index(lambda files: files.update(x=files[LAYER])), "has x in model-0"),
    "bad index": (lambda: Path("bad", INDEX_NAME).write_text("[]"), "is damaged: it should hold an object"),
    "no index": (without_an_index, f"there is no {INDEX_NAME} and no model.safetensors in it"),
    "no scale": (lambda: to_float8(scale=None), f"{LAYER} is in float8, and there is no {LAYER}_scale_inv"),
    "no blocks": (lambda: to_float8(scale=(2, 4), config=False), "is in float8, and config.json no quantization_conf"),
    "other scale": (lambda: to_float8(scale=(1, 1)), f"{LAYER}_scale_inv is [1, 1], and blocks of [32, 32] make ["),
    "other width": (lambda: shutil.copy("wide/config.json", "bad/config.json"), "embed_tokens.weight is ["),
    "other family": (lambda: shutil.copy("moe/config.json", "bad/config.json"), "config.json; missing: model.layers"),
}  # fmt: skip
OF_FILES = (
    *("missing file", "truncated", "longer", "empty", "pointer", "no JSON"),
    *("not in the file", "one too many", "bad index"),
)


@pytest.mark.parametrize("flag", ["--hf-checkpoint", "--ref-load"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_directory_that_trainers_could_not_load(
    directory: Path, capsys: pytest.CaptureFixture[str], damage: str, flag: str
) -> None:
    do, expected = DAMAGES[damage]
    do()
    said = failure(capsys, f"{flag} bad", "--fp32")
    assert said.startswith(f"{flag} {directory / 'bad'}: "), said
    assert expected in said


@pytest.mark.parametrize("scales_in", [torch.float32, torch.float8_e8m0fnu])
def test_float8_with_its_scales(directory: Path, scales_in: torch.dtype) -> None:
    shape = read_headers(Path("bad"))[LAYER].shape
    to_float8(scale=tuple(-(-size // 32) for size in shape), scales_in=scales_in)
    parse_args(command("--ref-load bad", "--fp32"))


@pytest.mark.parametrize("damage", DAMAGES)
def test_engines_alone_need_whole_files(directory: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    """Tensors may be others: engines know formats that trainers do not."""
    DAMAGES[damage][0]()
    words = "--hf-checkpoint bad --debug-rollout-only --rollout-num-gpus 1"
    if damage in OF_FILES:
        assert DAMAGES[damage][1] in failure(capsys, words, "--colocate")
    elif "half" not in damage and "other" not in damage:
        parse_args(command(words, "--colocate"))
    parse_args(command(f"{words} --sglang-load-format dummy", "--colocate"))


def test_what_is_not_read_is_not_checked(directory: Path) -> None:
    file_of(LAYER).write_bytes(b"")
    parse_args(command("--random-weights --hf-checkpoint bad"))
    parse_args(command("--random-weights --ref-load bad"))
    parse_args(command("--load-debug-rollout-data x/{rollout_id}.pt --hf-checkpoint bad --ref-load model"))
    save_model("model", "ckpt/iter_0000001")
    parse_args(command("--load ckpt --ref-load bad"))


@pytest.mark.parametrize("words", ["", "--ref-load model"])
def test_each_file_is_opened_once(directory: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    opened: list[str] = []
    read = hf_reader._read
    monkeypatch.setattr(hf_reader, "_read", lambda file, *more: opened.append(file.name) or read(file, *more))
    parse_args(command(words))
    assert sorted(opened) == sorted(path.name for path in Path("model").glob("*.safetensors"))


def test_a_single_file_has_other_files_beside_it(directory: Path) -> None:
    """Which trainers do not read."""
    shutil.rmtree("bad")
    tiny.model("qwen3").save_pretrained("bad")
    Path("bad", "consolidated.safetensors").write_bytes(b"other")
    parse_args(command("--hf-checkpoint bad"))


def test_a_reference_of_another_model(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = f"--ref-load {directory}/wide is another model's: hidden_size is 96 by its config.json, and 64 by that of"
    assert failure(capsys, "--ref-load wide").startswith(other)
    assert "/moe is another model's: " in failure(capsys, "--ref-load moe")
    values = json.loads(Path("model", "config.json").read_text())
    Path("bad", "config.json").write_text(json.dumps(values | {"model_type": "llama"}))
    for path in [*Path("bad").glob("*.safetensors"), Path("bad", INDEX_NAME)]:
        path.unlink()
    write_headers(Path("bad"))
    said = failure(capsys, "--ref-load bad")
    assert "another model's (llama): it has nothing for decoder.layers.0.self_attention.k_layernorm.weight" in said
    parse_args(command("--ref-load bad --allow-config-mismatch"))
    said = failure(capsys, "--hf-checkpoint bad --ref-load model")
    assert "there is no place for its decoder.layers.0.self_attention.k_layernorm.weight" in said
    for change, other in (({"vocab_size": 128}, "vocab_size is 128"), ({"tie_word_embeddings": True}, "untie_embeddi")):
        Path("bad", "config.json").write_text(json.dumps(values | change))
        for path in Path("bad").glob("*.safetensors"):
            path.unlink()
        write_headers(Path("bad"))
        assert f"--ref-load {directory}/bad is another model's: {other}" in failure(capsys, "--ref-load bad")


def test_sizes_that_no_weight_has_may_differ(directory: Path) -> None:
    """Of the dense layers in a model whose layers all have experts."""
    values = json.loads(Path("moe", "config.json").read_text())
    for name, size in (("one", 96), ("other", 80)):
        Path(name).mkdir()
        changed = values | {"mlp_only_layers": [], "intermediate_size": size}
        Path(name, "config.json").write_text(json.dumps(changed))
        write_headers(Path(name))
    parse_args(command("--hf-checkpoint one --ref-load other"))


# ---- torch_dist checkpoints


@pytest.mark.parametrize("model", ["model", "moe"])
def test_own_checkpoints_are_taken(directory: Path, model: str) -> None:
    save_model(model, "ckpt/iter_0000001")
    for words in ("--ref-load ckpt", "--ref-load ckpt/iter_0000001", "--load ckpt"):
        parse_args(command(f"--hf-checkpoint {model} {words}"))
    words = LORA.replace(" down_proj", "") if model == "moe" else LORA
    if model == "model":
        save_adapters(model, "adapters/iter_0000001")
        parse_args(command(f"--hf-checkpoint {model} --load adapters {words}"))
        parse_args(command(f"--hf-checkpoint {model} --load adapters --ref-load ckpt {words}"))


def test_checkpoints_in_a_models_directory(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--hf-checkpoint`` means the model there, whatever a run has saved beside it; another flag must say which."""
    save_model("model", "bad/iter_0000001")
    parse_args(command("--hf-checkpoint bad"))
    parse_args(command("--hf-checkpoint bad --ref-load bad"))
    assert stored_weights("bad") is None
    assert failure(capsys, "--ref-load bad") == (
        f"--ref-load {directory}/bad: it holds safetensors, and checkpoints too: for the checkpoint name its own "
        f"directory, {directory}/bad/iter_0000001; for the model a directory without checkpoints"
    )
    parse_args(command("--ref-load bad/iter_0000001"))
    assert stored_weights("bad/iter_0000001") == Path("bad/iter_0000001")
    save_adapters("model", "bad/iter_0000002")
    parse_args(command(f"--hf-checkpoint bad --ref-load bad {LORA}"))
    Path("bad", LATEST).write_text("release")
    Path("bad/iter_0000001").rename("bad/release")
    assert failure(capsys, "--hf-checkpoint bad --load bad").startswith(
        f"--load {directory}/bad: it holds safetensors, and"
    )


def test_weights_are_read_from_the_model_in_such_a_directory(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slime.backends.megatron import learner

    read: list[tuple[str, object]] = []
    monkeypatch.setattr(learner.checkpoint, "load_model", lambda source, _: read.append(("checkpoint", source)))
    monkeypatch.setattr(learner.weights_io, "load_hf", lambda _, source: read.append(("model", source)))
    save_model("model", "bad/iter_0000001")
    save_model("model", "ckpt/iter_0000001")
    for source in ("bad", "ckpt", "bad/iter_0000001", "model"):
        learner.load_weights([], source)
    iteration = Path("ckpt/iter_0000001")
    assert read == [
        ("model", "bad"),
        ("checkpoint", iteration),
        ("checkpoint", Path("bad/iter_0000001")),
        ("model", "model"),
    ]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("wide", "64]: is it another model's?"),
        ("moe", "it lacks model.layers.0.mlp.down_proj.weight, "),
    ],
)
@pytest.mark.parametrize("flag", ["--ref-load", "--load"])
def test_checkpoints_of_another_model(
    directory: Path, capsys: pytest.CaptureFixture[str], model: str, expected: str, flag: str
) -> None:
    save_model(model, "ckpt/iter_0000001")
    said = failure(capsys, f"{flag} ckpt")
    assert said.startswith(f"{flag} {directory}/ckpt/iter_0000001: "), said
    assert expected in said
    assert "is it another model's?" in said


def test_checkpoints_of_more_layers(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = "decoder.layers.9.self_attention.linear_proj.weight"
    save_model("model", "ckpt/iter_0000001", **{more: torch.ones(64, 96)})
    said = failure(capsys, "--load ckpt")
    assert f"has no place for: {more}: is it another model's?" in said


PPO = "--advantage-estimator ppo"


@pytest.mark.parametrize("model", ["model", "moe"])
def test_what_a_critic_may_start_or_go_on_from(directory: Path, model: str) -> None:
    save_model(model, "ckpt/iter_0000001")
    save_critic(model, "ckpt/critic/iter_0000001")
    save_critic(model, "moved/iter_0000001")
    resumed = (f"{PPO} --load ckpt", f"{PPO} --load ckpt --critic-load moved")
    for words in (*resumed, *(f"{PPO} --critic-load {name}" for name in ("moved", "ckpt", model))):
        parse_args(command(f"--hf-checkpoint {model} {words}"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--load ckpt",
            "--load goes on from {directory}/ckpt/iter_0000001, and --critic-load {directory}/ckpt/critic",
        ),
        ("--load ckpt --critic-load later", "/later has no whole iter_0000001: name the directory with the critic's c"),
        ("--load ckpt --critic-load ckpt", "/ckpt/iter_0000001: it has no value_head.weight, as a critic's checkpoint"),
        ("--load ckpt --critic-load other", "--critic-load {directory}/other/iter_0000001: it lacks model.layers.0.ml"),
        ("--critic-load other", "--critic-load {directory}/other/iter_0000001: it lacks model.layers.0.mlp.down_proj."),
        ("--critic-load moe", "--critic-load {directory}/moe is another model's"),
        ("--critic-load empty", "--critic-load {directory}/empty: there is no checkpoint (no latest_checkpointed_iter"),
        ("--critic-load lost", "--critic-load {directory}/lost: latest_checkpointed_iteration.txt names iter_000"),
        ("--ref-load later", "--ref-load {directory}/later/iter_0000002: it lacks lm_head.weight of --hf-checkpoint "),
    ],
)
def test_critics_of_another_run_or_model(
    directory: Path, capsys: pytest.CaptureFixture[str], words: str, expected: str
) -> None:
    save_model("model", "ckpt/iter_0000001")
    save_critic("model", "later/iter_0000002")
    save_critic("moe", "other/iter_0000001")
    Path("empty").mkdir()
    Path("lost").mkdir()
    Path("lost", LATEST).write_text("1")
    said = failure(capsys, f"{PPO} {words}")
    assert expected.replace("{directory}", str(directory)) in said


@pytest.mark.parametrize(
    ("model", "without", "expected"),
    [
        ("wide", (), "and the model of --hf-checkpoint {directory}/model has [4, 64]: is it another model's?"),
        ("moe", (), "it lacks adapters of the model of --hf-checkpoint {directory}/model: decoder.layers.0.mlp."),
        ("model", ("decoder.layers.2.mlp.linear_fc2.lora.b",), ": decoder.layers.2.mlp.linear_fc2.lora.b: is it anot"),
    ],
)  # fmt: skip
def test_adapters_of_another_model(
    directory: Path, capsys: pytest.CaptureFixture[str], model: str, without: tuple[str, ...], expected: str
) -> None:
    save_adapters(model, "ckpt/iter_0000001", *without)
    said = failure(capsys, f"--load ckpt {LORA}")
    assert said.startswith(f"--load {directory}/ckpt/iter_0000001: "), said
    assert expected.replace("{directory}", str(directory)) in said


def test_checkpoints_that_are_not_whole(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model("model", "ckpt/iter_0000001")
    (file,) = Path("ckpt", "iter_0000001").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1000])
    assert f"files are missing or not whole: {file.name}: copy" in failure(capsys, "--load ckpt")
    Path("ckpt", "iter_0000001", ".metadata").write_bytes(b"x")
    assert ".metadata cannot be read" in failure(capsys, "--load ckpt")
    Path("ckpt", "iter_0000001", ".metadata").unlink()
    assert "there is no .metadata in it, which a copy may have left out" in failure(capsys, "--ref-load ckpt")


@pytest.mark.parametrize("flag", ["--ref-load", "--load"])
def test_checkpoints_without_some_file(directory: Path, capsys: pytest.CaptureFixture[str], flag: str) -> None:
    save_model("model", "ckpt/iter_0000001")
    (file,) = Path("ckpt", "iter_0000001").glob("*.distcp")
    file.unlink()
    assert f"files are missing or not whole: {file.name}: copy" in failure(capsys, f"{flag} ckpt")
    shutil.rmtree("ckpt/iter_0000001")
    save_model("model", "ckpt/iter_0000001")
    Path("ckpt", "iter_0000001", "common.pt").unlink()
    assert "there is no common.pt in it" in failure(capsys, f"{flag} ckpt")


def test_weights_to_start_from_are_called_by_the_flag_that_was_given(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model("model", "converted/release")
    Path("converted", LATEST).write_text("release")
    for words in ("", LORA):
        parse_args(command(f"--load converted {words}"))
        (file,) = Path("converted", "release").glob("*.distcp")
        file.rename("away")
        for flag in ("--load", "--ref-load"):
            said = failure(capsys, f"{flag} converted {words}")
            assert said.startswith(f"{flag} {directory}/converted/release: files are missing or not whole: ")
        Path("away").rename(file)


def test_checkpoints_of_other_formats(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = Path("legacy", "iter_0000007", "mp_rank_00")
    ranks.mkdir(parents=True)
    (ranks / "model_optim_rng.pt").touch()
    Path("legacy", LATEST).write_text("7")
    expected = f"--ref-load {directory}/legacy/iter_0000007: this checkpoint is not in the torch_dist format"
    assert expected in failure(capsys, "--ref-load legacy")


def test_adapters_need_the_weights_that_they_are_added_to(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_adapters("model", "ckpt/iter_0000001")
    for path in [*Path("bad").glob("*.safetensors"), Path("bad", INDEX_NAME)]:
        path.unlink()
    words = f"--load ckpt --hf-checkpoint bad --sglang-load-format dummy {LORA}"
    assert "there are no *.safetensors in it" in failure(capsys, words)
