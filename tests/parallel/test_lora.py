"""Adapters under every layout: outputs, gradients, merged weights and PEFT files as PEFT has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from tests.parallel import lora_reference, plain, rollouts, tiny
from tests.parallel.cases import CASES as RUNS
from tests.parallel.conftest import run_worker
from tests.parallel.outcome import metric_error
from tests.parallel.test_trainer import check_reload, check_resume, metrics_of

NUM_GPUS = 0

DENSE, MOE, GLM = ["qwen2", "qwen3"], ["qwen3_moe"], ["glm4", "glm4_moe"]
LATENT = ["deepseek_v3", "deepseek_v3_dense", "glm4_moe_lite", "moonlight"]
SOME = ("q_proj", "v_proj", "up_proj")
SOME_LATENT = ("q_proj", "q_a_proj", "kv_b_proj", "shared_experts.up_proj", "mlp.down_proj")
ALL_LATENT = (*lora_reference.LATENT, *lora_reference.MLP)
TP, PP, CP, EP = (f"{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context", "expert_model"))
VPP, SP, ETP = "virtual_pipeline_model_parallel_size", "sequence_parallel", "expert_tensor_parallel_size"
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
full = pytest.mark.full

CASES = [
    pytest.param(2, {TP: 2, SP: True, ETP: 1, **RECOMPUTE}, DENSE + MOE, lora_reference.LINEAR, id="tp2-sp-recompute"),
    pytest.param(2, {EP: 2}, MOE, lora_reference.LINEAR, id="ep2"),
    pytest.param(2, {TP: 2, SP: True, EP: 2, ETP: 1}, ["deepseek_v3", "moonlight"], ALL_LATENT, id="tp2-ep2-latent"),
    pytest.param(1, {}, LATENT, ALL_LATENT, id="single-latent", marks=full),
    pytest.param(1, {}, LATENT, lora_reference.LATENT, id="single-latent-attention", marks=full),
    pytest.param(2, {TP: 2, SP: True}, LATENT, lora_reference.LATENT, id="tp2-sp-latent-attention", marks=full),
    pytest.param(2, {TP: 2}, ["deepseek_v3_dense"], lora_reference.LATENT, id="tp2-latent-attention", marks=full),
    pytest.param(2, {TP: 2, SP: True, ETP: 1, **RECOMPUTE}, LATENT, SOME_LATENT, id="tp2-sp-latent-some", marks=full),
    pytest.param(2, {EP: 2}, LATENT, ALL_LATENT, id="ep2-latent", marks=full),
    pytest.param(2, {PP: 2}, LATENT, ALL_LATENT, id="pp2-latent", marks=full),
    pytest.param(2, {CP: 2}, LATENT, ALL_LATENT, id="cp2-latent", marks=full),
    pytest.param(1, {}, [*DENSE, *MOE, "llama"], lora_reference.LINEAR, id="single", marks=full),
    pytest.param(2, {TP: 2, ETP: 1}, DENSE, SOME, id="tp2-some", marks=full),
    pytest.param(2, {TP: 2, SP: True, ETP: 1}, GLM, (*lora_reference.LINEAR, "gate_up_proj"), id="tp2-glm", marks=full),
    pytest.param(4, {TP: 4, SP: True}, DENSE, SOME, id="tp4-sp-some", marks=full),
    pytest.param(2, {PP: 2, VPP: 2}, DENSE + MOE, SOME, id="pp2-vpp2-some", marks=full),
    pytest.param(2, {CP: 2}, DENSE + MOE, lora_reference.LINEAR, id="cp2", marks=full),
    pytest.param(2, {}, DENSE + MOE, lora_reference.LINEAR, id="dp2", marks=full),
    pytest.param(4, {TP: 2, SP: True, EP: 2, ETP: 1, PP: 2}, MOE, lora_reference.LINEAR, id="tp2-pp2-ep2", marks=full),
]


@pytest.fixture(scope="session")
def first_weights() -> dict[str, float]:
    """Of every kind's adapters before any training, summed up: the same under every layout."""
    return {}


@pytest.mark.parametrize(("ranks", "layout", "kinds", "targets"), CASES)
def test_layout(
    tmp_path: Path, models: Callable[[str], Path], first_weights: dict[str, float], ranks: int, layout: dict[str, Any],
    kinds: list[str], targets: tuple[str, ...],
) -> None:  # fmt: skip
    paths: list[Path] = []
    for kind in kinds:
        paths += [models(kind), tmp_path / kind]
        lora_reference.save(kind, models(kind), tmp_path / kind, targets)
    run_worker(ranks, "lora_worker.py", json.dumps(layout), tmp_path, ",".join(targets), *paths, log=tmp_path / "log")
    for rank in range(ranks):
        for kind, report in json.loads((tmp_path / f"rank{rank}.json").read_text()).items():
            assert report["adapters"] == 0.0, kind
            assert report["merged"] < 1e-6, kind
            assert report["base"] == lora_reference.fingerprint(models(kind)), "it has no adapters, nor a layout"
            assert report["logits"] < 1e-4, kind
            assert report["gradients"] < 1e-5, kind
            known = first_weights.setdefault(f"{kind} {targets}", report["first"])
            assert report["first"] == pytest.approx(known, rel=1e-12), "initial weights depend on no layout"
    for kind in kinds:
        if lora_reference.is_for_peft(models(kind), tmp_path / kind):
            assert lora_reference.saved_error(models(kind), tmp_path / kind) < 1e-4, kind


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "run"), [("qwen3", "lora"), ("deepseek_v3_dense", "lora_latent"), ("moonlight", "lora_latent")]
)
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(1, {}, id="one"),
        pytest.param(2, {TP: 2, SP: True}, id="tp2"),
        pytest.param(2, {"use_distributed_optimizer": True}, id="distopt"),
    ],
)
def test_steps_are_those_of_peft_and_adamw(
    tmp_path: Path, models: Callable[[str], Path], ranks: int, layout: dict[str, Any], kind: str, run: str
) -> None:
    """GRPO with a KL to the model without adapters, gradients clipped by their norm, on and off policy."""
    model, case = models(kind), RUNS[run]
    run_worker(ranks, "trainer_worker.py", model, tmp_path, tmp_path, json.dumps(layout), run, log=tmp_path / "log")
    first, last = (load_file(tmp_path / f"{name}.safetensors") for name in (f"{run}_first", run))
    args = rollouts.arguments(model, **case.options)
    wanted = plain.train(args, model, [(case.rows(i), case.steps) for i in range(case.rollouts)], adapters=first)
    metrics = metrics_of(tmp_path, run)
    assert len(metrics) == len(wanted.metrics) == case.rollouts * case.steps
    for got, known in zip(metrics, wanted.metrics, strict=True):
        assert {name for name in got if not name.startswith("perf/")} == set(known)
        for name, value in known.items():
            assert metric_error(name, got[name], value) < 1e-5, f"{name}: {got[name]} != {value}"
    assert min(step["train/grad_norm"] for step in metrics) > args.clip_grad, "every step clips"
    assert max(step["train/kl_loss"] for step in metrics) > 0
    moved = max(float((wanted.weights[name] - first[name]).abs().max()) for name in first)
    assert last.keys() == wanted.weights.keys()
    for name, tensor in last.items():
        assert float((tensor - wanted.weights[name]).abs().max()) < 1e-4 * moved, name


@pytest.mark.full
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_adapters_go_on_in_another_layout(tmp_path: Path, kind: str) -> None:
    """Exactly in the same one, and in others from what two tensor-parallel ranks saved."""
    adapters = {"lora_rank": 3, "lora_alpha": 6.0, "lora_target_modules": ["all-linear"]}
    adapters["use_distributed_optimizer"] = True
    model, saved = tmp_path / "model", tmp_path / "saved"
    tiny.model(kind).save_pretrained(model)
    first = {TP: 2, SP: True, ETP: 1}  # the gradient norm, which clips, counts every expert once
    runs = {saved: (2, first, "resume"), tmp_path / "one": (1, {}, "reload_other")}
    if kind == "qwen3":
        runs[tmp_path / "pp2"] = 2, {PP: 2}, "reload_other"
    for results, (ranks, layout, case) in runs.items():
        results.mkdir()
        options = json.dumps({**adapters, **layout})
        run_worker(ranks, "trainer_worker.py", model, results, saved, options, case, log=results / "log")
        if case == "reload_other":
            check_reload(results, saved)
    check_resume(saved, "resumed", exactly=True)
    held = FileSystemReader(saved / "checkpoint" / "iter_0000001").read_metadata().state_dict_metadata
    weights = [name for name in held if not name.startswith(("rng_state", "common_state"))]
    assert weights
    assert all(".lora." in name for name in weights), "what is frozen is in no checkpoint"
