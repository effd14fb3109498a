"""What of a model's shape a step costs: parameters, tensors, floating-point operations, cached bytes."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from slime.batching.flops import DecoderShape, LatentShape
from slime.batching.parameters import cached_numbers, matrices
from slime.rollout.batches.train_data import decoder_shape

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "models"
BF16, FP32 = 2, 4
"""Bytes of a number."""


@dataclass(frozen=True)
class Model:
    """A decoder, by the sizes of its matrices; all counts are of the whole model."""

    name: str
    shape: DecoderShape
    tied: bool
    """Whether the output layer is the embedding."""
    head_norms: bool
    """Whether query and key heads have norms."""
    biases: bool
    """Whether query, key and value have one."""

    @property
    def head_channels(self) -> int:
        """Of one query or key head."""
        latent = self.shape.latent
        return self.shape.kv_channels if latent is None else latent.qk_head_dim + latent.qk_pos_emb_head_dim

    @property
    def dense_layers(self) -> int:
        """Layers without experts."""
        return self.shape.num_layers - self.shape.num_moe_layers

    @property
    def head_parameters(self) -> int:
        """Of the output layer's matrix, which is the embedding's where they are tied."""
        return self.shape.vocab_size * self.shape.hidden_size

    @property
    def expert_parameters(self) -> int:
        """Of all experts that a token may or may not take."""
        return sum(each.elements for each in matrices(self.shape, tied=self.tied) if each.part == "experts")

    @property
    def dense_parameters(self) -> int:
        """Of all else: what every token goes through, and the embedding. Biases and norms of heads are left out."""
        norms = (2 * self.shape.num_layers + 1) * self.shape.hidden_size
        return norms + sum(each.elements for each in matrices(self.shape, tied=self.tied) if each.part != "experts")

    @property
    def parameters(self) -> int:
        """Of the model."""
        return self.dense_parameters + self.expert_parameters

    def tensors(self, experts: float | None = None) -> float:
        """Hugging Face tensors that a push brings to one rank; with ``experts`` of each layer's, not with all."""
        shape, latent = self.shape, self.shape.latent
        experts = shape.num_experts if experts is None else experts
        # Two norms; query, key, value and output, or the latents' down and up projections with their norms.
        attention = (4 if latent is None else 7 if latent.q_lora_rank else 5) + 2 * (self.head_norms and latent is None)
        attention += 3 * self.biases
        shared = 3 * bool(shape.moe_shared_expert_intermediate_size)
        layers = shape.num_layers * (2 + attention) + self.dense_layers * 3
        return layers + shape.num_moe_layers * (1 + shared + 3 * experts) + (2 if self.tied else 3)

    @property
    def cached_bytes(self) -> int:
        """Of keys and values of one token, in bfloat16."""
        return BF16 * cached_numbers(self.shape)


def model_of(flags: Mapping[str, Any], name: str, num_layers: int | None = None) -> Model:
    """From a shape under Megatron-LM's argument names; with another number of layers, as the first ones of it."""
    names = [field.name for part in (DecoderShape, LatentShape) for field in fields(part)]
    values: dict[str, Any] = dict.fromkeys(names) | {"moe_layer_freq": 1}
    values |= {"multi_latent_attention": False} | dict(flags)
    if not values["num_query_groups"]:
        values["num_query_groups"] = values["num_attention_heads"]
    if not values["kv_channels"]:
        values["kv_channels"] = values["hidden_size"] // values["num_attention_heads"]
    if num_layers is not None:
        frequency = values["moe_layer_freq"]
        values |= {"num_layers": num_layers}
        values["moe_layer_freq"] = frequency[:num_layers] if isinstance(frequency, list) else frequency
        name = f"{name}, {num_layers} layers"
    shape = decoder_shape(Namespace(**values))
    if not shape.num_moe_layers:
        shape = replace(shape, moe_ffn_hidden_size=0)
    untied = values.get("untie_embeddings_and_output_weights")
    return Model(name, shape, not untied, bool(values.get("qk_layernorm")), bool(values.get("add_qkv_bias")))


def published() -> list[str]:
    """The names that `read_model` knows: those of scripts/models."""
    return sorted(path.stem for path in SCRIPTS.glob("*.sh"))


def read_model(name: str, num_layers: int | None = None) -> Model:
    """One of scripts/models, whatever the case of its name, or a Hugging Face directory, its config.json or a hub id.

    Raises:
        ValueError: neither, or a model that slime does not support.
    """
    from tools.model_args import flags_of, read_shape

    script = next((each for each in published() if each.lower() == name.lower()), None)
    if script is not None:
        return model_of(flags_of(SCRIPTS / f"{script}.sh"), script, num_layers)
    return model_of(read_shape(name), Path(name).name or name, num_layers)
