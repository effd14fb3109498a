"""A model with random weights from nothing but a config.json, of its own size or a tiny one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from slime.models import hf_config
from tools.make_tiny_model import make_tokenizer

_VOCABULARY = 320
_WIDTH = 128
_SMALLER: dict[str, int] = {
    **{"hidden_size": _WIDTH, "intermediate_size": 3 * _WIDTH, "moe_intermediate_size": 96, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "first_k_dense_replace": 1},
    **{"n_routed_experts": 8, "num_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    **{"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32},
    **{"head_dim": 32, "vocab_size": _VOCABULARY},
}
"""Sizes of a tiny model; one that is less already stays."""


def shrunk(values: dict[str, Any]) -> dict[str, Any]:
    """A config.json with small sizes; what decides the architecture (kinds of layers, norms, biases, ties) is kept."""
    small = dict(values)
    for name, size in _SMALLER.items():
        if isinstance(values.get(name), int):
            small[name] = min(values[name], size)
    heads, groups = values["num_attention_heads"], values.get("num_key_value_heads")
    if groups:
        small["num_key_value_heads"] = small["num_attention_heads"] if groups == heads else 2
    layers = small["num_hidden_layers"]
    if isinstance(values.get("layer_types"), list):
        small["layer_types"] = values["layer_types"][:layers]
    if isinstance(values.get("mlp_only_layers"), list):
        small["mlp_only_layers"] = [layer for layer in values["mlp_only_layers"] if layer < layers]
    return small


def write_model(source: Path, directory: Path, dtype: str, *, tiny: bool, seed: int) -> int:
    """Write a model of ``source``'s config with random weights, biases and norms, and a tokenizer of bytes.

    Weights are in ``dtype`` and not quantized; there are no heads beyond the decoder's. The number of parameters.

    Args:
        source: a config.json or a directory with one.

    Raises:
        ValueError: a family that is not supported.
        OSError: there is no such file.
    """
    from transformers.utils import logging

    path = source / "config.json" if source.is_dir() else source
    values = json.loads(path.read_text())
    values = shrunk(values) if tiny else dict(values)
    tokenizer = make_tokenizer(_VOCABULARY)
    values.pop("quantization_config", None)
    if values.get("num_nextn_predict_layers"):
        values["num_nextn_predict_layers"] = 0
    values |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    directory.mkdir(parents=True)
    tokenizer.save_pretrained(directory)
    config_file = directory / "config.json"
    config_file.write_text(json.dumps(values, indent=2))
    model = _random_model(hf_config(directory), getattr(torch, dtype), seed)
    logging.disable_progress_bar()
    model.save_pretrained(directory)
    values.setdefault("architectures", [type(model).__name__])
    # A model_type that transformers has no class for stays as it was given.
    config_file.write_text(json.dumps(values | {"torch_dtype": dtype}, indent=2) + "\n")
    return sum(parameter.numel() for parameter in model.parameters())


def _random_model(config: Any, dtype: torch.dtype, seed: int) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    # Of a width of 128 what the quickstart's model learns well with, of wider ones likewise scaled inputs of layers.
    deviation = 0.06 * (_WIDTH / max(config.hidden_size, _WIDTH)) ** 0.5
    tensors = {**dict(model.named_parameters()), **dict(_correction_biases(model))}
    with torch.no_grad():
        for name, tensor in sorted(tensors.items()):
            if tensor.dim() >= 2:
                tensor.normal_(0.0, deviation, generator=generator)
            else:
                tensor.normal_(1.0 if "norm" in name else 0.0, 0.1, generator=generator)
    return model


def _correction_biases(model: Any) -> list[tuple[str, torch.Tensor]]:
    """What routers add to the scores by which they choose; no gradient trains them."""
    return [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
