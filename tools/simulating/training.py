"""The passes over a rollout's samples: products, attention, what lies between them, collectives, the optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slime.batching.flops import forward_flops
from slime.batching.schedule import build_schedule
from tools.simulating.constants import ATTENTION, cost
from tools.simulating.model import BF16, FP32
from tools.simulating.plan import Phase, Plan

_TRAIN = 3
"""Forward passes that a forward and backward pass come to, in products."""


@dataclass(frozen=True)
class _Batch:
    """Micro-batches that ranks take at the same time: the dearest counts."""

    tokens: float
    """Of one context-parallel rank."""
    pairs: float
    """Of tokens that attend to each other, likewise."""
    length: float
    """Of the sequences that a pair is in, in the mean."""


def schedule(plan: Plan) -> list[list[list[np.ndarray]]]:
    """Lengths in each micro-batch, by optimizer step, data-parallel rank and micro-batch: by slime's own packing."""
    lengths = plan.lengths
    built = build_schedule(
        lengths,
        np.arange(len(lengths)),
        np.asarray(plan.responses),
        dp_size=plan.dp,
        global_batch_size=len(lengths) // plan.steps,
        max_tokens=plan.max_tokens * plan.layout.cp,
        micro_batch_multiple=plan.layout.pp if plan.layout.vpp > 1 else 1,
        row_costs=forward_flops(lengths, plan.model.shape) if plan.dp > 1 else None,
    )
    return [[[lengths[rows] for rows in rank] for rank in step.micro_batches] for step in built]


def _batches(plan: Plan, ranks: Sequence[Sequence[np.ndarray]]) -> list[_Batch]:
    """Of one optimizer step, in turn. Ranks with experts among them wait for each other in every layer; others only at
    the step's end, by when each has its own sum."""
    cp = plan.layout.cp
    found = [[_batch(lengths, cp) for lengths in rank] for rank in ranks]
    if plan.model.shape.num_moe_layers and plan.layout.ep > 1:
        return [max(together, key=lambda each: each.tokens) for together in zip(*found, strict=True)]
    return max(found, key=lambda rank: sum(_weight(each) for each in rank))


def _weight(batch: _Batch) -> float:
    return batch.tokens + batch.pairs / 10_000


def _batch(lengths: np.ndarray, cp: int) -> _Batch:
    whole = lengths.astype(np.float64)
    pairs = float((whole * (whole + 1) / 2).sum())
    return _Batch(float(whole.sum()) / cp, pairs / cp, float((whole**2).sum() / whole.sum()))


def train(plan: Plan) -> Phase:
    """All optimizer steps of a rollout."""
    parts: dict[str, float] = {}
    for ranks in schedule(plan):
        _add(parts, _over(plan, ranks, training=True))
        _add(parts, _optimizer(plan))
    return Phase("forward, backward, optimizer", sum(parts.values()), parts)


def score(plan: Plan, name: str) -> Phase:
    """One pass without gradients over all samples, as for log-probs."""
    parts: dict[str, float] = {}
    for ranks in schedule(plan):
        _add(parts, _over(plan, ranks, training=False))
    return Phase(name, sum(parts.values()), parts)


def _over(plan: Plan, ranks: Sequence[Sequence[np.ndarray]], *, training: bool) -> dict[str, float]:
    """All micro-batches of an optimizer step."""
    parts: dict[str, float] = {}
    batches = _batches(plan, ranks)
    for batch in batches:
        _add(parts, _passes(plan, batch, training=training))
    if plan.layout.pp > 1:
        # While a pipeline fills and empties, its stages wait for as long as ``pp - 1`` micro-batches of one take.
        waits = (plan.layout.pp - 1) / (len(batches) * plan.layout.vpp)
        parts["pipeline bubble"] = sum(parts.values()) * waits
    return parts


def _add(parts: dict[str, float], more: dict[str, float]) -> None:
    for name, seconds in more.items():
        parts[name] = parts.get(name, 0.0) + seconds


def _passes(plan: Plan, batch: _Batch, *, training: bool) -> dict[str, float]:
    """Of one micro-batch on one rank: that of a pipeline stage with most layers, and with the output layer, which the
    others wait for."""
    layout, gpu, shape = plan.layout, plan.gpu, plan.model.shape
    share = math.ceil(shape.num_layers / layout.pp) / shape.num_layers
    passes = _TRAIN + layout.recomputed if training else 1.0
    # Logits are not kept: the backward pass makes them again.
    products = layer_flops(plan) * share * passes + 2 * plan.model.head_parameters * (_TRAIN + 1 if training else 1)
    found = {
        "products": batch.tokens * products / layout.tp / (gpu.flops * cost("products")),
        "attention": _attention(plan, batch, training) * share / layout.tp,
        "between products": _between(plan, batch, share, training) / layout.tp,
    }
    found |= _collectives(plan, batch, share, training)
    if training:
        held = parameters_held(plan)
        found["gradients added"] = held * cost("gradient bytes") / (gpu.bandwidth * cost("streaming"))
    return found


def layer_flops(plan: Plan) -> float:
    """Of all layers' products for one token, forward, without attention's."""
    one = forward_flops(np.array([1]), plan.model.shape)[0]
    pair = forward_flops(np.array([2]), plan.model.shape)[0] - 2 * one  # a row of two has three pairs, two of one two
    return float(one - pair - 2 * plan.model.head_parameters)


def _attention(plan: Plan, batch: _Batch, training: bool) -> float:
    """Of all layers and heads: scores and sums, by what the kernel does with sequences of this length."""
    flops = 4 * batch.pairs * plan.model.head_channels * plan.model.shape.num_attention_heads
    times = ATTENTION[plan.kernel]
    at = np.log(batch.length), np.log([each.length for each in times])
    forward = float(np.interp(*at, [each.forward for each in times]))
    backward = float(np.interp(*at, [each.backward for each in times]))
    per_layer = flops / plan.gpu.flops * (1 / forward + (2 / backward + plan.layout.recomputed / forward) * training)
    return plan.model.shape.num_layers * per_layer


def _between(plan: Plan, batch: _Batch, share: float, training: bool) -> float:
    """Norms, rotation, activations, residuals, logits, and of experts permutation: bound by memory."""
    shape = plan.model.shape
    heads = (shape.num_attention_heads + shape.num_query_groups) * plan.model.head_channels
    h, f, e = shape.hidden_size, shape.ffn_hidden_size, shape.moe_ffn_hidden_size
    again = plan.layout.recomputed if training else 0.0
    # Numbers that are read or written: forward, and with the backward pass's.
    stream = (10 + (20 if training else 0) + 10 * again) * h
    rotated = (4 + (8 if training else 0) + 4 * again) * heads
    gated = 3 + (5 if training else 0) + 3 * again
    layers = shape.num_layers * (stream + rotated) + plan.model.dense_layers * gated * f
    moved = (4 + (8 if training else 0) + 4 * again) * h
    taken = shape.moe_router_topk * (moved + gated * e) * cost("expert traffic")
    layers += shape.num_moe_layers * (taken + gated * shape.moe_shared_expert_intermediate_size)
    logits = shape.vocab_size * (8 if training else 2)
    return batch.tokens * (layers * share + logits) * BF16 / (plan.gpu.bandwidth * cost("streaming"))


def _collectives(plan: Plan, batch: _Batch, share: float, training: bool) -> dict[str, float]:
    layout, shape, gpu = plan.layout, plan.model.shape, plan.gpu
    tokens, h, layers = batch.tokens, shape.hidden_size, shape.num_layers * share
    again = layout.recomputed if training else 0.0
    found: dict[str, float] = {}
    if layout.tp > 1:
        # With sequence parallelism each of two blocks gathers and scatters, and backward gathers once more for weights.
        times = layers * (4 + (6 if training else 0) + 4 * again)
        sent = tokens * h * BF16 * (layout.tp - 1) / layout.tp
        found["tensor parallelism"] = times * sent / (plan.speed_of(layout.tp) * cost("link, trainers"))
    if layout.cp > 1:
        width = 2 * shape.num_query_groups * plan.model.head_channels * BF16 / layout.tp
        # Gathered, gathered again for the gradient (or where layers are recomputed), and gradients scattered.
        times = layers * (3 if training else 1)
        sent = tokens * width * (layout.cp - 1)
        found["context parallelism"] = times * sent / (plan.speed_of(layout.cp, layout.tp) * cost("link, trainers"))
    if layout.ep > 1 and shape.num_moe_layers:
        sent = tokens / layout.tp * 2 * h * BF16 * other_ranks(plan)
        times = shape.num_moe_layers * share * (1 + (1 if training else 0) + again)
        speed = _mixed_speed(plan, layout.ep)
        found["experts' all-to-alls"] = times * sent / (speed * cost("link, experts"))
    if layout.pp > 1:
        sent = tokens / layout.tp * h * BF16 * layout.vpp * (1 + training)
        found["pipeline transfers"] = sent / (gpu.network * cost("network"))
    return found


def other_ranks(plan: Plan) -> float:
    """To how many ranks but its own a token goes, in the mean, whose experts are chosen evenly."""
    shape, ep = plan.model.shape, plan.layout.ep
    local = shape.num_experts // ep
    none = math.comb(shape.num_experts - local, shape.moe_router_topk) / math.comb(
        shape.num_experts, shape.moe_router_topk
    )
    return (ep - 1) * (1 - none)


def _mixed_speed(plan: Plan, ranks: int) -> float:
    """Of an all-to-all of so many ranks: what stays in a host goes beside what leaves it."""
    gpu = plan.gpu
    if ranks <= gpu.per_host:
        return gpu.link
    leaves = (ranks - gpu.per_host) / (ranks - 1)
    return min(gpu.link / (1 - leaves), gpu.network / leaves)


def parameters_held(plan: Plan) -> float:
    """Of one rank: what it adds gradients of."""
    return plan.model.dense_parameters / plan.layout.dense + plan.model.expert_parameters / plan.layout.experts


def parameters_stepped(plan: Plan) -> float:
    """Of one rank with the distributed optimizer: what it has main parameters and moments of."""
    layout, model = plan.layout, plan.model
    dense = model.dense_parameters / layout.dense / (plan.dp * layout.cp)
    copies = plan.trainers // layout.experts
    return dense + model.expert_parameters / layout.experts / copies


def _optimizer(plan: Plan) -> dict[str, float]:
    """Gradients are summed over data-parallel ranks, each steps its share, and all get the weights."""
    held, stepped = parameters_held(plan), parameters_stepped(plan)
    found = {"optimizer": stepped * cost("optimizer bytes") / (plan.gpu.bandwidth * cost("streaming"))}
    if plan.trainers > plan.layout.dense:
        sent = (held - stepped) * (FP32 + BF16)
        whole_hosts = plan.trainers <= plan.gpu.per_host
        speed = plan.gpu.link * cost("link, trainers") if whole_hosts else plan.gpu.network * cost("network")
        found["gradients and weights between ranks"] = sent / speed
    return found
