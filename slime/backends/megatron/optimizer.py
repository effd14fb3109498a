"""Data-parallel wrapping, optimizer and learning-rate schedule, from the options."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slime.options.megatron import config_kwargs


def wrap_data_parallel(args: Namespace, model_chunks: list[torch.nn.Module]) -> list[DistributedDataParallel]:
    """Each chunk with gradient buffers that are summed over the data-parallel and context-parallel ranks."""
    values = config_kwargs(args, DistributedDataParallelConfig)
    # Its check raises on one rank and leaves the others in a collective; the trainer checks the global norm instead.
    config = DistributedDataParallelConfig(**(values | {"check_for_nan_in_grad": False}))
    return [
        # Only the first chunk's gradients come last in the backward pass; buckets of the others would overlap nothing.
        DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=i > 0)
        for i, chunk in enumerate(model_chunks)
    ]


def make_optimizer(args: Namespace, chunks: list[DistributedDataParallel]) -> MegatronOptimizer:
    """The optimizer of the wrapped chunks; fp32 master weights are taken from the model's present weights.

    Raises:
        ValueError: an optimizer that megatron-core cannot distribute.
    """
    if args.use_distributed_optimizer and args.optimizer != "adam":
        raise ValueError(f"--optimizer {args.optimizer} cannot be distributed: add --no-use-distributed-optimizer")
    optimizer = get_megatron_optimizer(OptimizerConfig(**config_kwargs(args, OptimizerConfig)), chunks)
    for part in parts_of(optimizer):
        # Megatron-core calls it before a load, and has none for SGD, whose state torch creates by itself.
        if part.init_state_fn is None:
            part.init_state_fn = _no_state
        if isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, torch.optim.Adam):
            _allocate(part.optimizer)
    return optimizer


def parts_of(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers that one is chained of: dense and expert parameters have their own, if the rank has any."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if part.optimizer is not None]


def move_moments(optimizer: MegatronOptimizer, where: torch.device) -> None:
    """Move per-parameter optimizer state to a device; step counts, which torch's Adam keeps on the host, stay."""
    for part in parts_of(optimizer):
        for state in part.optimizer.state.values():
            for name, value in state.items():
                if torch.is_tensor(value) and value.dim():
                    state[name] = value.to(where)


def _no_state(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    """Create no optimizer state."""


def _allocate(adam: torch.optim.Adam) -> None:
    """Create the state that the first step would: megatron-core 0.16 cannot load a distributed one without."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            adam.state[parameter] = {
                "step": torch.tensor(0.0, dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter.data),
                "exp_avg_sq": torch.zeros_like(parameter.data),
            }


def make_scheduler(args: Namespace, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Learning rate and weight decay by optimizer step, of ``num_rollout * num_steps_per_rollout`` in all.

    Unless ``--use-checkpoint-opt_param-scheduler`` is given, a resumed run takes the schedule of its own options, and
    from the checkpoint only how many steps were made.

    Raises:
        ValueError: a warm-up that is not shorter than the decay, or a minimum above the learning rate.
    """
    train_steps = max(args.num_rollout * args.num_steps_per_rollout, 1)
    decay_steps = args.lr_decay_iters or train_steps
    warmup_steps = args.lr_warmup_iters
    if args.lr_warmup_fraction is not None:
        warmup_steps = int(args.lr_warmup_fraction * decay_steps)
    if warmup_steps >= decay_steps:
        raise ValueError(
            f"the learning rate warms up for {warmup_steps} optimizer steps of {decay_steps}: lower --lr-warmup-iters "
            f"or --lr-warmup-fraction, or raise --lr-decay-iters"
        )
    min_lr = args.min_lr or 0.0
    if min_lr > args.lr:
        raise ValueError(f"--min-lr {min_lr} is above --lr {args.lr}")
    from_checkpoint = args.use_checkpoint_opt_param_scheduler
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay if args.start_weight_decay is None else args.start_weight_decay,
        end_wd=args.weight_decay if args.end_weight_decay is None else args.end_weight_decay,
        wd_incr_steps=train_steps,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=from_checkpoint,
        override_opt_param_scheduler=not from_checkpoint,
        wsd_decay_steps=args.lr_wsd_decay_iters,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )
