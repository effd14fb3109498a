"""Converting torch_dist checkpoints: where parameters are, pieces that are read, and checkpoints of another model."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

from slime.convert import torch_dist_to_hf
from slime.convert.hf_files import stored_specs
from slime.convert.stored import StoredTensors
from slime.files.checkpoints import LATEST
from slime.utils.errors import BadInputError
from tests.unit.test_convert import SETTINGS, torch_dist_tool

NUM_GPUS = 0


@pytest.mark.parametrize(
    ("name", "keys", "expected"),
    [
        ("output_layer.weight", ["output_layer.weight"], ("output_layer.weight", ())),
        ("decoder.layers.3.mlp.x", ["decoder.layers.mlp.x"], ("decoder.layers.mlp.x", (3,))),
        ("decoder.layers.3.mlp.x", ["decoder.layers.3.mlp.x", "decoder.layers.mlp.x"], ("decoder.layers.3.mlp.x", ())),
        (
            "decoder.layers.1.input_layernorm.weight",
            ["decoder.layers.self_attention.linear_qkv.layer_norm_weight"],
            ("decoder.layers.self_attention.linear_qkv.layer_norm_weight", (1,)),
        ),
        (
            "decoder.layers.2.pre_mlp_layernorm.weight",
            ["decoder.layers.2.mlp.linear_fc1.layer_norm_weight"],
            ("decoder.layers.2.mlp.linear_fc1.layer_norm_weight", ()),
        ),
        (
            "decoder.layers.2.self_attention.q_layernorm.weight",
            ["decoder.layers.self_attention.linear_q_up_proj.layer_norm_weight"],
            ("decoder.layers.self_attention.linear_q_up_proj.layer_norm_weight", (2,)),
        ),
        (
            "decoder.layers.2.self_attention.kv_layernorm.weight",
            ["decoder.layers.2.self_attention.linear_kv_up_proj.layer_norm_weight"],
            ("decoder.layers.2.self_attention.linear_kv_up_proj.layer_norm_weight", ()),
        ),
        (
            "decoder.layers.2.mlp.experts.7.linear_fc1.weight",
            ["decoder.layers.2.mlp.experts.experts.linear_fc1.weight"],
            ("decoder.layers.2.mlp.experts.experts.linear_fc1.weight", (7,)),
        ),
        (
            "decoder.layers.2.mlp.experts.7.linear_fc1.weight",
            ["decoder.layers.mlp.experts.experts.linear_fc1.weight"],
            ("decoder.layers.mlp.experts.experts.linear_fc1.weight", (2, 7)),
        ),
    ],
)
def test_where_a_parameter_is(name: str, keys: list[str], expected: tuple[str, tuple[int, ...]]) -> None:
    found = torch_dist_to_hf.locate(dict.fromkeys(keys), name)
    assert found is not None
    assert (found.key, found.index) == expected
    assert torch_dist_to_hf.locate({}, name) is None


def save_stacked(directory: Path, **tensors: torch.Tensor) -> StoredTensors:
    dcp.save(tensors, checkpoint_id=directory)
    return StoredTensors(directory)


def test_experts_of_one_piece_are_read_together(tmp_path: Path) -> None:
    """And layers of one piece, too, do not hide the others."""
    name = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
    whole = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    stored = save_stacked(tmp_path, **{name: whole})
    located = {f"{layer}.{e}": torch_dist_to_hf.Location(name, (layer, e), 1) for layer in range(2) for e in range(3)}
    tasks = list(torch_dist_to_hf.plan(stored, located))
    assert [task.names for task in tasks] == [("0.0", "0.1", "0.2"), ("1.0", "1.1", "1.2")]
    for layer, task in enumerate(tasks):
        assert torch.equal(stored.read(task.key, task.offsets, task.sizes).view(-1, *task.shape), whole[layer])
    with pytest.raises(BadInputError, match=r"linear_fc2.weight \[2, 3, 4, 5\] has no part \[2, 0\]"):
        list(torch_dist_to_hf.plan(stored, {"x": torch_dist_to_hf.Location(name, (2, 0), 1)}))


def test_a_part_of_a_tensor(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(4, 6).bfloat16()
    stored = save_stacked(tmp_path, x=whole)
    assert (stored.shape("x"), stored.dtype("x"), stored.cuts("x", 0)) == ((4, 6), torch.bfloat16, [(0, 4)])
    assert torch.equal(stored.read("x", (1, 2), (3, 4)), whole[1:, 2:])
    assert torch.equal(stored.read("x"), whole)


def test_a_damaged_checkpoint(tmp_path: Path) -> None:
    """Always the file is named, also where torch gives no cause."""
    stored = save_stacked(tmp_path, x=torch.zeros(1000))
    (data,) = tmp_path.glob("*.distcp")
    whole = data.read_bytes()
    for size in (0, 100, 500, len(whole) - 1):
        data.write_bytes(whole[:size])
        with pytest.raises(BadInputError, match=rf"/{data.name}: cannot read x: the file is cut short$"):
            stored.read("x")
    data.write_bytes(b"?" * len(whole))
    with pytest.raises(BadInputError, match=rf"/{data.name}: cannot read x: .+"):
        stored.read("x")
    data.unlink()
    with pytest.raises(BadInputError, match=rf"/{data.name}: cannot read x: .*No such file"):
        stored.read("x")
    for text in (b"\x80\x04", b"", b"\x80\xff", pickle.dumps([])):
        (tmp_path / ".metadata").write_bytes(text)
        with pytest.raises(BadInputError, match=r"/\.metadata cannot be read: .+"):
            StoredTensors(tmp_path)


def test_which_torch_dist_checkpoint(tmp_path: Path) -> None:
    for name in ("iter_0000007", "release"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metadata.json").write_text("{}")
    (tmp_path / "iter_0000009").mkdir()  # not whole
    with pytest.raises(BadInputError, match=f"has no {LATEST} .*: name one in it: iter_0000007, release$"):
        torch_dist_to_hf.find_checkpoint(tmp_path)
    with pytest.raises(BadInputError, match="not a torch_dist checkpoint"):
        torch_dist_to_hf.find_checkpoint(tmp_path / "iter_0000009")
    for latest in ("7", "release"):
        (tmp_path / LATEST).write_text(latest)
        assert torch_dist_to_hf.find_checkpoint(tmp_path).name.endswith(latest)
    assert torch_dist_to_hf.find_checkpoint(tmp_path / "iter_0000007") == tmp_path / "iter_0000007"
    (tmp_path / LATEST).write_text("8")
    with pytest.raises(BadInputError, match="names iter_0000008"):
        torch_dist_to_hf.find_checkpoint(tmp_path)


@pytest.fixture
def torch_dist(models: Callable[[str], Path], tmp_path: Path) -> Path:
    """The qwen3_tied model as an unsharded checkpoint with a padded vocabulary, made by hand."""
    hf = load_file(models("qwen3_tied") / "model.safetensors")
    stacked: dict[str, list[torch.Tensor]] = {}
    for i in range(4):
        own = {name.removeprefix(f"model.layers.{i}."): t for name, t in hf.items() if f"layers.{i}." in name}
        q, k, v = (own[f"self_attn.{x}_proj.weight"].unflatten(0, (2, -1)) for x in "qkv")
        layer = {
            "self_attention.linear_qkv.weight": torch.cat([q, k, v], dim=1).flatten(0, 1),
            "self_attention.linear_qkv.layer_norm_weight": own["input_layernorm.weight"],
            "self_attention.linear_proj.weight": own["self_attn.o_proj.weight"],
            "self_attention.q_layernorm.weight": own["self_attn.q_norm.weight"],
            "self_attention.k_layernorm.weight": own["self_attn.k_norm.weight"],
            "mlp.linear_fc1.layer_norm_weight": own["post_attention_layernorm.weight"],
            "mlp.linear_fc1.weight": torch.cat([own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]]),
            "mlp.linear_fc2.weight": own["mlp.down_proj.weight"],
        }
        for name, tensor in layer.items():
            stacked.setdefault(f"decoder.layers.{name}", []).append(tensor)
    embedding = hf["model.embed_tokens.weight"]
    state = {name: torch.stack(parts) for name, parts in stacked.items()} | {
        "embedding.word_embeddings.weight": torch.cat([embedding, torch.zeros(5, 64)]),
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        "optimizer.state.exp_avg.decoder.final_layernorm.weight": torch.zeros(64),
    }
    directory = tmp_path / "iter_0000003"
    dcp.save(state, checkpoint_id=directory)
    (directory / "metadata.json").write_text("{}")
    return directory


def test_torch_dist_to_hf(
    torch_dist: Path, models: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In one file the same bytes; in several the same tensors, with an index; and everything that a model needs."""
    origin = models("qwen3_tied")
    (tmp_path / LATEST).write_text("3")
    words = ["--input-dir", tmp_path, "--origin-hf-dir", origin, "--output-dir"]
    assert torch_dist_tool.main([*map(str, words), str(tmp_path / "one")]) == 0
    assert f"reading {torch_dist}" in caplog.messages
    assert (tmp_path / "one/model.safetensors").read_bytes() == (origin / "model.safetensors").read_bytes()
    assert torch_dist_tool.main([*map(str, words), str(tmp_path / "many"), "--chunk-size", "100kB"]) == 0
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 5
    assert all(file.stat().st_size < 110_000 for file in files)
    assert stored_specs(tmp_path / "many") == stored_specs(origin)
    for file in files:
        with safe_open(file, "pt") as stored, safe_open(origin / "model.safetensors", "pt") as wanted:
            assert all(torch.equal(stored.get_tensor(name), wanted.get_tensor(name)) for name in list(stored.keys()))
    assert {path.name for path in origin.iterdir()} <= {path.name for path in (tmp_path / "one").iterdir()}
    assert not list(tmp_path.glob(".*"))


def test_rows_of_the_vocabulary(torch_dist: Path, models: Callable[[str], Path], tmp_path: Path) -> None:
    torch_dist_to_hf.convert(torch_dist, tmp_path / "out", models("qwen3_tied"), vocab_size=128, **SETTINGS)
    assert stored_specs(tmp_path / "out")["model.embed_tokens.weight"].shape == (128, 64)
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 128
    with pytest.raises(BadInputError, match="has 136 rows, fewer than the vocabulary of 200"):
        torch_dist_to_hf.convert(torch_dist, tmp_path / "more", models("qwen3_tied"), vocab_size=200, **SETTINGS)


def test_another_models_checkpoint(torch_dist: Path, models: Callable[[str], Path], tmp_path: Path) -> None:
    """Nothing is written, and --add-missing-from-origin-hf gives what is not there."""
    with pytest.raises(BadInputError, match=r"the checkpoint lacks lm_head\.weight; --add-missing"):
        torch_dist_to_hf.convert(torch_dist, tmp_path / "out", models("qwen3"), **SETTINGS)
    for add_missing in (False, True):
        with pytest.raises(BadInputError, match=r"has no place for: .*\.q_layernorm\.weight"):
            torch_dist_to_hf.convert(torch_dist, tmp_path / "out", models("qwen2"), add_missing=add_missing, **SETTINGS)
    short = tmp_path / "short"
    shutil.copytree(models("qwen3_tied"), short, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((short / "config.json").read_text())
    fewer = {"num_hidden_layers": config["num_hidden_layers"] - 1, "layer_types": config["layer_types"][:-1]}
    (short / "config.json").write_text(json.dumps({**config, **fewer}))
    with pytest.raises(BadInputError, match=r"has no place for: .*linear_fc1\.weight.*is it another model's\?"):
        torch_dist_to_hf.convert(torch_dist, tmp_path / "out", short, **SETTINGS)
    assert not list(tmp_path.glob("*out*"))
    torch_dist_to_hf.convert(torch_dist, tmp_path / "out", models("qwen3"), add_missing=True, **SETTINGS)
    written, origin = (load_file(d / "model.safetensors") for d in (tmp_path / "out", models("qwen3")))
    assert torch.equal(written["lm_head.weight"], origin["lm_head.weight"])
    assert not torch.equal(written["model.norm.weight"], origin["model.norm.weight"])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hidden_size": 48}, r"model\.embed_tokens\.weight is \[131, 64\], and .*/config\.json means \[131, 48\]"),
        ({"hidden_size": 96}, r"model\.embed_tokens\.weight is \[131, 64\], and .*/config\.json means \[131, 96\]"),
        ({"intermediate_size": 48}, r"gate_proj\.weight is \[\d+, 64\], and .*/config\.json means \[48, 64\]"),
        ({"num_attention_heads": 2}, "linear_qkv.weight .* numbers, and the model of config.json takes"),
        ({"num_key_value_heads": 1}, "linear_qkv.weight .* numbers, and the model of config.json takes"),
        ({"num_key_value_heads": 4}, "is it another model's"),
        ({"head_dim": 8}, "is it another model's"),
    ],
)
def test_an_origin_without_weights_of_another_width(
    torch_dist: Path, models: Callable[[str], Path], tmp_path: Path, change: dict[str, int], problem: str
) -> None:
    origin = tmp_path / "origin"
    shutil.copytree(models("qwen3_tied"), origin, ignore=shutil.ignore_patterns("*.safetensors"))
    torch_dist_to_hf.convert(torch_dist, tmp_path / "same", origin, **SETTINGS)
    config = json.loads((origin / "config.json").read_text())
    (origin / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(BadInputError, match=problem):
        torch_dist_to_hf.convert(torch_dist, tmp_path / "out", origin, **SETTINGS)
    assert not list(tmp_path.glob("*out*"))


def test_a_checkpoint_of_adapters(models: Callable[[str], Path], tmp_path: Path, capsys: Any) -> None:
    """Also where the origin has the model that they belong to."""
    adapters = tmp_path / "iter_0000000"
    name = "decoder.layers.0.self_attention.linear_proj.lora"
    dcp.save({f"{name}.a": torch.zeros(4, 64), f"{name}.b": torch.zeros(64, 4)}, checkpoint_id=adapters)
    (adapters / "metadata.json").write_text("{}")
    words = ["--input-dir", adapters, "--output-dir", tmp_path / "out", "--origin-hf-dir", models("qwen3")]
    for more in ([], ["--add-missing-from-origin-hf"]):
        assert torch_dist_tool.main([*map(str, words), *more]) == 2
        assert "holds low-rank adapters and no model: resume from it by --load" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [adapters.name]
