"""Checkpoints in float8 with scales for blocks: every part that is read, against the blocks multiplied one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slime.backends.megatron.weights.weights_io import write_hf
from slime.files.block_scaled import BlockScaled
from slime.files.hf_reader import HFWeights
from slime.models import family_of, hf_config, weight_shape
from slime.models.family import check_names
from slime.utils.errors import BadInputError
from tests.parallel import tiny
from tests.unit.test_tools import load

NUM_GPUS = 0
BLOCK = (24, 20)
"""No divisor of any width of the model."""
QUANTIZED = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}


def quantize(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Float8 values and the scales that they were divided by."""
    rows, columns = (-(-extent // size) for extent, size in zip(weight.shape, block, strict=True))
    values, scales = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            at = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            scales[i, j] = weight[at].abs().max() / 448.0
            values[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
    return values, scales


def dequantize(values: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Element by element: the value times the scale of the block that it lies in."""
    rows = torch.arange(values.size(0))[:, None] // block[0]
    columns = torch.arange(values.size(1))[None] // block[1]
    return values.to(torch.float32) * scales[rows, columns]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A directory in which all projections of the decoder's layers are quantized, and what it means, in float32."""
    directory = tmp_path_factory.mktemp("fp8")
    tiny.save("deepseek_v3", directory / "model")
    directory /= "model"
    stored, meant = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        stored[name] = meant[name] = tensor
        if tensor.dim() == 2 and "proj" in name:
            stored[name], stored[f"{name}_scale_inv"] = quantize(tensor.float(), BLOCK)
            meant[name] = dequantize(stored[name], stored[f"{name}_scale_inv"], BLOCK)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    change_config(directory, quantization_config=QUANTIZED)
    return directory, meant


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("rows", [(0, 300), (128, 256), (100, 131), (127, 128), (299, 300), (128, 128), (131, 131)])
@pytest.mark.parametrize("columns", [(0, 200), (30, 129), (128, 200)])
def test_any_part_is_exact(rows: tuple[int, int], columns: tuple[int, int]) -> None:
    block = (128, 128)
    values, scales = quantize(torch.randn(300, 200), block)
    part = (slice(*rows), slice(*columns))
    got = BlockScaled(values, scales, block)[part]
    assert got.dtype == torch.float32
    assert torch.equal(got, dequantize(values, scales, block)[part])
    assert torch.equal(BlockScaled(values, scales, block)[part[:1]], dequantize(values, scales, block)[part[0]])


def test_only_the_part_and_its_scales_are_read() -> None:
    class Recorder:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor, self.shape, self.read = tensor, tensor.shape, 0

        def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
            self.read += self.tensor[index].numel()
            return self.tensor[index]

    values, scales = (Recorder(x) for x in quantize(torch.randn(512, 512), (128, 128)))
    BlockScaled(values, scales, (128, 128))[100:140, 384:512]
    assert (values.read, scales.read) == (40 * 128, 2)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_shard_of_a_model_is_exact(checkpoint: tuple[Path, dict[str, Tensor]], size: int) -> None:
    directory, meant = checkpoint
    config = hf_config(directory)
    family, shape = family_of(config), weight_shape(config)
    quantized = 0
    with HFWeights(directory) as weights:
        check_names(family, shape, weights, directory, family.carried(config))
        for name in family.parameters(shape):
            row, _ = family.row(name)
            sources = family.sources(name, shape)
            local = list(meant[sources[0]].shape)
            if row.dim is not None:
                local[row.dim] = -(-sum(meant[s].shape[row.dim] for s in sources) // size)
            for rank in range(size):
                got = family.shard(name, weights.__getitem__, shape, local, rank)
                assert torch.equal(got, family.shard(name, meant.__getitem__, shape, local, rank)), name
            quantized += isinstance(weights[sources[0]], BlockScaled)
    assert quantized > 4 * 5


def test_what_is_written_is_not_quantized(checkpoint: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    directory, meant = checkpoint
    carried = family_of(hf_config(directory)).carried(hf_config(directory))
    trained = [(name, tensor.bfloat16()) for name, tensor in meant.items() if not name.startswith(carried)]
    write_hf([trained], tmp_path, directory)
    with HFWeights(tmp_path) as weights:
        assert sorted(weights.file_of) == sorted(meant)
        for name, tensor in meant.items():
            assert weights[name][:,].dtype == torch.bfloat16
            assert torch.equal(weights[name][:,], tensor.bfloat16()), name
    config = json.loads((tmp_path / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"


def test_a_copy_in_bfloat16(
    checkpoint: tuple[Path, dict[str, Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every tensor, those of carried layers too; what was not float8 stays as it is."""
    directory, meant = checkpoint
    tool, original = load("convert_fp8_to_bf16"), load_file(directory / "model.safetensors")
    words = ["--model-dir", str(directory), "--save-dir", str(tmp_path / "copy")]
    assert tool.main([*words, "--chunk-size", "300kB"]) == 0
    assert len(list((tmp_path / "copy").glob("*.safetensors"))) > 1
    with HFWeights(tmp_path / "copy") as weights:
        assert sorted(weights.file_of) == sorted(meant)
        for name, tensor in meant.items():
            was_float8 = original[name].dtype == torch.float8_e4m3fn
            assert torch.equal(weights[name][:,], tensor.bfloat16() if was_float8 else tensor), name
            assert weights[name][:,].dtype == (torch.bfloat16 if was_float8 else tensor.dtype)
    assert "quantization_config" not in json.loads((tmp_path / "copy" / "config.json").read_text())
    assert tool.main(["--model-dir", str(tmp_path / "copy"), "--save-dir", str(tmp_path / "again")]) == 2
    assert "is not in float8: its config.json has no quantization_config" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "compressed-tensors"}, "quant_method 'compressed-tensors' and weight_block_size None is not"),
        ({"quant_method": "fp8", "weight_block_size": None}, "supported is fp8 with blocks"),
        (QUANTIZED | {"weight_block_size": [24, 64]}, r"scales for \[.*\] values in blocks of \[24, 64\]"),
        (None, "is in float8 and has no"),
    ],
)
def test_what_would_be_read_wrongly_is_refused(
    checkpoint: tuple[Path, dict[str, Tensor]], tmp_path: Path, quantization: Any, message: str
) -> None:
    directory, _ = checkpoint
    for path in directory.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    change_config(tmp_path, quantization_config=quantization)
    with pytest.raises(ValueError, match=message), HFWeights(tmp_path) as weights:
        weights["model.layers.0.self_attn.o_proj.weight"]


def test_a_damaged_file_is_named(checkpoint: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint[0] / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((checkpoint[0] / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(BadInputError, match=r"model\.safetensors is damaged: "):
        HFWeights(tmp_path)["model.norm.weight"]
