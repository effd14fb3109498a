"""Level 4: what is this architecture's own, against transformers and through files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime.data import Sample
from slime.data import Status as SampleStatus
from slime.files.safe_dump import load_safe, save_safe
from slime.models import hf_config
from tools.validation.launches import Run
from tools.validation.report import Check, Item, Status, checked
from tools.validation.setting import Setting
from tools.validation.smoke import step_checks
from tools.validation.weights import differences, not_finite

_SAMPLES, _PROMPT, _RESPONSE = 32, 8, 24
_LARGEST_PARAMETERS = 4e9
"""Of models that transformers computes in float32 on the host."""
_NOT_TRAINED = "e_score_correction_bias"
"""What routers add to scores is moved by the load of the experts, not by gradients."""


def check(setting: Setting) -> list[Item]:
    """What the model has, log-probs and training of every tensor, and checkpoints there and back."""
    return [*_forward_and_step(setting), _round_trip(setting), *_not_exercised(setting)]


def features(setting: Setting) -> str:
    """The architecture's options, in words."""
    shape, config = setting.shape, setting.config
    heads, groups = shape["num_attention_heads"], shape["num_query_groups"]
    attention = "latent attention" if shape["multi_latent_attention"] else f"{heads} heads, {groups} groups"
    found = [type(config).__name__.removesuffix("Config"), f"{shape['num_layers']} layers", attention]
    if shape["num_experts"]:
        found.append(f"{shape['num_experts']} experts, {shape['moe_router_topk']} a token")
    names = {
        "moe_shared_expert_intermediate_size": "shared experts",
        "moe_router_enable_expert_bias": "router with biases",
        "qk_layernorm": "query and key norms",
        "add_qkv_bias": "biases of query, key and value",
        "post_self_attn_layernorm": "norms after attention and MLP",
    }
    found += [text for name, text in names.items() if shape.get(name)]
    untied = shape["untie_embeddings_and_output_weights"]
    return ", ".join([*found, "untied embeddings" if untied else "tied embeddings"])


def _forward_and_step(setting: Setting) -> list[Item]:
    """One step of train.py on random tokens, whose log-probs it writes, and the model after it."""
    name = "level_4_step"
    directory = setting.launcher.directory(name)
    samples = random_samples(setting.shape["vocab_size"], setting.seed)
    save_safe(directory / "samples_0.pt", {"rollout_id": 0, "samples": [s.to_dict() for s in samples]}, name)
    words = ["--debug-train-only", "--load-debug-rollout-data", str(directory / "samples_{rollout_id}.pt")]
    words += ["--save-debug-train-data", str(directory / "trained_{rollout_id}_{rank}.pt")]
    words += ["--save-hf", str(directory / "hf"), "--advantage-estimator", "grpo", "--rm-type", "random"]
    words += ["--input-key", "prompt", "--label-key", "label", "--apply-chat-template", "--entropy-coef", "0.01"]
    words += ["--n-samples-per-prompt", "4", "--actor-num-gpus-per-node", "1", "--lr", "1.0"]
    run = setting.launcher.train(name, [*setting.common("train", 1, _SAMPLES // 4), *words, *setting.flags])
    parts = ("log-probs against transformers", "every tensor is trained")
    if not run.ok:
        return [Item(parts[0], Status.FAIL, run.why(), run.log)]
    return [_log_probs(setting, run, samples, parts[0]), _all_trained(setting, run, parts[1])]


def random_samples(vocab_size: int, seed: int) -> list[Sample]:
    """Rollouts of random tokens, as if an engine had made them; each half of a group has another reward."""
    generator = np.random.default_rng(seed)
    length = _PROMPT + _RESPONSE
    return [
        Sample(
            group_index=index // 4,
            index=index,
            rollout_id=index,
            prompt="",
            tokens=generator.integers(0, vocab_size, length).tolist(),
            response_length=_RESPONSE,
            loss_mask=[1] * _RESPONSE,
            rollout_log_probs=[0.0] * _RESPONSE,
            reward=float(index % 2),
            label="0",
            status=SampleStatus.COMPLETED,
        )
        for index in range(_SAMPLES)
    ]


def _log_probs(setting: Setting, run: Run, samples: list[Sample], part: str) -> Item:
    parameters = sum(int(np.prod(shape)) for shape in _shapes(setting.model).values())
    if parameters > _LARGEST_PARAMETERS:
        reason = f"{parameters / 1e9:.1f} G parameters are too many for transformers in float32 on the host"
        return Item(part, Status.SKIPPED, reason, left_out=True)
    if getattr(setting.config, "quantization_config", None):
        return Item(part, Status.SKIPPED, "transformers needs a GPU's kernels for the quantized weights", left_out=True)
    data = load_safe(run.directory / "trained_0_0.pt", part)["samples"]
    expected = _by_transformers(setting.model, samples)
    apart = [
        (row.float() - expected[index]).abs()
        for index, row in zip(data["sample_indices"], data["log_probs"], strict=True)
    ]
    gaps = torch.cat(apart)
    # A router's near tie may be broken otherwise in bfloat16: of single tokens only float32 has to be right.
    mean, largest, limit = float(gaps.mean()), float(gaps.max()), setting.tolerance.transformers
    checks = [
        Check(f"{gaps.numel()} random tokens, mean difference {mean:.1e} (at most {limit:g})", mean <= limit),
        Check(f"of {len(apart)} of {_SAMPLES} sequences", len(apart) == _SAMPLES),
    ]
    if setting.dtype == "float32":
        checks.append(Check(f"largest {largest:.1e} (at most {10 * limit:g})", largest <= 10 * limit))
    return checked(part, checks, run.log)


@torch.no_grad()
def _by_transformers(directory: Path, samples: list[Sample]) -> list[torch.Tensor]:
    """float32 log-probs of the samples' responses."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, config=hf_config(directory), dtype=torch.float32).eval()
    tokens = torch.tensor([sample.tokens for sample in samples])
    found = []
    for row in tokens:
        logits = model(row[None]).logits[0, _PROMPT - 1 : -1].float()
        found.append(logits.log_softmax(-1).gather(-1, row[_PROMPT:, None])[:, 0])
    return found


def _all_trained(setting: Setting, run: Run, part: str) -> Item:
    """Adam's first step moves every weight that has a gradient by the learning rate, which no rounding hides."""
    export = run.directory / "hf"
    changed, strange = differences(setting.model, export), not_finite(export)
    trained = {name: apart for name, apart in changed.items() if not _carried(setting, name)}
    experts = {name for name in trained if ".experts." in name}
    still = sorted(name for name, apart in trained.items() if apart == 0 and name not in experts)
    lost = sorted(name for name, apart in trained.items() if apart == float("inf") and name not in strange)
    used = sum(0 < trained[name] < float("inf") for name in experts)
    moved = sum(0 < apart < float("inf") for name, apart in trained.items() if name not in experts)
    checks = [
        Check(f"{moved} of {len(trained) - len(experts)} tensors moved{_some(still)}", not still and moved > 0),
        Check(f"no tensor is lost or new in the export{_some(lost)}", not lost),
        Check(f"every tensor of the export is finite{_some(strange)}", not strange),
    ]
    if experts:
        checks.append(
            Check(f"{used} of {len(experts)} tensors of experts, who see the tokens routed to them", used > 0)
        )
    return checked(part, [*checks, *step_checks(run, 1)], run.log)


def _carried(setting: Setting, name: str) -> bool:
    """Whether a tensor is copied, and not a parameter that gradients train."""
    return name.startswith(setting.family.carried(setting.config)) or name.endswith(_NOT_TRAINED)


def _some(names: list[str]) -> str:
    return f" (not: {', '.join(names[:4])}{' and more' if len(names) > 4 else ''})" if names else ""


def _round_trip(setting: Setting) -> Item:
    """The conversion tools: every tensor comes back with the values that it had."""
    part = "Hugging Face to torch_dist and back"
    stored = setting.launcher.directory("level_4_to_torch_dist") / "checkpoint"
    words = ["--hf-checkpoint", str(setting.model), "--save", str(stored)]
    run = setting.launcher.run("level_4_to_torch_dist", "tools/convert_hf_to_torch_dist.py", words)
    if not run.ok:
        return Item(part, Status.FAIL, run.why(), run.log)
    back = setting.launcher.directory("level_4_to_hf") / "hf"
    words = ["--input-dir", str(stored), "--output-dir", str(back), "--origin-hf-dir", str(setting.model)]
    if _needs_origin(setting):
        words.append("--add-missing-from-origin-hf")
    run = setting.launcher.run("level_4_to_hf", "tools/convert_torch_dist_to_hf.py", words)
    if not run.ok:
        return Item(part, Status.FAIL, run.why(), run.log)
    found = differences(setting.model, back)
    wrong = sorted(name for name, apart in found.items() if apart)
    shutil.rmtree(stored)
    return checked(
        part, [Check(f"{len(found) - len(wrong)} of {len(found)} tensors equal{_some(wrong)}", not wrong)], run.log
    )


def _needs_origin(setting: Setting) -> bool:
    prefixes = setting.family.carried(setting.config)
    return bool(prefixes) and any(name.startswith(prefixes) for name in _shapes(setting.model))


def _shapes(directory: Path) -> dict[str, Any]:
    from slime.files.hf_reader import HFWeights

    with HFWeights(directory) as weights:
        return {name: weights[name].shape for name in weights}


def _not_exercised(setting: Setting) -> list[Item]:
    """Options of the config that nothing here computes."""
    items = []
    if getattr(setting.config, "num_nextn_predict_layers", None):
        text = "MTP heads are carried through files; no level trains or generates with them"
        items.append(Item("multi-token prediction", Status.SKIPPED, text))
    if getattr(setting.config, "quantization_config", None):
        text = "trainers dequantise weights as they read them; engines on GPUs alone compute in the quantized type"
        items.append(Item("quantized weights", Status.SKIPPED, text))
    return items
