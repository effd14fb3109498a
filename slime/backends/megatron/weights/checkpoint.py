"""Checkpoints: what megatron-core's torch_dist format holds of a trainer, in a directory of `checkpoint_dirs`."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.utils import (
    add_prefix_for_sharding,
    extract_nonpersistent,
    extract_sharded_base,
    extract_sharded_tensors_and_factories,
)
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slime.backends.megatron import lora, patches
from slime.backends.megatron.frozen import is_partly_frozen
from slime.backends.megatron.model import has_heads
from slime.backends.megatron.optimizer import parts_of
from slime.backends.megatron.weights import lora_base
from slime.backends.megatron.weights.checkpoint_validation import check_torch_dist
from slime.files.checkpoints import COMMON
from slime.models.family import VALUE_HEAD_KEY, holds_heads
from slime.options.lora import check_adapters, check_base
from slime.options.mtp import check_saved_heads
from slime.utils import device
from slime.utils.errors import BadInputError

logger = logging.getLogger(__name__)


def save_state(
    directory: str,
    model_chunks: Sequence[Any],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    trained: dict[str, list[str]] | None = None,
) -> None:
    """Write model, optimizer, scheduler and random state of all ranks into an empty directory, and by which options
    only some parameters are trained; collective."""
    state = model_state(model_chunks)
    state["optimizer"] = _with_parts_of_other_stages(
        optimizer, _optimizer_state(optimizer, _named(model_chunks, state))
    )
    state["scheduler"] = scheduler.state_dict()
    state["rng_state"] = _sharded_rng_state()
    state["layout"] = _layout()
    state["distributed_optimizer"] = _is_distributed(optimizer)
    state["optimizer_kind"] = _kind(optimizer)
    state["adapters"] = lora.described(model_chunks)
    state["base"] = lora_base.recorded(model_chunks)
    state["heads"] = has_heads(model_chunks)
    state["trained"] = trained or {}
    _save(state, directory)


def save_weights(directory: Path, model_chunks: Sequence[Any]) -> None:
    """Write the weights alone that the model holds, or its adapters, into a new directory; collective."""
    directory.mkdir(exist_ok=True)  # by whoever is first: all ranks have one file system
    dist.barrier()
    _save(model_state(model_chunks), str(directory))


def _save(state: dict[str, Any], directory: str) -> None:
    """With `COMMON`, which every release reads and tools look into; 0.19 of megatron-core writes none.

    Of what data-parallel ranks have alike each writes a part.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), group)
    unpin_mixed(state)
    patches.prepare_save()
    dist_checkpointing.save(state, directory, strategy)
    if dist.get_rank() == 0 and not Path(directory, COMMON).exists():
        torch.save(dist_checkpointing.load_common_state_dict(directory), Path(directory, COMMON))


def unpin_mixed(state: dict[str, Any]) -> None:
    """Have what is stored as one tensor, such as a matrix of all layers, in pinned memory as a whole or not at all, as
    torch wants it: of an optimizer in host memory (``--optimizer-cpu-offload``) some layers may be on the device, or be
    put together of several ranks' parts."""
    by_key: dict[str, list[Any]] = {}
    for stored in nested_values(extract_sharded_tensors_and_factories(state)[0]):
        by_key.setdefault(stored.key, []).append(stored)
    for alike in by_key.values():
        pinned = [stored for stored in alike if stored.data.is_pinned()]
        for stored in pinned if len(pinned) < len(alike) else ():
            stored.data = torch.empty_like(stored.data, pin_memory=False).copy_(stored.data)


def load_weights(directory: Path, model_chunks: Sequence[Any]) -> None:
    """Read what `save_weights` has written of this model; collective."""
    _put_model(dist_checkpointing.load(model_state(model_chunks), str(directory)), model_chunks)


def load_model(directory: str | Path, model_chunks: Sequence[Any]) -> None:
    """Read the weights only, whatever parallel layout they were saved from; collective.

    The value head of a critic, which an actor's checkpoint lacks, keeps its initial weight. ValueError where it holds
    another model's weights, or heads on one side only.
    """
    present = dist_checkpointing.load_tensors_metadata(str(directory))
    _check_heads(directory, holds_heads(present), has_heads(model_chunks))
    check_torch_dist(directory, present, model_state(model_chunks), model_chunks)
    state = model_state(model_chunks)
    for chunk_state in state.values() if VALUE_HEAD_KEY not in present else ():
        for name in [n for n, tensor in chunk_state.items() if getattr(tensor, "key", None) == VALUE_HEAD_KEY]:
            del chunk_state[name]
    _put_model(dist_checkpointing.load(state, str(directory)), model_chunks, strict=False)


def load_state(
    directory: str | Path,
    model_chunks: Sequence[Any],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
) -> None:
    """Continue from what `save_state` wrote: training then goes on as if it had never stopped; collective.

    Random state of another tensor or pipeline layout belongs to no rank of this one: it stays as seeded, with a
    warning. ValueError where model, adapters, their base, heads, or the kind of optimizer are others.
    """
    saved = dist_checkpointing.load_common_state_dict(str(directory))
    modules_of = getattr(model_chunks[0], "modules_of", set)
    check_adapters(directory, saved.get("adapters"), lora.described(model_chunks), modules_of)
    check_base(directory, saved.get("base"), lora_base.recorded(model_chunks))
    check_saved_heads(directory, bool(saved.get("heads")), has_heads(model_chunks))
    own = _kind(optimizer)
    if (kind := saved.get("optimizer_kind", own)) != own:
        raise BadInputError(
            f"{directory} was saved by {kind}, and this run has {own}: take the former, or start from its weights "
            "alone by --ref-load, with another --save"
        )
    if saved["distributed_optimizer"] != _is_distributed(optimizer):
        flag = "--use-distributed-optimizer" if saved["distributed_optimizer"] else "--no-use-distributed-optimizer"
        raise BadInputError(f"{directory} was saved with {flag}, and its optimizer state can only be loaded with it")
    if lora.described(model_chunks) is None:
        present = dist_checkpointing.load_tensors_metadata(str(directory))
        check_torch_dist(directory, present, model_state(model_chunks), model_chunks)
    state = model_state(model_chunks)
    state["optimizer"] = _optimizer_state(optimizer, _named(model_chunks, state), is_loading=True)
    for _, of_torch in _states_of_torch(optimizer, state["optimizer"]):
        del of_torch["param_groups"]  # the checkpoint may have another number of them, which is an error
    same_layout = saved["layout"] == _layout()
    if same_layout:
        state["rng_state"] = _sharded_rng_state()
    else:
        logger.warning(f"{directory} has {saved['layout']}, this run {_layout()}: its random state is not restored")
    unpin_mixed(state)
    loaded = dist_checkpointing.load(state, str(directory))
    _put_model(loaded, model_chunks)
    for part, of_torch in _states_of_torch(optimizer, loaded["optimizer"]):
        steps = {key: value for group in of_torch["param_groups"] for key, value in group.items() if key == "step"}
        # Which of the checkpoint's would be which, Megatron tells by their rates, and these may be others now.
        of_torch["param_groups"] = [group | steps for group in part.optimizer.state_dict()["param_groups"]]
        of_torch.setdefault("state", {})  # SGD without momentum has none, and what is empty is not stored
    _load_optimizer(optimizer, loaded["optimizer"])
    scheduler.num_steps = 0  # it adds those of the checkpoint
    scheduler.load_state_dict(loaded["scheduler"])
    scheduler.step(0)  # it set the weight decay before it took that of the checkpoint
    if same_layout:
        _set_rng_state(loaded["rng_state"][0])


# ---- state


def _metadata() -> dict[str, Any]:
    """Optimizer shards are saved in the model's shape, so that another data-parallel size can read them."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _chunk_key(model_chunks: Sequence[Any], i: int) -> str:
    return f"model{i}" if len(model_chunks) > 1 else "model"


def model_state(model_chunks: Sequence[Any], **more: Any) -> dict[str, Any]:
    """What is stored of the weights: megatron-core's sharded tensors, by pipeline chunk and name.

    Of a model with adapters these alone: what is frozen is where it came from.
    """
    return {
        _chunk_key(model_chunks, i): chunk.sharded_state_dict(metadata=_metadata() | more)
        if lora.described(model_chunks) is None
        else lora.sharded_state(chunk)
        for i, chunk in enumerate(model_chunks)
    }


def _named(model_chunks: Sequence[Any], state: dict[str, Any]) -> dict[str, Any]:
    """By which names the optimizer's state is stored: those of `model_state`, where layers share one; with frozen
    parameters each layer has its own, as there would be gaps in one."""
    return model_state(model_chunks, non_homogeneous_layers=True) if is_partly_frozen(model_chunks) else state


def _check_heads(directory: str | Path, found: bool, wanted: bool) -> None:
    if wanted and not found:
        raise BadInputError(
            f"{directory} has no MTP heads, which --enable-mtp-training trains: convert the model with this flag"
        )
    if found and not wanted:
        logger.warning(
            f"{directory} has MTP heads, which are left out: saved models have those of "
            "--hf-checkpoint; --enable-mtp-training takes and trains them"
        )


def _put_model(loaded: dict[str, Any], model_chunks: Sequence[Any], strict: bool = True) -> None:
    for i, chunk in enumerate(model_chunks):
        chunk.load_state_dict(
            loaded[_chunk_key(model_chunks, i)], strict=strict and lora.described(model_chunks) is None
        )


def _layout() -> dict[str, int]:
    return {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
    }


def _optimizer_state(
    optimizer: MegatronOptimizer, model: dict[str, Any], *, is_loading: bool = False
) -> dict[Any, Any]:
    """What is stored of an optimizer, by number where dense and expert parameters have their own.

    megatron-core 0.16.1 fails where one of them has no parameters: on a pipeline stage without experts.
    """
    if not _lacks_parts(optimizer):
        return dict(optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=_metadata()))
    state: dict[Any, Any] = {}
    for i, part in enumerate(optimizer.chained_optimizers):
        if _has_parameters(part):
            state[i] = part.sharded_state_dict(model, is_loading=is_loading, metadata=_metadata())
            add_prefix_for_sharding(state[i], f"chained_{i}.")
    return state


def _with_parts_of_other_stages(optimizer: MegatronOptimizer, state: dict[Any, Any]) -> dict[Any, Any]:
    """``state``, with what ranks have in common of parts that this one lacks: what the first rank has is saved."""
    count = len(getattr(optimizer, "chained_optimizers", [optimizer]))
    if count == 1:
        return state
    common = {i: extract_sharded_base(extract_nonpersistent(state[i])[1])[1] for i in range(count) if i in state}
    group = parallel_state.get_pipeline_model_parallel_group()
    of_stages: list[dict[int, Any]] = [{}] * group.size()
    dist.all_gather_object(of_stages, common, group=group)
    for own in of_stages:
        state = {**own, **state}
    return state


def _load_optimizer(optimizer: MegatronOptimizer, loaded: dict[Any, Any]) -> None:
    if not _lacks_parts(optimizer):
        optimizer.load_state_dict(loaded)
        return
    for i, part in enumerate(optimizer.chained_optimizers):
        if _has_parameters(part):
            part.load_state_dict(loaded[i])


def _states_of_torch(optimizer: MegatronOptimizer, state: dict[Any, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Each part, with what ``state`` has of torch's optimizer in it."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    for i, part in enumerate(parts):
        if _has_parameters(part):
            of_part = state[i] if len(parts) > 1 else state
            yield part, of_part.get("optimizer", of_part)


def _lacks_parts(optimizer: MegatronOptimizer) -> bool:
    return not all(_has_parameters(part) for part in getattr(optimizer, "chained_optimizers", []))


def _has_parameters(part: MegatronOptimizer) -> bool:
    if part.optimizer is None:
        return False
    if isinstance(part, DistributedOptimizer):  # of small models a rank may have no share, yet take part
        return bool(part.buffers)
    return any(group["params"] for group in part.optimizer.param_groups)


def _is_distributed(optimizer: MegatronOptimizer) -> bool:
    return any(isinstance(part, DistributedOptimizer) for part in parts_of(optimizer))


def _kind(optimizer: MegatronOptimizer) -> str:
    """The options by which an optimizer keeps one state of each parameter or another."""
    config = optimizer.config
    if config.optimizer != "sgd":
        return f"--optimizer {config.optimizer}"
    return f"--optimizer sgd with --sgd-momentum {'above 0' if config.sgd_momentum else '0'}"


def _sharded_rng_state() -> ShardedObject:
    """Tensor and pipeline ranks have their own generators, data-parallel ones the same."""
    state: dict[str, Any] = {
        "random": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    if device.is_cuda():
        state["device"] = torch.get_device_module(device.current_device()).get_rng_state()
    return ShardedObject(
        "rng_state",
        [state],
        (
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_world_size(),
        ),
        (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["random"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
    if "device" in state:
        torch.get_device_module(device.current_device()).set_rng_state(state["device"])
