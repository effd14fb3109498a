"""Low-rank adapters (LoRA, arXiv:2106.09685) beside the linear layers of a Megatron model, cut as these are.

A layer's output gets ``scale * (x A^T) B^T`` added, with one pair of matrices for each Hugging Face layer that it is
put together of (`slime.models.adapters`), as PEFT has it. Everything else of the model is frozen.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.nn.functional import linear

from slime.backends.megatron.layers.experts import Groups, StackedLinear, grouped_linear
from slime.backends.megatron.layers.head import to_every_rank
from slime.backends.megatron.layers.latent_attention import ReplicatedLinear
from slime.backends.megatron.model import expert_name, global_namer, local_experts
from slime.models import Family, Shape
from slime.models.adapters import row_sources, targeted_modules, targeted_sources
from slime.models.family import ADAPTER_MARK, Row, fused_gate_up, gate_up
from slime.options import lora as options
from slime.utils import device

Exchange = Callable[[Tensor], Tensor]

_MERGED_NUMEL = 2**26
"""How many numbers of a layer's experts are merged at once: 256 MiB, which are float32 meanwhile."""


@dataclass(frozen=True)
class LoraSettings:
    """Which layers get adapters, and of which kind."""

    rank: int
    alpha: float
    """What adapters add is scaled by ``alpha / rank``."""
    targets: tuple[str, ...]
    """Names of Hugging Face modules as PEFT takes them, or ``all-linear``."""
    seed: int

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class Adapter(torch.nn.Module):
    """The adapters of one Megatron layer; ``forward`` gives what they add to its output.

    Attributes:
        a: [targeted sources * rank, inputs], and for experts [experts, ...].
        b: [outputs, rank], and for experts [experts, ...].
        cut: the dimension of the layer's matrix that tensor parallelism cuts: 0, outputs, or 1, inputs; None: neither.
        halved: whether the outputs of each tensor-parallel rank are two halves (gate and up), each of them cut.
    """

    def __init__(
        self, a: Tensor, outputs: int, row: Row, settings: LoraSettings, own: Tensor | None, exchange: Exchange
    ) -> None:
        """
        Args:
            a: the initial value.
            outputs: rows of this rank's shard of the layer's matrix.
            row: of the layer's matrix in its family's table.
            own: bool [outputs, targeted sources], whose rows are whose; None where all are of one.
            exchange: brings ``x A^T`` from where the input is to where the output is wanted.
        """
        super().__init__()
        self.cut, self.halved, self.scale = row.dim, row.rule in (gate_up, fused_gate_up), settings.scale
        self.a = torch.nn.Parameter(a)
        self.b = torch.nn.Parameter(a.new_zeros(*a.shape[:-2], outputs, settings.rank))
        self.own: Tensor | None
        self.register_buffer("own", own, persistent=False)
        self._exchange = exchange

    def forward(self, inputs: Tensor, groups: Groups | None = None) -> Tensor:
        """Inputs of the layer -> what is added to its output; ``groups`` tell experts whose rows are whose."""
        times = linear if groups is None else partial(grouped_linear, groups=groups)
        inner = self._exchange(times(inputs, self.a))
        return times(inner, _wide(self.b, self.own)) * self.scale

    def cuts(self, which: str) -> bool:
        """Whether tensor parallelism cuts matrix ``a`` or ``b``, along `cut`."""
        return self.cut == {"a": 1, "b": 0}[which]

    def merged(self, weight: Tensor, experts: slice = slice(None)) -> Tensor:
        """The layer's matrix with what does the same added to it; of experts, those asked for. Its type stays."""
        a, b = self.a.detach()[experts], self.b.detach()[experts]
        delta = (_wide(b.float(), self.own) @ a.float()).mul_(self.scale)
        return delta.add_(weight.detach()[experts]).to(weight.dtype)


def _wide(b: Tensor, own: Tensor | None) -> Tensor:
    """[..., outputs, rank] -> [..., outputs, sources * rank], 0 but in the columns of each row's own source."""
    if own is None:
        return b
    return (b.unsqueeze(-2) * own.unsqueeze(-1)).flatten(-2)


def attach(chunks: Sequence[torch.nn.Module], family: Family, shape: Shape, settings: LoraSettings) -> None:
    """Put adapters on the targeted layers and freeze everything else, before data-parallel wrapping.

    What they add is 0 at first. Initial weights depend on the seed and the layer only, not on the parallel layout.
    ValueError where a targeted layer is none that adapters are known for.
    """
    for chunk in chunks:
        chunk.requires_grad_(False)
        chunk.adapted = options.described(settings.rank, settings.alpha, settings.targets)  # type: ignore[assignment]
        chunk.modules_of = partial(targeted_modules, family, shape)  # type: ignore[assignment]
        global_name = global_namer(chunk)
        for name, module in list(chunk.named_modules()):
            row = _row_of(family, name, module)
            if row is not None and any(targeted_sources(row, settings.targets)):
                module.lora = _make(global_name(name), module, row, shape, settings)
                module.register_forward_hook(_add)
        if chunk.pre_process:
            # Recomputed layers only have gradients where an input wants one, which frozen embeddings do not.
            chunk.get_submodule("embedding").register_forward_hook(lambda _, __, hidden: hidden.requires_grad_())


def adapters(chunk: torch.nn.Module) -> Iterator[tuple[str, Adapter]]:
    """(name within the chunk of the layer, its adapter)."""
    for name, module in chunk.named_modules():
        if isinstance(module, Adapter):
            yield name.removesuffix(".lora"), module


def described(chunks: Sequence[torch.nn.Module]) -> dict[str, Any] | None:
    """The settings that `attach` was called with, the same on every rank; None if it was not."""
    return cast("dict[str, Any] | None", getattr(chunks[0], "adapted", None))


def _add(module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    more = cast(Adapter, module.lora)(*inputs)
    return (output[0] + more, *output[1:]) if isinstance(output, tuple) else output + more


def _row_of(family: Family, name: str, module: torch.nn.Module) -> Row | None:
    if not isinstance(getattr(module, "weight", None), Tensor):
        return None
    try:
        return family.row(expert_name(f"{name}.weight", 0))[0]
    except KeyError:
        return None


def _make(name: str, module: Any, row: Row, shape: Shape, settings: LoraSettings) -> Adapter:
    rank = module.tp_group.rank() if isinstance(module, (ColumnParallelLinear, RowParallelLinear)) else 0
    chosen = targeted_sources(row, settings.targets)
    outputs, inputs = module.weight.shape[-2:]
    a = _initial(name, module, inputs, sum(chosen), settings)
    sources = torch.tensor(row_sources(row, shape, outputs, rank), device=a.device)
    own = torch.stack([sources == source for source, is_targeted in enumerate(chosen) if is_targeted], dim=1)
    adapter = Adapter(a, outputs, row, settings, None if len(chosen) == 1 else own, _exchange(name, module))
    _mark(adapter, module)
    return adapter


def _initial(name: str, module: Any, inputs: int, sources: int, settings: LoraSettings) -> Tensor:
    """This rank's part of ``a``: uniform as `torch.nn.Linear` has it, from a generator of the layer's own."""
    cut = isinstance(module, RowParallelLinear)
    tp_size = module.tp_group.size() if cut else 1
    leading = module.weight.shape[:-2]
    first = leading[0] * parallel_state.get_expert_model_parallel_rank() if leading else 0
    bound = 1 / math.sqrt(inputs * tp_size)
    matrices = []
    for expert in range(first, first + leading[0]) if leading else (0,):
        seed = hashlib.sha256(f"{settings.seed} {name} {expert}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed[:7], "big"))
        whole = torch.empty(sources * settings.rank, inputs * tp_size).uniform_(-bound, bound, generator=generator)
        matrices.append(whole.chunk(tp_size, dim=1)[module.tp_group.rank()] if cut else whole)
    values = torch.stack(matrices) if leading else matrices[0]
    return values.to(device=device.current_device(), dtype=module.weight.dtype).contiguous()


def _exchange(name: str, module: Any) -> Exchange:
    if isinstance(module, StackedLinear) and parallel_state.get_expert_tensor_parallel_world_size() > 1:
        raise ValueError(f"adapters of {name}: experts must be whole; add --expert-tensor-parallel-size 1")
    if isinstance(module, (StackedLinear, ReplicatedLinear)):
        return lambda inner: inner
    if isinstance(module, ColumnParallelLinear) and not module.gather_output:
        return partial(to_every_rank, group=module.tp_group, sequence_parallel=module.sequence_parallel)
    if isinstance(module, RowParallelLinear) and module.input_is_parallel:
        by_part, whole = reduce_scatter_to_sequence_parallel_region, reduce_from_tensor_model_parallel_region
        return partial(by_part if module.sequence_parallel else whole, group=module.tp_group)
    raise ValueError(f"adapters of {name}: not known for a {type(module).__name__} of this kind")


def _mark(adapter: Adapter, module: Any) -> None:
    """Tell Megatron which weights ranks share, and whose gradients are parts of sums."""
    for which, parameter in adapter.named_parameters():
        if isinstance(module, StackedLinear):
            parameter.allreduce = False  # type: ignore[attr-defined]
            # Without, the gradient norm leaves them out on all tensor-parallel ranks but the first.
            set_tensor_model_parallel_attributes(parameter, True, cast(int, adapter.cut) + 1, 1)
        elif adapter.cuts(which):
            set_tensor_model_parallel_attributes(parameter, True, adapter.cut, 1)
        else:
            # Each rank then computes the shared matrix's gradient of its own part of the sequence.
            parameter.sequence_parallel = module.sequence_parallel  # type: ignore[attr-defined]


# ---- merged weights


def merging(parameters: Mapping[str, Tensor], chunks: Sequence[torch.nn.Module]) -> Callable[[str], Tensor]:
    """Global name -> the parameter with what its adapter adds, of the same shape and type, made when it is asked for.

    Any other parameter is itself. Experts are made several at once, which are kept until others are asked for.
    """
    made: dict[str, Callable[[], dict[str, Tensor]]] = {}
    for chunk in chunks:
        global_name, experts = global_namer(chunk), local_experts(chunk)
        for name, adapter in adapters(chunk):
            weight, matrix = f"{global_name(name)}.weight", cast(Tensor, chunk.get_submodule(name).weight)
            if adapter.a.dim() == 2:
                made[weight] = partial(_merged, [weight], adapter, matrix)
                continue
            at_once = max(1, _MERGED_NUMEL // matrix[0].numel())
            for part in (slice(first, first + at_once) for first in range(0, len(experts), at_once)):
                names = [expert_name(weight, number) for number in experts[part]]
                made |= dict.fromkeys(names, partial(_merged, names, adapter, matrix, part))
    kept: dict[str, Tensor] = {}

    def read(name: str) -> Tensor:
        nonlocal kept
        if name not in made:
            return parameters[name]
        if name not in kept:
            kept = {}  # which are gone before the next are made
            kept = made[name]()
        return kept[name]

    return read


def _merged(names: list[str], adapter: Adapter, weight: Tensor, experts: slice | None = None) -> dict[str, Tensor]:
    tensors = [adapter.merged(weight)] if experts is None else adapter.merged(weight, experts)
    return dict(zip(names, tensors, strict=True))


# ---- checkpoints


def sharded_state(chunk: torch.nn.Module) -> dict[str, Any]:
    """What a checkpoint holds of a chunk: its adapters, whatever layout they are loaded in; {} where it has none."""
    global_name = global_namer(chunk)
    state = {}
    for name, adapter in adapters(chunk):
        for which, parameter in adapter.named_parameters():
            key = f"{global_name(name)}{ADAPTER_MARK}{which}"
            state[f"{name}{ADAPTER_MARK}{which}"] = _sharded(key, parameter, adapter, adapter.cuts(which))
    return state


def _sharded(key: str, parameter: Tensor, adapter: Adapter, is_cut: bool) -> Any:
    if parameter.dim() == 3:
        rank, size = (
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_world_size(),
        )
        replica = (0, 0, parallel_state.get_expert_data_parallel_rank())
        return ShardedTensor.from_rank_offsets(key, parameter, (0, rank, size), replica_id=replica)
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    data_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    if not is_cut:
        return ShardedTensor.from_rank_offsets(key, parameter, replica_id=(0, rank, data_rank))
    if not adapter.halved:
        return ShardedTensor.from_rank_offsets(key, parameter, (adapter.cut, rank, size), replica_id=(0, 0, data_rank))

    def halves(key: str, data: Tensor, replica_id: Any, _: Any = None) -> list[ShardedTensor]:
        return [
            ShardedTensor.from_rank_offsets(key, rows, (0, half * size + rank, 2 * size), replica_id=replica_id)
            for half, rows in enumerate(data.chunk(2))
        ]

    return ShardedTensorFactory(key, parameter, halves, torch.cat, (0, 0, data_rank))
