"""Adapters on a tiny Hugging Face model: what PEFT computes with them, and what follows from the merged matrices."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from slime.models import family_of, hf_config
from tests.parallel import tiny

RANK, ALPHA = 4, 6.0
MLP = ("gate_proj", "up_proj", "down_proj")
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", *MLP)
LATENT = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
"""Of latent attention; a model has ``q_proj``, or the two in its place."""
_PREFIX = "base_model.model."


def save(kind: str, base: Path, directory: Path, targets: tuple[str, ...]) -> None:
    """Write into ``directory``: ``adapter_model.safetensors`` with random adapters under PEFT's names, ``gradients``
    of them and ``reference`` (`tiny.save`) beside it, and the ``merged`` model.

    Where PEFT cannot have these adapters (`is_for_peft`), the gradients are by the chain rule, from the gradients of
    the merged matrices.
    """
    directory.mkdir()
    weights = load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(sum(map(ord, kind)))
    adapters = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if f".{module}".endswith(tuple(f".{target}" for target in targets)):
            outputs, inputs = weight.shape
            adapters[f"{_PREFIX}{module}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator) / 8
            adapters[f"{_PREFIX}{module}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator) / 8
    save_file(adapters, directory / "adapter_model.safetensors")
    merged = _merge(base, directory / "merged", weights, adapters)
    reference, gradients = _gradients(merged, lambda model: _by_chain_rule(model, directory, adapters))
    if is_for_peft(base, directory):
        peft = get_peft_model(
            AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
            LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(targets)),
        )
        own = dict(peft.named_parameters())
        with torch.no_grad():
            for name, tensor in adapters.items():
                own[name.replace(".weight", ".default.weight")].copy_(tensor)
        theirs, of_adapters = _gradients(
            peft, lambda _: {n: own[n.replace(".weight", ".default.weight")].grad for n in adapters}
        )
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, of_adapters[name], rtol=1e-3, atol=1e-3)
        known = AutoModelForCausalLM.from_pretrained(directory / "merged", dtype=torch.float32).state_dict()
        for name, tensor in peft.merge_and_unload().state_dict().items():
            torch.testing.assert_close(tensor, known[name])
        reference, gradients = theirs, of_adapters
    save_file({n: t.contiguous() for n, t in gradients.items()}, directory / "gradients.safetensors")
    save_file(reference, directory / "reference.safetensors")


def is_for_peft(base: Path, directory: Path) -> bool:
    """Whether PEFT can have the adapters in ``directory``.

    transformers 5 holds experts in one parameter. Of a model with experts PEFT takes all names of MLPs to mean that,
    and has no adapters on the dense ones.
    """
    has_experts = "num_experts_per_tok" in json.loads((base / "config.json").read_text())
    return not has_experts or not any(".mlp." in name for name in load_file(directory / "adapter_model.safetensors"))


def fingerprint(base: Path) -> str:
    """`slime.backends.megatron.weights.lora_base.fingerprint`, of the files of a model."""
    config = hf_config(base)
    carried, found = family_of(config).carried(config), {}
    for name, tensor in load_file(base / "model.safetensors").items():
        if not name.startswith(carried):
            bits = tensor.float().numpy().view(np.int32).astype(np.int64)
            rows = bits.sum(1) if bits.ndim > 1 else bits
            found[name] = hashlib.sha256(rows.tobytes()).hexdigest()
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


def saved_error(base: Path, directory: Path) -> float:
    """Largest difference of a logit between the ``reference`` in ``directory`` and what PEFT computes with the adapters
    that a worker left in ``saved`` below it."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), directory / "saved")
    known = load_file(directory / "reference.safetensors")
    tokens = known["tokens0"][: tiny.LENGTHS[0][0]]
    with torch.no_grad():
        return float((model(tokens[None]).logits[0] - known["logits0"][: len(tokens)]).abs().max())


def _merge(base: Path, directory: Path, weights: dict[str, Tensor], adapters: dict[str, Tensor]) -> Any:
    merged = dict(weights)
    for name, a in adapters.items():
        if ".lora_A." in name:
            weight = name.removeprefix(_PREFIX).replace(".lora_A.", ".")
            merged[weight] = weights[weight] + ALPHA / RANK * adapters[name.replace("lora_A", "lora_B")] @ a
    shutil.copytree(base, directory, ignore=shutil.ignore_patterns("grads", "*.safetensors"))
    save_file(merged, directory / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def _gradients(model: Any, read: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs, logits and coefficients of their sum, and what ``read`` takes of the model after the backward pass."""
    generator = torch.Generator().manual_seed(5)
    reference: dict[str, Tensor] = {}
    for i, lengths in enumerate(tiny.LENGTHS):
        sequences = [torch.randint(0, tiny.VOCAB, (length,), generator=generator) for length in lengths]
        logits = torch.cat([model(sequence[None]).logits[0] for sequence in sequences])
        coefficients = torch.randn(logits.shape, generator=generator)
        (logits * coefficients).sum().backward()
        reference |= {
            f"tokens{i}": torch.cat(sequences),
            f"coefficients{i}": coefficients,
            f"logits{i}": logits.detach(),
        }
    return reference, read(model)


def _by_chain_rule(model: Any, directory: Path, adapters: dict[str, Tensor]) -> dict[str, Tensor]:
    state = model.state_dict()
    state.update({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    model.load_state_dict(state)
    model.save_pretrained(directory / "merged_gradients")
    of_weights = load_file(directory / "merged_gradients" / "model.safetensors")
    gradients = {}
    for name, a in adapters.items():
        if ".lora_A." in name:
            other = name.replace("lora_A", "lora_B")
            of_weight = of_weights[name.removeprefix(_PREFIX).replace(".lora_A.", ".")]
            gradients[name] = ALPHA / RANK * adapters[other].T @ of_weight
            gradients[other] = ALPHA / RANK * of_weight @ a.T
    return gradients
