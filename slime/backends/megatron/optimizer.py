"""Data-parallel wrapping, optimizer and learning-rate schedule, from the options."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from slime.backends.megatron.offload import HostState
from slime.options.flags.megatron import config_kwargs
from slime.options.training import warmup_and_decay_steps, weight_decays
from slime.training.bad_steps import NormGuard, guards_steps
from slime.utils import device
from slime.utils.errors import BadInputError

_FUSED = {"fused": True, "foreach": False}
"""What torch wants of the parameter groups of a fused optimizer."""
_OURS = (
    *("optimizer_cpu_offload", "optimizer_offload_fraction", "use_torch_optimizer_for_cpu_offload"),
    *("overlap_cpu_optimizer_d2h_h2d", "pin_cpu_grads", "pin_cpu_params", "use_precision_aware_optimizer"),
)
"""Settings that are obeyed here (`HostState`) and not by megatron-core, which has the same by Transformer Engine's
optimizer alone. In float32, all that there is here, its precision-aware optimizer makes the same steps."""


def wrap_data_parallel(args: Namespace, model_chunks: list[torch.nn.Module]) -> list[DistributedDataParallel]:
    """Each chunk with gradient buffers that are summed over the data-parallel and context-parallel ranks."""
    values = config_kwargs(args, DistributedDataParallelConfig)
    # Its check raises on one rank and leaves the others in a collective; the trainer checks the global norm instead.
    config = DistributedDataParallelConfig(**(values | {"check_for_nan_in_grad": False}))
    chunks = [
        # Only the first chunk's gradients come last in the backward pass; buckets of the others would overlap nothing.
        DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=i > 0)
        for i, chunk in enumerate(model_chunks)
    ]
    if not args.custom_model_provider_path:  # what else a user's model does with its weights nobody knows
        for chunk in chunks:
            add_gradients_in_products(chunk)
    return chunks


def add_gradients_in_products(chunk: torch.nn.Module) -> None:
    """Have the products that make gradients of Megatron's linear layers add them to ``main_grad``, in float32, where
    there was a product rounded to the weight's type, and then a sum. Of a weight that is used otherwise, too, nothing
    else would count."""
    for module in chunk.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            module.gradient_accumulation_fusion = True


def make_optimizer(args: Namespace, chunks: list[DistributedDataParallel]) -> MegatronOptimizer:
    """The optimizer of the wrapped chunks; fp32 master weights are taken from the model's present weights."""
    values = {name: value for name, value in config_kwargs(args, OptimizerConfig).items() if name not in _OURS}
    config = OptimizerConfig(**values)
    optimizer = get_megatron_optimizer(config, chunks)
    _leave_rates_to_schedule(optimizer.param_groups, config)
    if guards_steps(args):
        _guard(args, optimizer)
    if args.optimizer_cpu_offload:
        _offload(args, optimizer)
    for part in parts_of(optimizer):
        # Megatron-core calls it before a load, and has none for SGD.
        if part.init_state_fn is None:
            part.init_state_fn = lambda *_: None
        if isinstance(part.optimizer, (torch.optim.Adam, torch.optim.SGD)):
            _fuse(part.optimizer)
            _keep_groups(part.optimizer)
            _allocate(part.optimizer)
    return optimizer


def _guard(args: Namespace, optimizer: MegatronOptimizer) -> None:
    """Have steps by bad gradients not taken: ``step`` then gives the reason, in words, in the place of True.

    Without a loss scale, which float16 alone has, gradients may be made ready twice.
    """
    guard, step = NormGuard(args), optimizer.step

    def step_unless_bad() -> tuple[Any, Any, Any]:
        optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())
        why = guard.why_bad(norm)
        return step() if why is None else (why, norm, None)

    optimizer.step = step_unless_bad


def _offload(args: Namespace, optimizer: MegatronOptimizer) -> None:
    """Move what the optimizer alone has to host memory, before there are moments on the device."""
    settings = {"pin": args.pin_cpu_params, "overlap": args.overlap_cpu_optimizer_d2h_h2d}
    try:
        states = [
            HostState(part, _moments(part.optimizer), fraction=args.optimizer_offload_fraction, **settings)
            for part in parts_of(optimizer)
        ]
    except MemoryError as error:
        raise BadInputError(f"--optimizer-cpu-offload: {error}: raise its limit, or --no-pin-cpu-params") from error
    step = optimizer.step

    def step_when_ready() -> Any:
        with contextlib.ExitStack() as stack:
            for state in states:
                stack.enter_context(state.ready())
            return step()

    optimizer.step = step_when_ready


def _moments(inner: torch.optim.Optimizer) -> tuple[str, ...]:
    if isinstance(inner, torch.optim.Adam):
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if any(group["momentum"] for group in inner.param_groups) else ()


def parts_of(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers that one is chained of: dense and expert parameters have their own, if the rank has any."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if part.optimizer is not None]


def state_tensors(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """What the parts step on, and their state, so far as it is on the device: host tensors cost nothing there."""
    for part in parts_of(optimizer):
        inner = part.optimizer
        stepped = [parameter.data for group in inner.param_groups for parameter in group["params"]]
        state = [value for values in inner.state.values() for value in values.values() if torch.is_tensor(value)]
        offloaded = getattr(inner, "host_state", None)
        for tensor in stepped + state:
            if tensor.device == device.current_device() and not (offloaded and offloaded.holds(tensor)):
                yield tensor


def gradient_buffers(chunks: list[DistributedDataParallel]) -> Iterator[Tensor]:
    """The buffers into which gradients are summed."""
    for chunk in chunks:
        yield from (buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))


def _leave_rates_to_schedule(groups: list[dict[str, Any]], config: OptimizerConfig) -> None:
    """Leave in groups only the rates that ``--decoupled-lr`` and ``--decoupled-min-lr`` give them.

    megatron-core writes ``--lr`` and ``--min-lr`` in every other, where they go before the schedule's: before those
    of a checkpoint too, where the schedule is to be taken from it.
    """
    for group in groups:
        if group["default_config"]:
            del group["max_lr"]
        if group["default_config"] or config.decoupled_min_lr is None:
            del group["min_lr"]


def _fuse(optimizer: torch.optim.Adam | torch.optim.SGD) -> None:
    """Make its steps one kernel that reads and writes everything once, which megatron-core does not ask torch for.

    Otherwise weight decay in SGD makes a copy of all gradients, of four bytes a parameter.
    """
    for group in optimizer.param_groups:
        group.update(_FUSED)


def _keep_groups(optimizer: torch.optim.Optimizer) -> None:
    """Let a load bring the state of parameters only: what groups hold besides, as betas, is of this run's options.

    torch would take the groups of the checkpoint, and megatron-core finds them by keys that those of
    ``--decoupled-lr`` share with others: all would get the rates, or even the parameters, of one. The own ones also say
    that steps are fused, by which torch knows on which device ``step`` belongs.
    """

    def with_own_groups(own: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "param_groups": own.state_dict()["param_groups"]}

    optimizer.register_load_state_dict_pre_hook(with_own_groups)


def _allocate(optimizer: torch.optim.Adam | torch.optim.SGD) -> None:
    """Create the state that the first step would, which megatron-core 0.16 loads only where it was saved.

    Of Adam it saves the number of steps unless that is 0. SGD's first step from zeros is that from nothing; without
    momentum it has no state.
    """

    def with_steps(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "state": {key: {"step": torch.zeros(()), **own} for key, own in state["state"].items()}}

    if counts := isinstance(optimizer, torch.optim.Adam):
        optimizer.register_load_state_dict_pre_hook(with_steps)
    moments = _moments(optimizer)
    for parameter in [p for group in optimizer.param_groups for p in group["params"] if moments]:
        if parameter not in optimizer.state:
            step = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)} if counts else {}
            optimizer.state[parameter] = step | {kind: torch.zeros_like(parameter.data) for kind in moments}


def make_scheduler(args: Namespace, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Learning rate and weight decay by optimizer step, of ``num_rollout * num_steps_per_rollout`` in all.

    Unless ``--use-checkpoint-opt_param-scheduler`` is given, a resumed run takes the schedule of its own options, and
    from the checkpoint only how many steps were made. ValueError where a warm-up is not shorter than the decay, which
    with ``--num-epoch`` is first known here.
    """
    warmup_steps, decay_steps = warmup_and_decay_steps(args)
    start_decay, end_decay = weight_decays(args)
    from_checkpoint = args.use_checkpoint_opt_param_scheduler
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=args.lr_decay_style,
        start_wd=start_decay,
        end_wd=end_decay,
        wd_incr_steps=max(args.num_rollout * args.num_steps_per_rollout, 1),
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=from_checkpoint,
        override_opt_param_scheduler=not from_checkpoint,
        wsd_decay_steps=args.lr_wsd_decay_iters,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )
