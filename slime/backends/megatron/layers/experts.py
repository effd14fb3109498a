"""Experts of a mixture-of-experts layer as stacked matrices, all multiplied by one grouped matrix product of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import (
    CheckpointWithoutOutput,
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from slime.utils import device

_grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm
"""(a, b, *, offs); its public name is from torch 2.10."""


@dataclass(frozen=True)
class Groups:
    """How the rows of a matrix, sorted by expert, are divided among the experts."""

    counts: list[int]
    ends: Tensor
    """int32 [experts], on the rows' device: where each expert's rows end."""

    @classmethod
    def of(cls, tokens_per_expert: Tensor, where: torch.device) -> Groups:
        """From the dispatcher's counts, which are in host memory: nothing waits for the device."""
        ends = tokens_per_expert.cumsum(0, dtype=torch.int32)
        return cls(tokens_per_expert.tolist(), device.from_host(ends, where))


class _GroupedLinear(torch.autograd.Function):
    """Rows [t, k] of each expert times the transpose of its matrix, of ``weight`` [experts, n, k] -> [t, n].

    torch's own gradient refuses upstream gradients that are expanded or have no rows.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.groups = groups
        return _times(rows, weight.transpose(1, 2), groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        grad = grad.contiguous()
        need_rows, need_weight, _ = ctx.needs_input_grad
        grad_rows = _times(grad, weight, ctx.groups) if need_rows else None
        grad_weight = _outer(grad, rows, ctx.groups) if need_weight else None
        return grad_rows, grad_weight, None


def grouped_linear(rows: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """`torch.nn.functional.linear` of each expert's rows with its own matrix: rows [t, k], sorted by expert, and weight
    [experts, n, k] -> [t, n]."""
    return cast(Tensor, _GroupedLinear.apply(rows.contiguous(), weight, groups))


def _times(rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
    """[t, k] and [experts, k, n] -> [t, n]."""
    if _kernel_takes(rows, *matrices.shape[1:]):
        return cast(Tensor, _grouped_mm(rows, matrices, offs=groups.ends))
    out = rows.new_empty(rows.size(0), matrices.size(2))
    parts = zip(rows.split(groups.counts), matrices, out.split(groups.counts), strict=True)
    for own, matrix, target in parts:
        torch.mm(own, matrix, out=target)
    return out


def _outer(left: Tensor, right: Tensor, groups: Groups) -> Tensor:
    """[t, n] and [t, k] -> [experts, n, k], the sum over each expert's rows; 0 where it has none."""
    if _kernel_takes(left, left.size(1), right.size(1)):
        return cast(Tensor, _grouped_mm(left.t(), right, offs=groups.ends))
    out = left.new_empty(len(groups.counts), left.size(1), right.size(1))
    for own, other, target in zip(left.split(groups.counts), right.split(groups.counts), out, strict=True):
        torch.mm(own.t(), other, out=target)
    return out


def _kernel_takes(rows: Tensor, *widths: int) -> bool:
    """Whether torch has a grouped product for such rows and matrices of these widths.

    It wants rows of a multiple of 16 bytes. For other types than bfloat16 on a GPU it is a loop that waits for the
    device to know the groups, which the loop here knows.
    """
    types = (torch.bfloat16,) if rows.is_cuda else (torch.bfloat16, torch.float32)
    aligned = all(width * rows.element_size() % 16 == 0 for width in widths)
    return rows.dtype in types and aligned and rows.size(0) > 0


class StackedLinear(torch.nn.Module):
    """One matrix for every expert of this rank: ``weight`` [experts, outputs, inputs], cut along dimension ``cut``."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, cut: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device.current_device()))
        set_tensor_model_parallel_attributes(self.weight, True, cut, 1)
        # By this name Megatron sums gradients over the ranks with the same experts, and gives experts an optimizer of
        # their own. Its own experts have none without expert parallelism: their checkpoints then fit no other layout,
        # and where tensor parallelism cuts experts otherwise than the rest, gradients are not summed.
        self.weight.allreduce = False  # type: ignore[attr-defined]

    def forward(self, rows: Tensor, groups: Groups) -> Tensor:
        return grouped_linear(rows, self.weight, groups)


class Experts(MegatronModule):
    """This rank's experts, SwiGLU without biases, in the place of megatron-core's SequentialMLP.

    With expert tensor parallelism the outputs are parts of sums: the token dispatcher gathers tokens before and adds
    up after.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["ep", "expt_tp", "expt_dp"])
        self.ep_group, self.tp_group, self.dp_group = groups.ep, groups.expt_tp, groups.expt_dp
        ffn = config.moe_ffn_hidden_size // self.tp_group.size()
        experts, hidden, dtype = num_local_experts, config.hidden_size, config.params_dtype
        self.linear_fc1 = StackedLinear((experts, 2 * ffn, hidden), dtype, 1)
        self.linear_fc2 = StackedLinear((experts, hidden, ffn), dtype, 2)
        if config.perform_initialization:
            # Every rank draws other numbers from this generator.
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                config.init_method(self.linear_fc1.weight)
                config.output_layer_init_method(self.linear_fc2.weight)
        self.recompute_activation = (
            config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules
        )

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Outputs of tokens [t, h], sorted by expert, weighted by the router's probabilities [t], and no bias;
        ``tokens_per_expert`` is int64 [experts], in host memory."""
        groups = Groups.of(tokens_per_expert, hidden.device)
        inner = self.linear_fc1(hidden, groups)
        if not self.recompute_activation:
            return self.linear_fc2(self._activate(inner, probs), groups), None
        checkpoint = CheckpointWithoutOutput(fp8=None)
        out = self.linear_fc2(checkpoint.checkpoint(self._activate, inner, probs), groups)
        checkpoint.discard_output_and_register_recompute(out)
        return out, None

    def _activate(self, inner: Tensor, probs: Tensor) -> Tensor:
        """[t, 2 * f] -> [t, f]; in the probabilities' precision, rounded once."""
        if self.config.bias_activation_fusion:
            store_in_fp8 = self.config.activation_func_fp8_input_store
            return cast(Tensor, weighted_bias_swiglu_impl(inner, None, probs[:, None], store_in_fp8))
        gate, up = inner.chunk(2, dim=-1)
        return (F.silu(gate) * up * probs[:, None]).to(inner.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The names and global shapes that SequentialMLP gives its experts: [..., experts, outputs, inputs].

        Gate and up projection are separate halves there, since tensor parallelism cuts either.
        """
        axis, replica_id = len(sharded_offsets), (0, 0, self.dp_group.rank())
        tp_rank, tp_size = self.tp_group.rank(), self.tp_group.size()
        ep_rank, ep_size = self.ep_group.rank(), self.ep_group.size()

        def part(key: str, data: Tensor, replica_id: Any, *offsets: tuple[int, int, int]) -> ShardedTensor:
            return ShardedTensor.from_rank_offsets(
                key, data, *sharded_offsets, *offsets, replica_id=replica_id, prepend_axis_num=axis
            )

        def halves(key: str, data: Tensor, replica_id: Any, _: Any = None) -> list[ShardedTensor]:
            """Expert by expert, so that each is a part of the parameter's memory and no copy."""
            parts, count = [], data.size(0)
            for i, matrix in enumerate(data.detach().split(1)):
                for half, rows in enumerate(matrix.chunk(2, dim=1)):
                    expert = (axis, ep_rank * count + i, ep_size * count)
                    parts.append(part(key, rows, replica_id, expert, (axis + 1, half * tp_size + tp_rank, 2 * tp_size)))
            return parts

        def whole(parts: list[Tensor]) -> Tensor:
            return torch.cat(parts, dim=1).view(self.linear_fc1.weight.shape)

        keys = [f"{prefix}experts.linear_fc{i}.weight" for i in (1, 2)]
        cut = (axis, ep_rank, ep_size), (axis + 2, tp_rank, tp_size)
        return {
            f"{prefix}linear_fc1.weight": ShardedTensorFactory(
                keys[0], self.linear_fc1.weight, halves, whole, replica_id
            ),
            f"{prefix}linear_fc2.weight": part(keys[1], self.linear_fc2.weight, replica_id, *cut),
        }
