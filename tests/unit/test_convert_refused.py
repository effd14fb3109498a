"""What conversions refuse: outputs that hold something else, models that are damaged."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp

from slime.convert import fp8
from slime.files.exports import mark_export
from slime.utils.errors import BadInputError
from tests.parallel import tiny
from tests.unit.test_convert import SETTINGS, fp8_tool, fsdp_tool, torch_dist_tool
from tests.unit.test_tools import load

NUM_GPUS = 0

bf16_tool = load("convert_fp8_to_bf16")


def test_outputs_that_are_refused(models: Callable[[str], Path], tmp_path: Path, capsys: Any) -> None:
    origin = tmp_path / "in" / "model"
    shutil.copytree(models("qwen3"), origin)
    shutil.copytree(models("qwen3_tied"), tmp_path / "full")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "notes.txt").touch()
    for output, force, problem in (
        ("full", [], "is there already; pass --force to replace it"),
        ("in/model", ["--force"], "would replace"),
        ("in", ["--force"], "would replace"),
        ("others", ["--force"], "has other things in it than a model (no config.json): name another output"),
    ):
        words = ["--model-dir", str(origin), "--save-dir", str(tmp_path / output), *force]
        assert fp8_tool.main(words) == 2
        assert problem in capsys.readouterr().err
    for tool in (torch_dist_tool, fsdp_tool):
        words = ["--input-dir", str(tmp_path / "nowhere"), "--origin-hf-dir", str(origin), "--output-dir"]
        assert tool.main([*words, str(tmp_path / "out")]) == 2
        assert capsys.readouterr().err.endswith(f"error: {tmp_path / 'nowhere'}: there is no such directory\n")
    assert fp8_tool.main(["--model-dir", str(origin), "--save-dir", str(tmp_path / "full"), "--force"]) == 0
    assert "lm_head.weight" in load_file(tmp_path / "full" / "model.safetensors")
    assert (tmp_path / "others" / "notes.txt").exists()


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        *[(name, ("input-dir", "origin-hf-dir", "output-dir")) for name in ("torch_dist_to_hf", "fsdp_to_hf")],
        *[(name, ("model-dir", "save-dir")) for name in ("hf_to_fp8", "fp8_to_bf16")],
    ],
)
def test_programs_of_one_process_do_not_start_as_ranks(
    name: str, flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Before anything else: all would write to the same place."""
    tool, words = load(f"convert_{name}"), [f"--{flag}={tmp_path}" for flag in flags]
    cases = (
        ("2", "run", "torchrun starts 2: start it without"),
        ("1", "run", "would replace"),
        ("2", "", "would replace"),
    )
    for ranks, run_id, problem in cases:
        monkeypatch.setenv("WORLD_SIZE", ranks)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id) if run_id else monkeypatch.delenv("TORCHELASTIC_RUN_ID")
        assert tool.main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"convert_{name}.py: error: ")
        assert problem in line


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        *[(name, name) for name in ("notes.txt", "mine.json", "train.py", "best.safetensors", "training_args.bin")],
        *[
            ("results/eval.json", "results/"),
            ("ckpts/iter_0000001/x", "ckpts/"),
            ("tokenizer.json/x", "tokenizer.json/"),
        ],
    ],
)
def test_only_a_model_is_replaced(
    name: str, shown: str, models: Callable[[str], Path], tmp_path: Path, capsys: Any
) -> None:
    """By every tool: whatever else is in the output stays."""
    model, other = models("qwen3"), tmp_path / "out" / name
    shutil.copytree(model, tmp_path / "out")
    if (tmp_path / "out" / "tokenizer.json").is_file():
        (tmp_path / "out" / "tokenizer.json").unlink()
    other.parent.mkdir(parents=True, exist_ok=True)
    other.write_text("mine")
    for tool in (fp8_tool, bf16_tool):
        assert tool.main(["--model-dir", str(model), "--save-dir", str(tmp_path / "out"), "--force"]) == 2
        assert f"has other things in it than a model ({shown}): name another output\n" in capsys.readouterr().err
    for tool in (torch_dist_tool, fsdp_tool):
        words = ["--input-dir", model, "--origin-hf-dir", model, "--output-dir", tmp_path / "out", "--force"]
        assert tool.main([*map(str, words)]) == 2
        assert f"has other things in it than a model ({shown}): name another output\n" in capsys.readouterr().err
    assert other.read_text() == "mine"


def test_published_models_and_copies_of_the_origins_files_are_replaced(
    models: Callable[[str], Path], tmp_path: Path, capsys: Any
) -> None:
    """A file that the conversion copied is not a loss, and one of that name with something else in it is."""
    model, output = tmp_path / "model", tmp_path / "out"
    shutil.copytree(models("qwen3"), model)
    (model / "questions.json").write_text("{}")
    mark_export(model, argparse.Namespace(hf_checkpoint="origin", save="ckpt", load=None), 3)
    words = ["--model-dir", str(model), "--save-dir", str(output), "--force", "--chunk-size", "100kB"]
    assert fp8_tool.main(words) == 0
    assert not (output / "slime_export.json").exists(), "this is not a run's export"
    for name in ("README.md", "LICENSE-MODEL", "merges.txt", "tokenizer.model", "slime_export.json", "modeling_x.py"):
        (output / name).write_text(name)
    assert (output / "model.safetensors.index.json").is_file()
    assert fp8_tool.main(words) == 0
    assert not (output / "README.md").exists()
    (output / "questions.json").write_text("[]")
    capsys.readouterr()
    assert fp8_tool.main(words) == 2
    assert "has other things in it than a model (questions.json)" in capsys.readouterr().err


def test_bad_models(models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    shutil.copytree(models("qwen3"), model)
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"

    def refused(error: type[Exception], problem: str) -> None:
        with pytest.raises(error, match=problem):
            fp8.convert(model, tmp_path / "out", block=(128, 128), **SETTINGS)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: argparse.Namespace(free=1000))
        refused(BadInputError, r"needs \d+ KiB, and 1000 bytes are free there")
    save_file({**tensors, name: tensors[name] * float("nan")}, model / "model.safetensors")
    refused(BadInputError, f"{name} has entries that are not finite")
    (model / "model.safetensors").write_bytes(b"12345678")
    refused(BadInputError, "is damaged")
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refused(BadInputError, "is a git-LFS pointer and no weights")
    (model / "model.safetensors").unlink()
    refused(BadInputError, "there is no model.safetensors.index.json and no model.safetensors in it")
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00002.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(BadInputError, "model-00001-of-00002.safetensors is not there, and model.safetensors.index.json names it")
    save_file({"x": torch.zeros(1)}, model / "model-00001-of-00002.safetensors")
    refused(BadInputError, "which it is not in")
    (model / "config.json").unlink()
    refused(BadInputError, "there is no config.json in it")


BAD_JSON = [
    (b"{\n x", "Expecting property name enclosed in double quotes: line 2 column 2"),
    (b"", "Expecting value: line 1 column 1"),
    (b'"\x80"', "can't decode byte 0x80"),
    (b"[]", "it should hold an object"),
]
BAD_INDEX = [
    (text, "its weight_map should say") for text in (b"{}", b'{"weight_map": {}}', b'{"weight_map": {"x": 1}}')
]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        *[("config.json", *case) for case in BAD_JSON],
        *[("model.safetensors.index.json", *case) for case in (*BAD_JSON, *BAD_INDEX)],
    ],
)
def test_damaged_json_is_one_line_that_names_the_file(
    name: str, text: bytes, problem: str, models: Callable[[str], Path], tmp_path: Path, capsys: Any
) -> None:
    """By every tool, before any weight is read."""
    model, output = tmp_path / "model", str(tmp_path / "out")
    shutil.copytree(models("qwen3_tied"), model)
    dcp.save(dict(tiny.model("qwen3_tied").state_dict()), checkpoint_id=tmp_path / "fsdp")
    (model / name).write_bytes(text)
    runs: list[tuple[Any, list[str]]] = [
        (fp8_tool, ["--model-dir", str(model), "--save-dir", output]),
        (fsdp_tool, ["--input-dir", str(tmp_path / "fsdp"), "--origin-hf-dir", str(model), "--output-dir", output]),
    ]
    if name == "config.json":  # else this finds that it is not quantized
        runs.append((bf16_tool, runs[0][1]))
    capsys.readouterr()  # of torch, which says something at the first save of a process
    for tool, words in runs:
        assert tool.main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"error: {model / name} is damaged: " in line
        assert problem in line


def test_a_model_that_lacks_a_tensor_is_copied_with_a_warning(
    models: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of one that does not, or that is in no table, nothing is said."""
    model, name = tmp_path / "model", "model.layers.0.mlp.down_proj.weight"
    shutil.copytree(models("qwen3"), model)
    tensors, config = load_file(model / "model.safetensors"), json.loads((model / "config.json").read_text())
    save_file({each: tensor for each, tensor in tensors.items() if each != name}, model / "model.safetensors")
    for changes, tool, source, output in (
        ({}, fp8_tool, "model", "fp8"),
        ({}, bf16_tool, "fp8", "bf16"),
        ({"model_type": "other"}, fp8_tool, "model", "other"),
    ):
        if changes:
            (model / "config.json").write_text(json.dumps({**config, **changes}))
        caplog.clear()
        assert tool.main(["--model-dir", str(tmp_path / source), "--save-dir", str(tmp_path / output)]) == 0
        warnings = [line for line in caplog.messages if "warning" in line]
        expected = f"warning: {tmp_path / source}: weights do not fit config.json; missing: {name}; the output will"
        assert [line.startswith(expected) for line in warnings] == ([] if changes else [True])
    caplog.clear()
    assert fp8_tool.main(["--model-dir", str(models("qwen3")), "--save-dir", str(tmp_path / "whole")]) == 0
    assert "warning" not in caplog.text
