"""The models with random weights that tools/validate_model.py makes."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from transformers import Glm4MoeLiteConfig, PreTrainedModel

from slime.models import hf_config, shape_from_hf
from slime.models.shape import rule_shape
from tools import validate_model
from tools.validation import dummy
from tools.validation.dummy import shrunk, write_model

NUM_GPUS = 0

CONFIGS = Path(__file__).resolve().parents[1] / "data" / "configs"


def supported(directory: Path) -> bool:
    try:
        shape_from_hf(hf_config(directory))
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("directory", [p for p in sorted(CONFIGS.iterdir()) if supported(p)], ids=lambda p: p.name)
def test_a_tiny_model_keeps_the_architecture(directory: Path, tmp_path: Path) -> None:
    values = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(shrunk(values)))
    full, small = (shape_from_hf(hf_config(path)) for path in (directory, tmp_path))
    assert rule_shape(small).given >= rule_shape(full).given - {"mtp_num_layers"}
    assert small["group_query_attention"] == full["group_query_attention"]
    for name in ("rotary_base", "rotary_percent", "normalization", "norm_epsilon", "use_rope_scaling"):
        assert small[name] == full[name]
    assert small["hidden_size"] == 128


def test_the_dummy_is_complete_and_of_the_seed(tmp_path: Path) -> None:
    counts = [
        write_model(CONFIGS / "moonlight", tmp_path / str(i), "float32", tiny=True, seed=i // 2) for i in range(3)
    ]
    assert len(set(counts)) == 1
    weights = [(tmp_path / str(i) / "model.safetensors").read_bytes() for i in range(3)]
    assert weights[0] == weights[1] != weights[2]
    config = json.loads((tmp_path / "0" / "config.json").read_text())
    assert config["model_type"] == "deepseek_v3"
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert (tmp_path / "0" / "tokenizer.json").is_file()


@pytest.mark.parametrize("first_k_dense", [1, 3])
def test_a_tiny_model_has_as_many_kinds_of_layers_as_layers(first_k_dense: int, tmp_path: Path) -> None:
    values = json.loads((CONFIGS / "glm4.7-30B-A3B" / "config.json").read_text())
    kinds = ["dense"] * first_k_dense + ["sparse"] * (values["num_hidden_layers"] - first_k_dense)
    kinds_of_layers = {"first_k_dense_replace": first_k_dense, "mlp_layer_types": kinds}
    Glm4MoeLiteConfig(**{**values, **kinds_of_layers}).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    count = len(saved["mlp_layer_types"])
    small = shrunk({**saved, "moe_layer_freq": [1] * count, "layer_types": ["full_attention"] * (count + 1)})
    for name in ("mlp_layer_types", "moe_layer_freq", "layer_types"):
        assert len(small[name]) == small["num_hidden_layers"] == 4
    (tmp_path / "config.json").write_text(json.dumps(shrunk(saved)))
    assert shape_from_hf(hf_config(tmp_path))["moe_layer_freq"] == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("changes", "tiny", "message"),
    [
        ({"model_type": None}, True, "model_type None is not supported"),
        ({"num_attention_heads": None}, True, "num_attention_heads"),
        ({"hidden_size": ...}, True, "lacks hidden_size"),
        ({"hidden_act": "gelu"}, True, "'gelu' is not supported"),
        ({"vocab_size": 10**9}, False, "are free"),
    ],
)
def test_a_config_that_makes_no_model_is_one_line(
    tmp_path: Path, changes: dict[str, Any], tiny: bool, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    values = json.loads((CONFIGS / "qwen3-4B" / "config.json").read_text()) | changes
    config, output = tmp_path / "config.json", tmp_path / "out"
    config.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))
    words = ["--config", str(config), *(["--tiny"] if tiny else []), "--output-dir", str(output)]
    assert validate_model.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("validate_model.py: error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not output.exists()


def test_weights_that_do_not_fit_are_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dummy.psutil, "virtual_memory", lambda: Namespace(available=1e6))
    with pytest.raises(ValueError, match=r"G parameters in float32 are .* GiB, 0\.0 are free: --tiny"):
        write_model(CONFIGS / "qwen3-0.6B", tmp_path / "model", "float32", tiny=False, seed=0)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_leaves_no_half_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, directory: Path) -> None:
        Path(directory, "model.safetensors").write_text("half")
        raise OSError("No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        write_model(CONFIGS / "qwen3-4B", tmp_path / "model", "float32", tiny=True, seed=0)
    assert not list(tmp_path.iterdir())
