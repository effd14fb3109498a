"""What registered tests train on at each scale, and that each of them has what it names."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from slime.models import hf_config, shape_from_hf
from slime.utils.external_utils.metric_gate import baselines_file, read_baselines
from tests.ci import scale
from tests.ci.registry import read_all

NUM_GPUS = 0
REGISTERED = [file.path for file in read_all(scale.ROOT) if file.labels]


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLIME_TEST_SCALE", "SLIME_TEST_USE_FP8_ROLLOUT", "CUDA_VISIBLE_DEVICES", "DRY_RUN"):
        monkeypatch.setenv(name, "")  # so that what a test sets by itself is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("OUTPUT_DIR", str(tmp_path))
    monkeypatch.setenv("SLIME_MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("SLIME_DATASETS_DIR", str(tmp_path / "datasets"))


def test_an_unknown_scale_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert scale.scale() == "full"
    monkeypatch.setenv("SLIME_TEST_SCALE", "small")
    with pytest.raises(SystemExit, match="2"):
        scale.scale()
    assert capsys.readouterr().err.endswith("error: SLIME_TEST_SCALE=small must be one of full, random, tiny\n")


@pytest.mark.parametrize(("visible", "expected"), [("0", 1), ("2,5", 2), ("0,1,2", 2), ("0,1,2,3,4,5,6,7", 4)])
def test_a_run_takes_the_gpus_that_it_may_use(visible: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("SLIME_TEST_SCALE", "random")
    assert scale.Slots(4, least=1).count() == expected
    monkeypatch.setenv("SLIME_TEST_SCALE", "tiny")
    assert (scale.Slots(4, least=1).count(), scale.Slots(4, least=2, tiny=3).count()) == (1, 3)


@pytest.mark.parametrize(
    ("at", "visible", "said"),
    [
        ("full", "0,1,2", "it needs 4 GPUs, and may use 3 here; with SLIME_TEST_SCALE=tiny it runs on CPUs, and"),
        ("random", "0", "it needs 2 GPUs, and may use 1 here; "),
        ("random", "", "it needs 2 GPUs, and may use 0 here; "),
    ],
)
def test_too_few_gpus_are_refused_before_anything_is_made(
    at: str,
    visible: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SLIME_TEST_SCALE", at)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(SystemExit, match="2"):
        scale.prepare("ORG/NAME", "qwen2.5-0.5B", scale.Slots(4, least=2))
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def declared(path: str) -> dict[str, str]:
    """The strings that stand at a file's top."""
    return {
        target.id: node.value.value
        for node in ast.parse((scale.ROOT / path).read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


@pytest.mark.parametrize("path", REGISTERED)
def test_a_registered_file_has_the_shape_of_its_model(path: str) -> None:
    """Or of the one that its model is a form of."""
    named = declared(path)
    (name,) = re.findall(
        r"^# (\S+)\. Source", (scale.ROOT / "scripts/models" / f"{named['MODEL_TYPE']}.sh").read_text()
    )
    assert named["MODEL_NAME"].startswith(name)


@pytest.mark.parametrize("model_type", sorted({declared(path)["MODEL_TYPE"] for path in REGISTERED}))
def test_a_tiny_model_has_the_published_architecture(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that config.json says but sizes; of Moonlight also the positions, which no server for CPUs has."""
    monkeypatch.setenv("SLIME_TEST_SCALE", "tiny")
    scale.prepare("ORG/NAME", model_type, scale.Slots(1, least=1))
    directory = tmp_path / "tiny" / "models" / "NAME"
    published = json.loads((scale.ROOT / "tests" / "data" / "configs" / model_type / "config.json").read_text())
    made = json.loads((directory / "config.json").read_text())
    tokens = {"bos_token_id", "eos_token_id", "pad_token_id"}
    other = {*scale._TINY, *tokens, "torch_dtype", "initializer_range"}
    other |= {"rope_scaling"} if model_type == "moonlight" else set()
    for name in (published.keys() | made.keys()) - other:
        assert made[name] == published[name], name
    assert made["hidden_size"] == 64
    assert scale.model_flags("ORG/NAME").split() == ["--hf-checkpoint", str(directory), "--fp32"]
    weights = load_file(directory / "model.safetensors")
    assert weights["model.embed_tokens.weight"].norm(dim=-1).min() > 0.1, (
        "the gradient of a norm at 0 is not a gradient"
    )
    shape = shape_from_hf(hf_config(directory))
    assert shape["num_layers"] == made["num_hidden_layers"] == 2
    assert (tmp_path / "tiny" / "data" / "train.jsonl").is_file()


def test_random_weights_are_in_files_where_several_runs_start_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another test has made the model without."""
    monkeypatch.setenv("SLIME_TEST_SCALE", "random")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    written: list[Path] = []
    monkeypatch.setattr(scale, "_write_weights", lambda path: (written.append(path), (path / "a.safetensors").touch()))
    for weights in (False, False, True, True, False):
        scale.prepare("ORG/NAME", "qwen2.5-0.5B", scale.Slots(4, least=1), weights=weights)
        assert ("--random-weights" in scale.model_flags("ORG/NAME")) == (not written)
    assert len(written) == 1
    made = json.loads((tmp_path / "random" / "models" / "NAME" / "config.json").read_text())
    assert made == json.loads((scale.ROOT / "tests" / "data" / "configs" / "qwen2.5-0.5B" / "config.json").read_text())


def test_published_models_are_graded_on_their_data(tmp_path: Path) -> None:
    assert scale.model_flags("Qwen/Qwen3-4B") == f"--hf-checkpoint {tmp_path}/models/Qwen3-4B"
    words = scale.data_flags().split()
    assert words[:6] == [
        *("--prompt-data", f"{tmp_path}/datasets/gsm8k/train.parquet"),
        *("--input-key", "messages", "--label-key", "label"),
    ]
    assert words[6:8] == ["--rm-type", "math"]
    assert scale.data_flags("always_one").split()[6:8] == ["--custom-rm-path", f"{scale.__file__}:always_one"]


def test_the_reward_is_a_share_of_the_response() -> None:
    sample = Namespace(tokens=[0, 0, 0, 10, 200, 159, 160], response_length=4)
    args = Namespace(vocab_size=320)
    assert asyncio.run(scale.lower_half(args, sample)) == 0.5
    assert asyncio.run(scale.lower_half(args, Namespace(tokens=[1], response_length=0))) == 0.0


@pytest.mark.parametrize(
    ("file", "at", "said"),
    [
        ("qwen3_30B_A3B", "tiny", "SLIME_TEST_USE_FP8_ROLLOUT=1: only the published checkpoint is in float8; unset "),
        ("qwen3_30B_A3B", "random", "SLIME_TEST_USE_FP8_ROLLOUT=1: only the published checkpoint is in float8; unset "),
        ("moonlight_16B_A3B", "full", "tokenizer.json is missing: its tokenizer is published as code; docs/launch.md "),
    ],
)
def test_what_a_test_cannot_do_is_one_line(file: str, at: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_TEST_SCALE", at)
    monkeypatch.setenv("SLIME_TEST_USE_FP8_ROLLOUT", "1")
    command = [sys.executable, f"tests/test_{file}.py"]
    result = subprocess.run(command, cwd=scale.ROOT, capture_output=True, text=True, timeout=120)
    assert result.stderr.startswith(f"test_{file}.py: error: ")
    assert (result.returncode, said in result.stderr, len(result.stderr.splitlines())) == (2, True, 1)


def test_a_dry_run_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIME_TEST_SCALE", "tiny")
    monkeypatch.setenv("DRY_RUN", "1")
    with pytest.raises(SystemExit, match="2"):
        scale.prepare("Qwen/Qwen3-4B", "qwen3-4B", scale.Slots(1, least=1))
    assert "error: DRY_RUN trains nothing, and a test asserts what was trained" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_needs_a_baseline_has_one() -> None:
    """Else run the file with SLIME_TEST_SCALE=tiny, and tools/update_baselines.py on its run."""
    known = read_baselines(baselines_file(scale.ROOT / "tests" / "test_x.py"))
    for path in REGISTERED:
        if "scale.corridors(" in (scale.ROOT / path).read_text():
            assert "rollout/raw_reward" in known[f"{Path(path).name} tiny"].values, path
