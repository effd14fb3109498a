"""What takes the place of ``GPTModel.output_layer`` on the last pipeline stage.

An actor's model returns the final hidden states [1, T, h] of the whole local stream in place of logits; the loss takes
them, with `model.head_weight`, to what is in `slime.training.loss.log_probs`, which sends back one tensor-parallel
rank's part of their gradient: the head adds the parts up. A critic's model returns values, float32 [1, T, 1]. What a
16-bit model returns, Float16Module casts to float32, losslessly. Heads are modules that own their weight, because data
parallelism waits for parameters where a module is called.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from slime.models.family import VALUE_HEAD_KEY


def to_every_rank(hidden: Tensor, group: dist.ProcessGroup, sequence_parallel: bool) -> Tensor:
    """[T or, under sequence parallelism, T / tp, ...] -> [T, ...] on every rank; backward sums the ranks' gradients."""
    bring = gather_from_sequence_parallel_region if sequence_parallel else copy_to_tensor_model_parallel_region
    return cast(Tensor, bring(hidden, group=group))


class LanguageHead(ColumnParallelLinear):
    """The output layer without its product: it holds (or is given) the weight, and passes hidden states on."""

    def __init__(self, layer: ColumnParallelLinear) -> None:
        super().__init__(
            layer.input_size,
            layer.output_size,
            config=layer.config,
            init_method=layer.config.init_method,
            bias=False,
            skip_weight_param_allocation=True,
            tp_group=layer.tp_group,
        )
        self.weight = layer.weight

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """[T or, under sequence parallelism, T / tp, 1, h] -> [T, 1, h]; backward sums gradients over the ranks."""
        return to_every_rank(hidden, self.tp_group, self.sequence_parallel), None


class ValueHead(torch.nn.Module):
    """Linear(h, 1), computed in float32; every tensor-parallel rank computes all of it.

    The weight has the model's type, and like all others a float32 main copy in the optimizer: megatron-core 0.16.1
    trains a float32 parameter among 16-bit ones, but mixes up the optimizer state of such a model in checkpoints.
    """

    def __init__(self, config: TransformerConfig, group: dist.ProcessGroup, seed: int) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, config.sequence_parallel
        # From a generator of its own, on the CPU: the same on every rank and device.
        generator = torch.Generator().manual_seed(seed)
        weight = torch.empty(1, config.hidden_size).normal_(0.0, config.init_method_std, generator=generator)
        self.weight = torch.nn.Parameter(weight.to(config.params_dtype))

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """[T or, under sequence parallelism, T / tp, 1, h] -> float32 [T, 1, 1]."""
        if self.sequence_parallel:
            # All ranks then compute the same, and so each has the whole gradient already.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=self.group)
        return torch.nn.functional.linear(hidden.float(), self.weight.float()), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The weight, replicated, under `VALUE_HEAD_KEY`."""
        state = make_sharded_tensors_for_checkpoint(self.state_dict(keep_vars=True), prefix)
        state[f"{prefix}weight"].key = VALUE_HEAD_KEY
        return state
