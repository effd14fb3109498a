"""What lies between generation and training: memory handed over, weights pushed, samples turned to batches, calls."""

from __future__ import annotations

import math

from tools.simulating.constants import cost
from tools.simulating.model import BF16, FP32
from tools.simulating.plan import Phase, Plan
from tools.simulating.training import parameters_held, parameters_stepped

_OPTIMIZER = 3 * FP32
"""Bytes of a parameter's main copy and two moments."""
_CALLS_OF_ENGINE, _CALLS_TO_ABORT = 6, 2
"""Of each push, besides its buckets: pause, flush, prove, set and check the version, continue; in train_async.py also
those that end requests."""
_CALLS_OF_RANK, _CALLS_TO_SLEEP = 3, 3
"""Of each step: train, push, score the probe; colocated also wake, and sleep twice."""


def _copied(plan: Plan) -> float:
    """Bytes a second between a GPU and its host, when as many of the host's GPUs do so as this run has."""
    return cost("copy") if plan.trainers == 1 else cost("copy, beside others")


def sleep(plan: Plan) -> Phase:
    """Trainers bring weights, main parameters and moments to host memory; gradients are let go of."""
    held, stepped = parameters_held(plan), parameters_stepped(plan)
    copied = (held * BF16 + stepped * _OPTIMIZER) / _copied(plan)
    parts = {"copies to host memory": copied, "calls": 2 * cost("sleep")}
    return Phase("trainers give memory back", sum(parts.values()), parts)


def wake(plan: Plan) -> Phase:
    """Trainers take their memory, and get their weights; their optimizer's state comes beside the first passes."""
    held, stepped = parameters_held(plan), parameters_stepped(plan)
    mapped = held * (BF16 + FP32) + stepped * _OPTIMIZER
    parts = {"copies from host memory": held * BF16 / _copied(plan), "memory mapped": mapped / cost("mapping")}
    parts["calls"] = cost("wake")
    return Phase("trainers take memory", sum(parts.values()), parts)


def engines_memory() -> Phase:
    """Engines give their memory back before training, and take it after it."""
    parts = {"engines give memory back": cost("engines release"), "engines take memory": cost("engines resume")}
    return Phase("engines' memory", sum(parts.values()), parts)


def push(plan: Plan) -> Phase:
    """From pause to continue. Colocated, each GPU's trainer hands its engine whole tensors, gathered from the other
    ranks; apart, the first rank sends all to all engines."""
    model, layout, gpu = plan.model, plan.layout, plan.gpu
    nbytes, tensors = float(BF16 * model.parameters), model.tensors()
    parts = {"calls, barriers": cost("push")}
    if plan.colocate and pushes_own_experts(plan):
        nbytes = float(BF16 * (model.dense_parameters + model.expert_parameters / layout.ep))
        tensors = model.tensors(model.shape.num_experts / layout.ep)
    parts["tensor by tensor"] = tensors * cost("push, tensor")
    if plan.colocate:
        # Gathered, put into a flat buffer, loaded: each reads and writes.
        parts["copies on the GPU"] = 3 * 2 * nbytes / (gpu.bandwidth * cost("streaming"))
        whole = parameters_held(plan) * BF16
        # Stages of a pipeline lie as far apart as they can.
        within = plan.trainers <= gpu.per_host or (layout.pp == 1 and max(layout.tp, layout.ep) <= gpu.per_host)
        speed = gpu.link * cost("link, trainers") if within else gpu.network * cost("network")
        parts["gathered from other ranks"] = max(0.0, nbytes - whole) / speed
    else:
        within = plan.gpus <= gpu.per_host
        parts["sent by one rank"] = nbytes / (gpu.link * cost("broadcast") if within else gpu.network * cost("network"))
    # What is measured with one engine has its calls, and one bucket's, in it.
    buckets = 0 if plan.colocate else math.ceil(nbytes / plan.bucket)
    calls = buckets + _CALLS_OF_ENGINE + _CALLS_TO_ABORT * plan.asynchronous
    parts["calls of engines by one rank"] = (plan.engines - 1) * calls * cost("call of an engine")
    parts["proofs read by one rank"] = (plan.engines * plan.engine_gpus - 1) * held_names(plan) * cost("proof, tensor")
    return Phase("weight push", sum(parts.values()), {name: each for name, each in parts.items() if each})


def pushes_own_experts(plan: Plan) -> bool:
    """Whether each trainer's experts are just those of the engine's rank on its GPU (`can_push_local_experts`)."""
    return plan.layout.ep > 1 and plan.engine_gpus == plan.layout.ep


def held_names(plan: Plan) -> float:
    """Parameters that a rank of an engine tells of: SGLang's, in which projections and experts are stacked."""
    shape = plan.model.shape
    return 3 + shape.num_layers * (6 + 2 * plan.model.head_norms) + shape.num_moe_layers


def control(plan: Plan) -> Phase:
    """What one process does a step for each rank, each engine, and each sample."""
    tokens = float(plan.lengths.sum())
    calls = _CALLS_OF_RANK + _CALLS_TO_SLEEP * plan.colocate
    parts = {
        "samples to batches": cost("convert") * tokens,
        "packing": cost("pack") * tokens / plan.dp,
        "calls of ranks by the driver": cost("call of a rank") * calls * plan.trainers,
        "batches to ranks": tokens * cost("row bytes") / (plan.gpu.network * cost("network")),
    }
    return Phase("batches, calls", sum(parts.values()), parts)
