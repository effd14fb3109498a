"""Hugging Face directories: what is read of them, what is written, and the errors of incomplete ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from slime.backends.megatron.weights.weights_io import write_hf
from slime.files.hf_reader import HFWeights
from slime.models import family_of, hf_config, weight_shape
from slime.models.family import check_names
from slime.utils.errors import BadInputError
from slime.weights.equality import expected_names
from tests.parallel import tiny

NUM_GPUS = 0


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "origin"
    tiny.model("qwen3_moe").save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def tensors_of(directory: Path) -> dict[str, Tensor]:
    with HFWeights(directory) as weights:
        return {name: weights[name][:,] for name in weights.file_of}


def check(names: list[str], directory: Path) -> None:
    config = tiny.config("qwen3_moe")
    check_names(family_of(config), weight_shape(config), names, directory)


def test_parts_of_a_tensor_are_read(model_dir: Path) -> None:
    with HFWeights(model_dir) as weights:
        name = "model.layers.0.self_attn.o_proj.weight"
        source = weights[name]
        assert list(source.shape) == [64, 96]
        whole = source[:,]
        assert torch.equal(source[:, 24:48], whole[:, 24:48])
        assert torch.equal(source[3:5,], whole[3:5])


def test_what_is_written_in_parts_loads(model_dir: Path, tmp_path: Path) -> None:
    tensors = tensors_of(model_dir)
    names = sorted(tensors)
    buckets = [[(name, tensors[name].bfloat16()) for name in names[i::3]] for i in range(3)]
    target = tmp_path / "target"
    target.mkdir()
    write_hf(buckets, target, model_dir)
    assert sorted(path.name for path in target.glob("*.safetensors")) == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.numel() * 2 for tensor in tensors.values())
    assert (target / "tokenizer.json").read_text() == "{}"
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    written = tensors_of(target)
    assert all(torch.equal(written[name], tensor.bfloat16()) for name, tensor in tensors.items())
    loaded = AutoModelForCausalLM.from_pretrained(target)
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.lm_head.weight, tensors["lm_head.weight"].bfloat16())


def test_missing_and_unexpected_tensors_are_listed(model_dir: Path) -> None:
    names = list(tensors_of(model_dir))
    check([*names, "model.rotary_emb.inv_freq"], model_dir)
    names.remove("model.layers.2.mlp.experts.3.up_proj.weight")
    with pytest.raises(ValueError, match=r"missing: model\.layers\.2\.mlp\.experts\.3\.up_proj\.weight; unexpected: q"):
        check([*names, "quantizer.scale"], model_dir)
    with pytest.raises(ValueError, match=r"missing: .* and 66 more"):
        check(names[:1], model_dir)


def test_nothing_is_expected_of_a_model_that_has_a_config_alone(tmp_path: Path) -> None:
    tiny.config("qwen3").save_pretrained(tmp_path)
    assert expected_names(tmp_path) == set()


def test_layers_that_are_not_trained_are_left_out_and_kept(tmp_path: Path) -> None:
    origin, target = tmp_path / "glm", tmp_path / "target"
    tiny.model("glm4_moe").save_pretrained(origin)
    config = tiny.config("glm4_moe")
    names = sorted(tensors_of(origin))
    tiny.add_next_token_layers(origin, config)
    kept = {name: tensor for name, tensor in tensors_of(origin).items() if name not in names}
    assert list(kept) == ["model.layers.4.eh_proj.weight", "model.layers.4.enorm.weight"]
    assert expected_names(origin) == set(names)
    target.mkdir()
    write_hf([[(name, torch.ones(3)) for name in names]], target, origin)
    written = tensors_of(target)
    assert sorted(written) == sorted([*names, *kept])
    for name, tensor in kept.items():
        assert written[name].dtype == torch.bfloat16
        assert torch.equal(written[name], tensor)
    family, shape = family_of(config), weight_shape(config)
    check_names(family, shape, written, origin, family.carried(config))
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.5\.enorm\.weight"):
        check_names(family, shape, [*written, "model.layers.5.enorm.weight"], origin, family.carried(config))
    config.num_nextn_predict_layers = 0
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.4\.eh_proj\.weight"):
        check_names(family, shape, written, origin, family.carried(config))


def test_a_directory_without_weights_has_none_to_keep(tmp_path: Path) -> None:
    origin, target = tmp_path / "config", tmp_path / "target"
    tiny.config("glm4_moe").save_pretrained(origin)
    target.mkdir()
    write_hf([[("a", torch.zeros(2))]], target, origin)
    assert list(tensors_of(target)) == ["a"]


def test_mimo_is_read_as_qwen2_and_keeps_its_further_layers(tmp_path: Path) -> None:
    origin, target = tmp_path / "mimo", tmp_path / "target"
    tiny.model("qwen2").save_pretrained(origin)
    values = json.loads((origin / "config.json").read_text())
    values |= {"model_type": "mimo", "attention_bias": True, "num_nextn_predict_layers": 1}
    values |= {"architectures": ["MiMoForCausalLM"], "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}}
    (origin / "config.json").write_text(json.dumps(values))
    config = hf_config(origin)
    assert type(config).__name__ == "Qwen2Config"
    trained = {name: tensor * 2 for name, tensor in tensors_of(origin).items()}
    tiny.add_next_token_layers(origin, config)
    kept = {name: tensor for name, tensor in tensors_of(origin).items() if name not in trained}
    assert list(kept) == ["model.mtp_layers.eh_proj.weight", "model.mtp_layers.enorm.weight"]
    target.mkdir()
    write_hf([list(trained.items())], target, origin)
    written = tensors_of(target)
    family, shape = family_of(config), weight_shape(config)
    check_names(family, shape, written, target, family.carried(config))
    assert written.keys() == {**trained, **kept}.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in {**trained, **kept}.items())
    assert json.loads((target / "config.json").read_text())["model_type"] == "mimo"
    with pytest.raises(ValueError, match=r"unexpected: model\.mtp_layers\.eh_proj\.weight"):
        check_names(family, shape, written, target)


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"is no model\.safetensors\.index\.json and no model\.safetensors in it"):
        HFWeights(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        BadInputError, match=r"two\.safetensors is not there, and model\.safetensors\.index\.json names it"
    ):
        HFWeights(tmp_path)
