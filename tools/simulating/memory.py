"""What one GPU has to hold, in GiB, when it trains and when it generates."""

from __future__ import annotations

from dataclasses import dataclass

from tools.simulating.constants import cost
from tools.simulating.model import BF16, FP32
from tools.simulating.plan import Plan
from tools.simulating.training import parameters_held, parameters_stepped

_GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Of the fullest GPU, in GiB."""

    state: float
    """Weights, gradients, main parameters and moments of a trainer."""
    activations: float
    """Of one micro-batch, or of as many as a pipeline has under way."""
    beside: float
    """The other side's, asleep, and CUDA's own."""
    engine_weights: float
    cache: float
    """What an engine has for keys and values."""
    capacity: float

    @property
    def trains(self) -> float:
        """While it trains."""
        return self.state + self.activations + self.beside

    @property
    def fits(self) -> bool:
        """Whether there is room for it."""
        return self.trains <= self.capacity


def memory(plan: Plan) -> Memory:
    """Of a run's GPUs."""
    layout = plan.layout
    held, stepped = parameters_held(plan), parameters_stepped(plan)
    state = (held * (BF16 + FP32) + stepped * 3 * FP32) / _GIB
    weights = BF16 * plan.model.parameters / plan.engine_gpus / _GIB
    cache = plan.static * plan.gpu.memory_gib - weights
    # A pipeline's first stage has as many micro-batches under way as there are stages, of its share of the layers.
    under_way = layout.pp if layout.pp > 1 else 1
    tokens = max(plan.max_tokens, -(-int(plan.lengths.max()) // layout.cp))  # a longer sample is alone
    activations = (activation_bytes(plan) * tokens * under_way + _logits(plan)) / _GIB
    beside = cost("asleep") if plan.colocate else cost("context")
    return Memory(state, activations, beside + 2 * plan.bucket / _GIB, weights, cache, plan.gpu.memory_gib)


def activation_bytes(plan: Plan) -> float:
    """Of one token of a micro-batch on one rank, kept for the backward pass."""
    layout, shape = plan.layout, plan.model.shape
    h, query = shape.hidden_size, shape.num_attention_heads * plan.model.head_channels
    keys = shape.num_query_groups * plan.model.head_channels
    # The inputs of two norms and of what follows them; query, key and value before and after norm and rotation; output.
    attention = 4 * h + (query + 2 * keys) + (query + keys) + query
    dense = 3 * shape.ffn_hidden_size
    experts = shape.moe_router_topk * (2 * h + 3 * shape.moe_ffn_hidden_size)
    experts += 3 * shape.moe_shared_expert_intermediate_size
    kept = shape.num_layers * attention + plan.model.dense_layers * dense + shape.num_moe_layers * experts
    whole = kept / layout.tp * (1 - layout.recomputed) + shape.num_layers * h / layout.tp * layout.recomputed
    one_again = (kept / shape.num_layers) / layout.tp if layout.recomputed else 0.0
    return BF16 * (whole / layout.pp + one_again)


def _logits(plan: Plan) -> float:
    """Bytes of a chunk of logits and of the head's gradient in float32 (docs/memory.md)."""
    shape, tp = plan.model.shape, plan.layout.tp
    return (12 * 1024 + FP32 * shape.hidden_size) * shape.vocab_size / tp
