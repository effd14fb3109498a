"""How much work a row is: the floating-point operations of its forward pass, from the model's shape."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LatentShape:
    """The sizes of multi-latent attention, under Megatron-LM's names."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    """Width of the part of a query or key head without position."""
    qk_pos_emb_head_dim: int
    """Width of the part with position, which all key heads share."""
    v_head_dim: int


@dataclass(frozen=True)
class DecoderShape:
    """The sizes of a decoder with gated MLPs that its matrix products depend on, under Megatron-LM's names."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    """Width of a dense layer's MLP."""
    num_attention_heads: int
    num_query_groups: int
    """Key/value heads."""
    kv_channels: int
    """Width of one head; of no meaning with ``latent``."""
    vocab_size: int
    num_moe_layers: int = 0
    """How many of the layers have experts in place of a dense MLP."""
    num_experts: int = 0
    moe_router_topk: int = 0
    """Experts that a token takes."""
    moe_ffn_hidden_size: int = 0
    """Width of one expert."""
    moe_shared_expert_intermediate_size: int = 0
    """Width of the expert that every token takes besides; 0 for none."""
    latent: LatentShape | None = None
    """Of multi-latent attention, if the model has it."""


def forward_flops(lengths: np.ndarray, shape: DecoderShape) -> np.ndarray:
    """Floating-point operations of the matrix products of each row's forward pass, float64 [rows].

    A product of [a, b] and [b, c] is 2 a b c operations. For a row of n tokens, hidden size h, vocabulary V, L layers
    of which M have experts, H query and G key/value heads of width d, MLP width f, and of E experts of width e the best
    k and a shared one of width s:

        projections   L n 2 h (H + 2 G) d + L n 2 H d h     query, key and value; output
        attention     L 2 n (n + 1) H d                     scores and weighted sum over n (n + 1) / 2 causal pairs
          latent      see `_latent`                         in place of both, for multi-latent attention
        MLP           (L - M) n 6 h f                       gate, up and down
        experts       M n (2 h E + 6 h (k e + s))           router; the chosen and the shared
        LM head       n 2 h V

    Norms, activations, rotary embeddings and the softmax are left out: they are no matrix products.

    Args:
        lengths: int [rows], tokens of each row; attention does not reach beyond a row.
        shape: the whole model's, not one rank's.
    """
    n = np.asarray(lengths, dtype=np.float64)
    h = shape.hidden_size
    projections, pair = _grouped(shape) if shape.latent is None else _latent(shape, shape.latent)
    mlp = 6 * h * shape.ffn_hidden_size
    experts_width = shape.moe_router_topk * shape.moe_ffn_hidden_size + shape.moe_shared_expert_intermediate_size
    experts = 2 * h * shape.num_experts + 6 * h * experts_width
    per_token = (
        shape.num_layers * projections
        + (shape.num_layers - shape.num_moe_layers) * mlp
        + shape.num_moe_layers * experts
        + 2 * h * shape.vocab_size
    )
    return n * per_token + n * (n + 1) / 2 * (shape.num_layers * pair)


def _grouped(shape: DecoderShape) -> tuple[int, int]:
    """Operations of a layer's projections for a token, and of scores and weighted sum for a pair of tokens."""
    heads_width = shape.num_attention_heads * shape.kv_channels
    projections = 2 * shape.hidden_size * (2 * heads_width + 2 * shape.num_query_groups * shape.kv_channels)
    return projections, 4 * heads_width


def _latent(shape: DecoderShape, latent: LatentShape) -> tuple[int, int]:
    """The same of multi-latent attention: down to the latents, up to all heads, and the output."""
    h, heads = shape.hidden_size, shape.num_attention_heads
    query, value = latent.qk_head_dim + latent.qk_pos_emb_head_dim, latent.v_head_dim
    rank = latent.q_lora_rank
    matrices = h * heads * query if rank is None else rank * (h + heads * query)
    matrices += h * (latent.kv_lora_rank + latent.qk_pos_emb_head_dim)
    matrices += latent.kv_lora_rank * heads * (latent.qk_head_dim + value) + heads * value * h
    return 2 * matrices, 2 * heads * (query + value)
