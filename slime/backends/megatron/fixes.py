"""Defects of megatron-core that are put right from outside, on every host; the records of `patches` call these."""

from __future__ import annotations

import contextlib
import importlib.util
import queue
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slime.options.training import import_transformer_engine

_OTHER_OPTIMIZERS = ("transformer_engine.pytorch.optimizers", "apex.optimizers", "amp_C")


@contextlib.contextmanager
def only_torchs_optimizers() -> Iterator[None]:
    """Hides the optimizers of Transformer Engine and Apex while Megatron is imported: they make their state late, and
    name it otherwise in checkpoints.

    Late is after memory for it was planned. Whether a package is there must not decide how a run trains, or who can
    resume it.
    """
    if importlib.util.find_spec("transformer_engine") is not None:
        try:
            import_transformer_engine()  # needs its own optimizers for that
        except ImportError as error:
            raise ImportError(
                f"transformer_engine is installed, but cannot be imported ({error}): "
                "complete it as docs/install.md says, or uninstall it"
            ) from error
    hidden = {name: sys.modules.get(name) for name in _OTHER_OPTIMIZERS}
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: importing it fails
    try:
        yield
    finally:
        for name, module in hidden.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def use_torchs_product_in_routers() -> None:
    """Has MoE routers multiply by torch, with Transformer Engine installed or not; without, they read a name that was
    never bound."""
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None


def fix_latent_attention_without_transformer_engine() -> None:
    """Has multi-latent attention not ask for instances of Transformer Engine's classes where a mock stands for it: a
    TypeError."""
    from megatron.core.transformer import multi_latent_attention

    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False


def fix_order_of_experts() -> None:
    """Adds up a token's experts in one order each time."""
    from megatron.core.transformer.moe import token_dispatcher

    from slime.backends.megatron.layers import permutation

    token_dispatcher.permute, token_dispatcher.unpermute = permutation.permute, permutation.unpermute


def fix_distributed_optimizer_load() -> None:
    """Has the distributed optimizer load AdamW's state, with a step of its own for each parameter.

    It is a ``KeyError: 'step'`` else. AdamW advances ``step`` in place once per parameter, so a shared one makes a
    resumed run silently wrong.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    inner = DistributedOptimizer._set_main_param_and_optimizer_states

    @torch.no_grad()
    def load(self: Any, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state:
            state["step"] = state["step"].clone()
            tensors = {**tensors, "step": state["step"]}
        inner(self, model_param, tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = load


def fix_checkpoints_of_padded_buckets() -> None:
    """Stores optimizer state behind a padded bucket where it belongs, not shifted by the padding.

    A tied embedding has a bucket of its own.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    inner = DistributedOptimizer.sharded_param_state_fully_reshardable

    def sharded(self: Any, *args: Any, **kwargs: Any) -> Any:
        padded = [buffer.param_index_map for buffer in self.buffers]
        for buffer in self.buffers:
            buffer.param_index_map = offsets_without_padding(buffer)
        try:
            return inner(self, *args, **kwargs)
        finally:
            for buffer, offsets in zip(self.buffers, padded, strict=True):
                buffer.param_index_map = offsets

    DistributedOptimizer.sharded_param_state_fully_reshardable = sharded


def offsets_without_padding(buffer: Any) -> dict[Any, tuple[int, int, int]]:
    """A gradient buffer's parameters, each with start, end and bucket, as if no bucket ended in padding."""
    shifts, data = [], 0
    for bucket in buffer.buckets:
        shifts.append(bucket.offset - data)
        data += bucket.numel_unpadded
    return {
        parameter: (start - shifts[bucket], end - shifts[bucket], bucket)
        for parameter, (start, end, bucket) in buffer.param_index_map.items()
    }


def collect_results_in_this_process() -> None:
    """Collects what a save's writers did in the rank itself, not in a server process, which takes seconds to start and
    outlives a killed trainer.

    To be called before each save: what one that failed left in the queue is not the next one's.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()
