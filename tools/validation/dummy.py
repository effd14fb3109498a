"""A model with random weights from nothing but a config.json, of its own size or a tiny one."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch

from slime.files import atomic_io
from slime.models import hf_config, shape_from_hf
from slime.utils.errors import BadInputError
from tools.make_tiny_model import make_tokenizer, save

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
_NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_OF_LAYERS = ("layer_types", "mlp_layer_types", "moe_layer_freq")
"""Lists with an entry for each layer, and perhaps for heads behind the last."""


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
    for name, value in values.items():
        if isinstance(value, list) and (name in _OF_LAYERS or len(value) == values["num_hidden_layers"]):
            small[name] = value[:layers]
    dense = small.get("first_k_dense_replace")
    if dense != values.get("first_k_dense_replace"):
        # The first layers with experts must be among those that are left.
        gone = values["first_k_dense_replace"] - dense
        for name in ("mlp_layer_types", "moe_layer_freq"):
            if isinstance(values.get(name), list):
                small[name] = values[name][gone : gone + layers]
    if isinstance(values.get("mlp_only_layers"), list):
        small["mlp_only_layers"] = [layer for layer in values["mlp_only_layers"] if layer < layers]
    return small


def write_model(source: Path, directory: Path, dtype: str, *, tiny: bool, seed: int) -> int:
    """Write a model of ``source``'s config with random weights, biases and norms, and a tokenizer of bytes.

    Weights are in ``dtype`` and not quantized; there are no heads beyond the decoder's. The number of parameters.

    Args:
        source: a config.json or a directory with one.

    Raises:
        ValueError: a family that is not supported, a config that lacks something, or weights too many for the memory.
        OSError: the file cannot be read.
    """
    tokenizer = make_tokenizer(_VOCABULARY)
    values = _values(source / "config.json" if source.is_dir() else source, tiny)
    values.pop("quantization_config", None)
    if values.get("num_nextn_predict_layers"):
        values["num_nextn_predict_layers"] = 0
    values |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = _config(values, str(source))
    count = _fitting(config, dtype)
    with atomic_io.written_directory(directory.resolve()) as unfinished:
        tokenizer.save_pretrained(unfinished)
        _write(config, values, unfinished, dtype, seed)
    return count


def _values(path: Path, tiny: bool) -> dict[str, Any]:
    """Those of a config.json, of a tiny model's sizes if that is asked for."""
    if not path.is_file():
        raise BadInputError(f"{path.parent}: there is no config.json in it")
    values = json.loads(path.read_text())
    if not isinstance(values, dict):
        raise BadInputError(f"{path} is not a JSON object")
    _config(values, str(path))
    missing = [name for name in _NEEDED if not isinstance(values.get(name), int)]
    if tiny and missing:
        raise BadInputError(f"{path} lacks {', '.join(missing)}, of which --tiny makes small sizes")
    return shrunk(values) if tiny else dict(values)


def _config(values: dict[str, Any], what: str) -> Any:
    """The config of these values, which a family supports."""
    with TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(values))
        try:
            config = hf_config(directory)
            shape_from_hf(config)
        except Exception as error:  # transformers checks some values, and trips over others
            reason = " ".join(str(error).replace(directory, what).split())
            raise BadInputError(
                f"{what} is not a config of a supported model: {type(error).__name__}: {reason}"
            ) from error
    return config


def _fitting(config: Any, dtype: str) -> int:
    """The number of parameters, if they fit into the memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    needed, free = count * getattr(torch, dtype).itemsize, psutil.virtual_memory().available
    if needed > free:
        figures = f"{count / 1e9:.1f} G parameters in {dtype} are {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free"
        raise BadInputError(f"{figures}: --tiny makes a smaller model of the same architecture")
    return count


def _write(config: Any, values: dict[str, Any], directory: Path, dtype: str, seed: int) -> None:
    from transformers.utils import logging

    model = _random_model(config, getattr(torch, dtype), seed)
    logging.disable_progress_bar()
    save(model, directory)
    values.setdefault("architectures", [type(model).__name__])
    # A model_type that transformers has no class for stays as it was given.
    (directory / "config.json").write_text(json.dumps(values | {"torch_dtype": dtype}, indent=2) + "\n")


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
