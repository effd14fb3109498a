"""Pushing weights in blocks of float8: the same bytes as a converted checkpoint, in the trainer's buckets."""

from __future__ import annotations

import contextlib
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slime.backends.megatron.weights import gather
from slime.backends.sglang import fixes as server_fixes
from slime.convert import fp8
from slime.files.block_scaled import SCALE_END
from slime.files.hf_reader import HFWeights
from slime.files.hf_writer import NamedTensors
from slime.models import family_of, hf_config, weight_shape
from slime.ray.train_actor import TrainActor
from slime.weights import EngineAddress
from slime.weights.equality import expected_names
from slime.weights.float8 import Float8Blocks
from slime.weights.hf_directory import HFDirectoryWriter
from tests.parallel import tiny

Buckets = Iterator[NamedTensors]

NUM_GPUS = 0

BLOCK = (24, 20)
"""No divisor of any width of the models."""
SETTINGS: dict[str, Any] = {"shard_bytes": 10**9, "workers": 1, "force": False}


@pytest.fixture(scope="module")
def origins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each kind a model, the same in bfloat16 as a trainer holds it, and that one converted to float8."""
    root = tmp_path_factory.mktemp("float8")
    for kind in ("qwen3_moe", "deepseek_v3"):
        made = tiny.model(kind).to(torch.bfloat16)
        made.save_pretrained(root / kind)
        tiny.add_next_token_layers(root / kind, made.config)
        fp8.convert(root / kind, root / f"{kind}_fp8", block=BLOCK, **SETTINGS)
    return root


def trained(directory: Path) -> dict[str, Tensor]:
    """What a trainer exports of a model."""
    config = hf_config(directory)
    carried = family_of(config).carried(config)
    stored = load_file(directory / "model.safetensors")
    return {name: tensor for name, tensor in stored.items() if not name.startswith(carried)}


def in_buckets(tensors: dict[str, Tensor], limit: int) -> Buckets:
    """As export gives them: one buffer a bucket."""
    bucket: NamedTensors = []
    for name, tensor in tensors.items():
        if bucket and size_of(bucket) + tensor.nbytes > limit:
            yield bucket
            bucket = []
        bucket.append((name, tensor))
    yield bucket


def size_of(bucket: NamedTensors) -> int:
    return sum(tensor.nbytes for _, tensor in bucket)


def same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_the_bytes_of_a_converted_checkpoint_are_pushed(kind: str, origins: Path) -> None:
    blocks, weights = Float8Blocks.of(origins / f"{kind}_fp8"), trained(origins / kind)
    assert blocks is not None
    expected = load_file(origins / f"{kind}_fp8" / "model.safetensors")
    before = list(in_buckets(weights, 20_000))
    after = list(blocks.quantised(iter(before)))
    assert len(before) > 5
    for old, new in zip(before, after, strict=True):
        names = []
        for name, _ in old:
            names += [name, name + SCALE_END] if name + SCALE_END in expected else [name]
        assert [name for name, _ in new] == names
        assert all(same(tensor, expected[name]) for name, tensor in new)
        assert size_of(new) <= size_of(old), "scales and all, a bucket stays within the limit"
    pushed = {name for bucket in after for name, _ in bucket}
    assert pushed == expected_names(origins / f"{kind}_fp8")
    assert sum(name.endswith(SCALE_END) for name in pushed) > 20


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_without_weights_config_json_says_which(kind: str, origins: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((origins / f"{kind}_fp8" / "config.json").read_bytes())
    blocks, stored = Float8Blocks.of(tmp_path), Float8Blocks.of(origins / f"{kind}_fp8")
    assert stored is not None
    assert blocks is not None
    assert blocks.names is None
    weights = trained(origins / kind)
    assert {n for n, t in weights.items() if blocks.has(n, t)} == {n for n, t in weights.items() if stored.has(n, t)}
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= {"modules_to_not_convert": ["model.layers.0", "self_attn.o_proj", "lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    blocks = Float8Blocks.of(tmp_path)
    assert blocks is not None
    found = {name for name, tensor in weights.items() if blocks.has(name, tensor)}
    assert found == {n for n in weights if stored.has(n, weights[n]) and ".layers.0." not in n and "o_proj" not in n}
    assert not blocks.has("base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight", torch.ones(2, 2))


def test_other_checkpoints(origins: Path, tmp_path: Path) -> None:
    assert Float8Blocks.of(origins / "qwen3_moe") is None
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(ValueError, match="quant_method 'awq'"):
        Float8Blocks.of(tmp_path)


def test_what_is_written_for_engines_is_a_checkpoint_in_float8(origins: Path, tmp_path: Path) -> None:
    """The directory of the disk transport, and of --check-weight-update-equal."""
    origin = origins / "qwen3_moe_fp8"
    blocks, weights = Float8Blocks.of(origin), trained(origins / "qwen3_moe")
    assert blocks is not None
    args = Namespace(run_dir=str(tmp_path), update_weight_disk_dir=None, hf_checkpoint=str(origin))
    writer = HFDirectoryWriter(args, "version")
    for bucket in blocks.quantised(in_buckets(weights, 20_000)):
        writer.add(bucket)
    directory = writer.commit()
    assert (directory / "config.json").read_bytes() == (origin / "config.json").read_bytes()
    assert Float8Blocks.of(directory) == blocks
    with HFWeights(directory) as found, HFWeights(origin) as wanted:
        assert set(found) == set(wanted)
        assert all(torch.equal(found[name][:,], wanted[name][:,]) for name in wanted)


@pytest.mark.parametrize("own_experts", [False, True])
def test_a_training_rank_pushes_what_its_engines_hold(own_experts: bool, origins: Path) -> None:
    """In float8 too, and with its own experts alone all of them once more for the check."""
    published: list[str] = []
    checked: list[str] = []

    class Publisher:
        def publish(
            self, version: int, buckets: Buckets, engines: list[EngineAddress], whole: Buckets | None
        ) -> dict[str, float]:
            published.extend(name for bucket in buckets for name, _ in bucket)
            checked.extend(name for bucket in whole or () for name, _ in bucket)
            return {"paused_seconds": 1.0, "bytes": 1.0}

    weights = trained(origins / "qwen3_moe")

    def export_buckets(version: int, *, own_experts: bool) -> Buckets:
        pushed = {name: tensor for name, tensor in weights.items() if not own_experts or ".experts.0." not in name}
        return in_buckets(pushed, 20_000)

    for checkpoint in ("qwen3_moe", "qwen3_moe_fp8"):
        names = set(weights) if checkpoint == "qwen3_moe" else expected_names(origins / checkpoint)
        actor = object.__new__(TrainActor)
        actor._trainer = Namespace(export_buckets=export_buckets, pushing=contextlib.nullcontext)
        actor._publisher = Publisher()
        actor._float8 = Float8Blocks.of(origins / checkpoint)
        actor._args = Namespace(
            **{"check_weight_update_equal": True, "update_weight_transport": "tensor", "lora_sync": "merged"},
            **{"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
            sglang_ep_size=2 if own_experts else 1,
        )
        published.clear()
        checked.clear()
        actor.publish(1, [EngineAddress("http://e", 2)], "group")
        own = {name for name in names if not own_experts or ".experts.0." not in name}
        assert sorted(published) == sorted(own)
        assert sorted(checked) == (sorted(names) if own_experts else [])


# ---- what goes together


def entries(config: Path) -> list[gather._Entry]:
    """Of the dense part of a model, as one rank has them."""
    family, shape = family_of(hf_config(config)), weight_shape(hf_config(config))
    owner = gather._Owner(False, 0, 0, torch.bfloat16)
    made = []
    for name in family.parameters(shape):
        row, index = family.row(name)
        if "mlp" in name:
            continue
        unit = (row.same_bucket, *map(str, index)) if row.same_bucket else (name,)
        made.append(gather._Entry(name, owner, (10, 10), ((name, (10, 10)),), in_order=True, unit=unit))
    return made


@pytest.mark.parametrize("limit", [1, 200, 500, 10**6])
def test_what_sglang_fuses_is_in_one_bucket_whatever_its_size(limit: int, origins: Path) -> None:
    made = entries(origins / "deepseek_v3")
    ordered = gather._by_unit(made)
    assert sorted(entry.name for entry in ordered) == sorted(entry.name for entry in made)
    buckets = list(gather._cut(ordered, limit))
    assert [entry for bucket in buckets for entry in bucket] == ordered
    pairs = 0
    for names in ([entry.name for entry in bucket] for bucket in buckets):
        halves = {name.replace("q_down", "kv_down") for name in names if "q_down" in name}
        assert halves == {name for name in names if "kv_down" in name}
        pairs += len(halves)
        assert len(names) * 200 <= max(limit, 200 if not halves else 400)
    assert pairs == 4
    assert gather._by_unit(made[:3]) == made[:3], "the order of the others stays"


# ---- where the engine makes another layout of what it was given


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """What SGLang says of its GPU, to be changed."""
    says = {"ue8m0": False, "marlin": False, "forced": False}
    deep_gemm = ModuleType("configurer")
    utils, fp8_utils = ModuleType("utils"), ModuleType("fp8_utils")
    deep_gemm.__getattr__ = lambda name: says["ue8m0"]  # type: ignore[method-assign,assignment]
    fp8_utils.can_auto_enable_marlin_fp8 = lambda: says["marlin"]  # type: ignore[attr-defined]
    utils.get_bool_env_var = lambda name: says["forced"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.deep_gemm_wrapper.configurer", deep_gemm)
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.quantization.fp8_utils", fp8_utils)
    monkeypatch.setitem(sys.modules, "sglang.srt.utils", utils)
    return says


AUTO = {"device": "cuda", "moe_runner_backend": "auto", "moe_a2a_backend": "none", "fp8_gemm_runner_backend": "auto"}


@pytest.mark.parametrize(
    ("host", "flags", "problem"),
    [
        (None, {"device": "cpu"}, "on a CPU packs them for AMX as it loads them; serve a copy in bfloat16"),
        ("marlin", {}, "for Marlin on GPUs before Ada"),
        ("forced", {}, "with SGLANG_FORCE_FP8_MARLIN; serve a copy in bfloat16"),
        (None, {"moe_runner_backend": "hpc_ops"}, "drop these flags"),
        (None, {"moe_a2a_backend": "megamoe"}, "drop these flags"),
        ("ue8m0", {}, "add --sglang-fp8-gemm-backend triton"),
        ("ue8m0", {"fp8_gemm_runner_backend": "deep_gemm"}, "add --sglang-fp8-gemm-backend triton"),
        ("ue8m0", {"fp8_gemm_runner_backend": "triton", "moe_runner_backend": "deep_gemm"}, "--sglang-moe-runner"),
        ("ue8m0", {"fp8_gemm_runner_backend": "triton", "moe_a2a_backend": "deepep"}, "--sglang-moe-runner"),
    ],
)
def test_engines_that_repack_are_refused(
    host: str | None, flags: dict[str, str], problem: str, sglang: dict[str, bool]
) -> None:
    if host is not None:
        sglang[host] = True
    with pytest.raises(SystemExit) as stop:
        server_fixes.refuse_other_layouts(Namespace(**AUTO | flags))
    message = str(stop.value)
    assert message.startswith("--hf-checkpoint is in float8, and its weights are pushed: ")
    assert problem in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("host", "flags"),
    [
        (None, {}),
        (None, {"fp8_gemm_runner_backend": "deep_gemm", "moe_a2a_backend": "deepep"}),
        ("ue8m0", {"fp8_gemm_runner_backend": "triton"}),
    ],
)
def test_engines_that_keep_the_layout_are_not(host: str | None, flags: dict[str, str], sglang: dict[str, bool]) -> None:
    if host is not None:
        sglang[host] = True
    server_fixes.refuse_other_layouts(Namespace(**AUTO | flags))
