"""HF -> torch_dist -> HF gives the same files, and train.py's loader reads what lies between."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM

from slime.convert import dcp_to_hf, fp8, torch_dist_to_hf
from slime.convert.hf_files import stored_specs
from slime.convert.stored import StoredTensors
from slime.files.checkpoints import LATEST, has_checkpoint
from tests.parallel import lora_reference, tiny
from tests.parallel.conftest import ROOT, torchrun
from tests.ranks import run_ranks

NUM_GPUS = 0

KINDS = [
    *("qwen2", "mimo", "qwen3", "qwen3_tied", "llama", "qwen3_moe", "glm4", "glm4_tied"),
    *("glm4_moe", "glm4_moe_lite", "deepseek_v3", "moonlight"),
]
FLOAT8 = "deepseek_v3_fp8"
TOOL, BACK = (ROOT / "tools" / f"convert_{name}.py" for name in ("hf_to_torch_dist", "torch_dist_to_hf"))
SETTINGS: dict[str, Any] = {"shard_bytes": 2**30, "workers": 2, "force": False}
DEADLINE = 600.0
"""Seconds for one program."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, models: Callable[[str], Path]) -> Path:
    """What two ranks made of all models; they have loaded it too, and compared weights and logits."""
    directory = tmp_path_factory.mktemp("converted")
    float8 = directory / "origins" / FLOAT8
    fp8.convert(models("deepseek_v3"), float8, block=(24, 20), **SETTINGS)
    torchrun(2, "convert_worker.py", directory, *(models(kind) for kind in KINDS), float8, log=directory / "log")
    return directory


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(kind: str, work: Path, models: Callable[[str], Path], tmp_path: Path) -> None:
    model, output = models(kind), tmp_path / "hf"
    for rank in range(2):
        logits, _, base = json.loads((work / f"rank{rank}.json").read_text())[kind]
        assert logits < 1e-4
        assert base == lora_reference.fingerprint(model)
    assert (work / kind / LATEST).read_text() == "release"
    torch_dist_to_hf.convert(work / kind, output, model, **SETTINGS)
    for file in ("model.safetensors", "config.json", "generation_config.json"):
        assert (output / file).read_bytes() == (model / file).read_bytes()
    assert len(list(output.iterdir())) == 3


def test_there_and_back_from_float8(work: Path, tmp_path: Path) -> None:
    """Which gives the same as multiplying it out does, layers that are not trained included."""
    float8, output, copy = work / "origins" / FLOAT8, tmp_path / "hf", tmp_path / "copy"
    torch_dist_to_hf.convert(work / FLOAT8, output, float8, **SETTINGS)
    fp8.convert_to_bf16(float8, copy, **SETTINGS)
    for file in ("model.safetensors", "config.json"):
        assert (output / file).read_bytes() == (copy / file).read_bytes()
    assert {spec.dtype for spec in stored_specs(output).values()} == {torch.bfloat16, torch.float32}


def test_both_ranks_write_about_as_much(work: Path) -> None:
    sizes = [sum(f.stat().st_size for f in (work / "qwen3" / "release").glob(f"__{rank}_*")) for rank in range(2)]
    assert max(sizes) < 1.2 * min(sizes)


def test_experts_are_stored_one_by_one(work: Path) -> None:
    """So that neither way holds all experts of a layer at once."""
    stored = StoredTensors(work / "qwen3_moe" / "release")
    assert stored.cuts("decoder.layers.0.mlp.experts.experts.linear_fc2.weight", 0) == [(i, i + 1) for i in range(4)]


DIES = """
import os, signal
from slime.backends.megatron import hf_to_torch_dist
read, calls = hf_to_torch_dist._Reader.read, []
def dying(self, part):
    calls.append(part)
    if len(calls) == 5:
        os.kill(os.getpid(), {number})
    return read(self, part)
hf_to_torch_dist._Reader.read = dying
from tools import convert_hf_to_torch_dist
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
raise SystemExit(convert_hf_to_torch_dist.main())
"""


def program(*words: str | Path, tool: Path = TOOL, code: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the tool, or Python code in its place."""
    command = [sys.executable, *((str(tool),) if code is None else ("-c", code)), *map(str, words)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE)


@pytest.mark.full
def test_the_program(models: Callable[[str], Path], tmp_path: Path) -> None:
    """Killed in the middle it leaves nothing that train.py takes; then it does its work, and refuses to do it again."""
    model, save = models("qwen3"), tmp_path / "torch_dist"
    words = ("--num-layers", "4", "--swiglu", "--tensor-model-parallel-size", "2", "--hf-checkpoint", model)
    killed = program(*words, "--save", save, code=DIES.format(number=int(signal.SIGKILL)))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not has_checkpoint(save)
    assert [path.name for path in save.iterdir()] == [".release.tmp"]
    done = program(*words, "--save", save)
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()  # nothing of Megatron's own
    assert "100 %" in line
    assert done.stdout == f"convert_hf_to_torch_dist.py: wrote {save}\n"
    assert sorted(path.name for path in save.iterdir()) == [LATEST, "release"]
    for extra, problem in (
        ((), "holds a checkpoint already; pass --force to replace it"),
        (("--num-layers", "5"), "--num-layers is 5, config.json means 4"),
    ):
        refused = program(*words, "--save", save, *extra)
        assert refused.returncode == 2
        assert problem in refused.stderr
    assert program(*words, "--save", save, "--force").returncode == 0


@pytest.mark.full
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """There by a program of two ranks, and back by two threads: what they hold at most of many times as many layers."""
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2}
    peaks: list[list[float]] = []
    for layers in (2, 32):
        model, saved, output, log = (tmp_path / f"{name}{layers}" for name in ("hf", "torch_dist", "back", "log"))
        config = AutoConfig.for_model("qwen3", vocab_size=131, num_hidden_layers=layers, head_dim=64, **shape)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(model)
        torchrun(2, TOOL, "--hf-checkpoint", model, "--save", saved, log=log)
        words = ("--input-dir", saved, "--output-dir", output, "--origin-hf-dir", model, "--workers", "2")
        back = program(*words, tool=BACK)
        assert (output / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes(), back.stderr
        held = [re.findall(r"at most ([\d.]+) ([GM])iB of memory", text) for text in (log.read_text(), back.stderr)]
        peaks.append([float(figure) / {"G": 1, "M": 2**10}[unit] for ((figure, unit),) in held])
    few, many = peaks
    more = (output / "model.safetensors").stat().st_size / 2**30  # each rank writes half of it
    assert max(b - a for a, b in zip(few, many, strict=True)) < more / 5, (peaks, more)


@pytest.mark.full
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_program_leaves_nothing(
    number: int, status: int, models: Callable[[str], Path], tmp_path: Path
) -> None:
    words = ("--hf-checkpoint", models("qwen3"), "--save", tmp_path / "new" / "torch_dist")
    done = program(*words, code=DIES.format(number=int(number)))
    assert (done.returncode, done.stderr) == (status, "convert_hf_to_torch_dist.py: interrupted\n")
    assert not list(tmp_path.iterdir())


SGLANG_READS = """
import json, sys
import torch
from pathlib import Path
from safetensors.torch import load_file
from slime.backends.sglang import patches
patches.install()
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant
from sglang.srt.layers.quantization.utils import is_layer_skipped
origin, quantised = (load_file(Path(path, "model.safetensors")) for path in sys.argv[1:])
config = Fp8Config.from_config(json.loads(Path(sys.argv[2], "config.json").read_text())["quantization_config"])
assert config.is_checkpoint_fp8_serialized and config.activation_scheme == "dynamic"
for name, tensor in quantised.items():
    if not name.endswith(".weight") or tensor.dim() < 2 or "embed" in name:
        continue
    skipped = is_layer_skipped(name.removesuffix(".weight"), config.ignored_layers, config.packed_modules_mapping)
    assert skipped == (tensor.dtype != torch.float8_e4m3fn), name
    if not skipped:
        scales = quantised[name + "_scale_inv"]
        restored = block_quant_dequant(tensor, scales, config.weight_block_size, torch.float32)
        assert torch.allclose(restored, origin[name], rtol=1 / 16, atol=float(scales.max()) * 2**-10), name
"""


@pytest.mark.full
def test_sglang_reads_fp8(models: Callable[[str], Path], tmp_path: Path) -> None:
    """What it takes from config.json, and what its own function makes of values and scales."""
    model = models("qwen3_moe")
    fp8.convert(model, tmp_path / "fp8", block=(128, 128), **SETTINGS)
    done = program(model, tmp_path / "fp8", code=SGLANG_READS)
    assert done.returncode == 0, done.stderr


def _save_sharded(rank: int, target: str) -> None:
    """As FSDP2 does: every rank has some rows of each tensor."""
    Path(target).parent.mkdir(exist_ok=True)
    dist.init_process_group("gloo", init_method=f"file://{target}.rendezvous", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    tensors = {n: distribute_tensor(t, mesh, [Shard(0)]) for n, t in tiny.model("qwen3_moe").state_dict().items()}
    dcp.save({"model_state": {"model": tensors}, "optim_state": {"step": torch.tensor(1)}}, checkpoint_id=target)
    dist.destroy_process_group()


@pytest.mark.full
def test_tensors_that_ranks_hold_parts_of(models: Callable[[str], Path], tmp_path: Path) -> None:
    model, output = models("qwen3_moe"), tmp_path / "hf"
    run_ranks(_save_sharded, (str(tmp_path / "iter_1" / "model"),), 2)
    dcp_to_hf.convert(tmp_path / "iter_1", output, model, **SETTINGS)
    assert (output / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
