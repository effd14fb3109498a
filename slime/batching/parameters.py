"""How many parameters a decoder has, by its matrices, and what it caches, from the sizes that `slime.batching.flops`
counts by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from slime.batching.flops import DecoderShape


@dataclass(frozen=True)
class Matrices:
    """``count`` matrices of ``size`` elements, as Megatron-core holds them: query, key and value in one, and gate and
    up."""

    size: int
    count: int
    part: Literal["layers", "experts", "vocabulary"]
    """What cuts them among ranks: tensor and pipeline parallelism; for experts those and expert parallelism."""

    @property
    def elements(self) -> int:
        return self.size * self.count


def matrices(shape: DecoderShape, *, tied: bool) -> list[Matrices]:
    """Those of a decoder; ``tied``: its output layer is the embedding. Vectors (norms, biases), and heads that predict
    further tokens, are left out."""
    h = shape.hidden_size
    dense, experts = shape.num_layers - shape.num_moe_layers, shape.num_moe_layers * shape.num_experts
    shared, width = shape.moe_shared_expert_intermediate_size, shape.moe_ffn_hidden_size
    found = [Matrices(shape.vocab_size * h, 1 if tied else 2, "vocabulary")]
    found += [Matrices(size, shape.num_layers, "layers") for size in _attention(shape)]
    found += [Matrices(size * h, dense, "layers") for size in (2 * shape.ffn_hidden_size, shape.ffn_hidden_size)]
    found += [Matrices(size * h, shape.num_moe_layers, "layers") for size in (shape.num_experts, 2 * shared, shared)]
    found += [Matrices(size * h, experts, "experts") for size in (2 * width, width)]
    return [matrix for matrix in found if matrix.elements]


def cached_numbers(shape: DecoderShape) -> int:
    """Of one token: its keys and values in all layers, or the latents that they are made of."""
    latent = shape.latent
    if latent is not None:
        return shape.num_layers * (latent.kv_lora_rank + latent.qk_pos_emb_head_dim)
    return shape.num_layers * 2 * shape.num_query_groups * shape.kv_channels


def _attention(shape: DecoderShape) -> Iterator[int]:
    h, heads, latent = shape.hidden_size, shape.num_attention_heads, shape.latent
    if latent is None:
        yield h * (heads + 2 * shape.num_query_groups) * shape.kv_channels
        yield heads * shape.kv_channels * h
        return
    queries = heads * (latent.qk_head_dim + latent.qk_pos_emb_head_dim)
    if latent.q_lora_rank is None:
        yield h * queries
    else:
        yield from (h * latent.q_lora_rank, latent.q_lora_rank * queries)
    yield h * (latent.kv_lora_rank + latent.qk_pos_emb_head_dim)
    yield latent.kv_lora_rank * heads * (latent.qk_head_dim + latent.v_head_dim)
    yield heads * latent.v_head_dim * h
