"""MTP heads (MTP) under every layout: plain PyTorch's logits and gradients, and the same policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.convert import torch_dist_to_hf
from slime.convert.stored import StoredTensors
from tests.parallel import heads, rollouts
from tests.parallel.conftest import run_worker
from tests.ranks import run_ranks

NUM_GPUS = 0

TP, PP, CP, EP = (f"{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context", "expert_model"))
VPP, SP = "virtual_pipeline_model_parallel_size", "sequence_parallel"

BIASES = "e_score_correction_bias"
"""Of routers: they are not trained."""

full = pytest.mark.full

CASES = [
    pytest.param(2, {TP: 2, SP: True}, "mimo", id="tp2-sp"),
    pytest.param(1, {}, "mimo", id="single", marks=full),
    pytest.param(2, {TP: 2}, "mimo", id="tp2", marks=full),
    pytest.param(2, {PP: 2}, "mimo", id="pp2", marks=full),
    pytest.param(2, {PP: 2}, "mimo_tied", id="pp2-tied", marks=full),
    pytest.param(2, {PP: 2, VPP: 2}, "mimo", id="pp2-vpp2", marks=full),
    pytest.param(2, {CP: 2}, "mimo", id="cp2", marks=full),
    pytest.param(2, {}, "mimo", id="dp2", marks=full),
    pytest.param(2, {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
                 "mimo", id="overlap", marks=full),
    pytest.param(4, {TP: 2, PP: 2, SP: True}, "mimo", id="tp2-pp2", marks=full),
    *(pytest.param(ranks, layout, kind, id=f"{kind}-{name}", marks=full) for kind in ("glm4_moe", "deepseek_v3")
      for ranks, layout, name in (
          (1, {}, "single"), (2, {TP: 2, SP: True}, "tp2-sp"), (2, {PP: 2}, "pp2"), (2, {EP: 2}, "ep2"))),
    pytest.param(2, {CP: 2}, "deepseek_v3", id="deepseek_v3-cp2", marks=full),
    pytest.param(4, {CP: 2, TP: 2, SP: True}, "mimo", id="cp2-tp2-sp", marks=full),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "layout", "kind"), CASES)
def test_heads(ranks: int, layout: dict[str, Any], kind: str, tmp_path: Path) -> None:
    model_dir = tmp_path / kind
    heads.write_model(kind, model_dir)
    args = rollouts.arguments(model_dir, mtp_loss_scaling_factor=0.3)
    plain = heads.Plain(kind, model_dir)
    logits, losses = plain.train(args, rollouts.columns(0))
    wanted = {name: tensor for name, tensor in plain.gradients().items() if not name.endswith(BIASES)}
    save_file({name: tensor.contiguous() for name, tensor in logits.items()}, tmp_path / "plain.safetensors")
    run_worker(ranks, "heads_worker.py", kind, model_dir, tmp_path, json.dumps(layout), log=tmp_path / "log")
    reports = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    assert sum(report["compared"] for report in reports) > 100
    for report in reports:
        assert report["logits"] < 1e-4
        assert report["metrics"] == reports[0]["metrics"]
    metrics = reports[0]["metrics"]
    assert metrics["train/mtp_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    several = [value for name, value in metrics.items() if name.startswith("train/mtp_") and name != "train/mtp_loss"]
    assert several == pytest.approx(losses if len(losses) > 1 else [], rel=1e-5)
    gradients = load_file(tmp_path / "gradients.safetensors")
    assert gradients.keys() == wanted.keys()
    for name, tensor in gradients.items():
        assert (tensor - wanted[name]).abs().max() <= 1e-4 * wanted[name].abs().max(), name


@pytest.mark.full
@pytest.mark.parametrize("kind", ["mimo", "deepseek_v3"])
def test_there_and_back(kind: str, tmp_path: Path) -> None:
    """Conversion gives the same file, whether heads are converted or carried."""
    model_dir = tmp_path / kind
    heads.write_model(kind, model_dir)
    run_ranks(convert, (str(model_dir),), 1)
    for name in ("with", "without"):
        output = tmp_path / f"hf_{name}"
        torch_dist_to_hf.convert(tmp_path / name, output, model_dir, shard_bytes=2**30, workers=2, force=False)
        assert (output / "model.safetensors").read_bytes() == (model_dir / "model.safetensors").read_bytes()
    assert any(key.startswith("mtp.") for key in StoredTensors(tmp_path / "with" / "release"))
    assert not any(key.startswith("mtp.") for key in StoredTensors(tmp_path / "without" / "release"))


def convert(rank: int, model: str) -> None:
    """In a process of its own, because Megatron's shim is for the whole process."""
    from slime.backends.megatron import hf_to_torch_dist
    from slime.convert.arguments import parse_model_args

    from slime.backends.megatron import parallel  # isort: skip
    from slime.backends.megatron.weights import weights_io  # isort: skip
    from slime.backends.megatron.learner import load_weights
    from slime.backends.megatron.model import build_model

    model_dir = Path(model)
    with hf_to_torch_dist.joined_ranks():
        for name, flags in (("with", ["--enable-mtp-training"]), ("without", [])):
            save = model_dir.parent / name
            words = ["--hf-checkpoint", model, "--save", str(save), *flags]
            hf_to_torch_dist.convert(parse_model_args("", words), save)
        parallel.set_seeds(1)
        chunks, others = (build_model(rollouts.arguments(model_dir, enable_mtp_training=True)) for _ in range(2))
        weights_io.load_hf(chunks, model_dir)
        load_weights(others, str(model_dir.parent / "with"))
        wanted = dict(weights_io.global_weights(chunks))
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in weights_io.global_weights(others))
        with pytest.raises(ValueError, match="has no MTP heads, which --enable-mtp-training trains"):
            load_weights(others, str(model_dir.parent / "without"))
        deeper = build_model(rollouts.arguments(model_dir, num_layers=9, moe_layer_freq=1))
        with pytest.raises(ValueError, match=r"it has 9 layers, config\.json \d; .*it has also decoder\.layers\.\d"):
            weights_io.load_hf(deeper, model_dir)
