"""Tensors of a trainer's models, gathered over all ranks under the names that Hugging Face gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron.layers.head import ValueHead
from slime.backends.megatron.learner import MegatronLearner
from slime.backends.megatron.model import unwrap
from slime.backends.megatron.trainer import MegatronTrainer
from slime.backends.megatron.weights import weights_io
from slime.backends.megatron.weights.gather import Gatherer
from slime.models.adapters import is_adapter_name
from tests.parallel.outcome import CRITIC, VALUE_HEAD, Tensors

Pick = Callable[[Any], Tensor]


def learners_of(trainer: MegatronTrainer) -> dict[str, MegatronLearner]:
    """What is before the names of each one's tensors, and the learner."""
    return {"": trainer._actor} | ({CRITIC: trainer._critic} if trainer._critic else {})


def weights(trainer: MegatronTrainer) -> Tensors:
    """Of the actor and its adapters, and of the critic if there is one."""
    every = adapters(trainer) if trainer.args.lora_rank else {}
    for prefix, learner in learners_of(trainer).items():
        every |= gathered(trainer, learner, prefix)
    return every


def adapters(trainer: MegatronTrainer) -> Tensors:
    """Of the actor, by PEFT's names, as engines get them."""
    targets = trainer.args.lora_target_modules
    with mock.patch.object(trainer.args, "lora_sync", "adapter"):
        named = (named for bucket in trainer.export_buckets(1) for named in bucket)
        return {name: tensor.clone() for name, tensor in named if is_adapter_name(name, targets)}


@torch.no_grad()
def gathered(trainer: MegatronTrainer, learner: MegatronLearner, prefix: str, pick: Pick | None = None) -> Tensors:
    """All weights, or ``pick`` of all parameters, as this rank gathers them."""
    chunks = learner.model_chunks
    tensors_of = weights_io.global_weights(chunks) if pick is None else weights_io.global_parameters(chunks, pick)
    parameters = dict(tensors_of)
    buckets = Gatherer(parameters, trainer.family, trainer.shape).buckets(2**30, parameters.__getitem__)
    tensors = {prefix + name: tensor.clone() for bucket in buckets for name, tensor in bucket}
    if prefix == CRITIC:
        tensors[VALUE_HEAD] = _value_head(learner, pick or torch.Tensor.detach)
    return tensors


def _value_head(learner: MegatronLearner, pick: Pick) -> Tensor:
    """Of the ranks that have it, which all must have the same."""
    head = getattr(unwrap(learner.model_chunks[-1]), "output_layer", None)
    heads: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(heads, pick(head.weight).cpu() if isinstance(head, ValueHead) else None)
    first, *others = (head for head in heads if head is not None)
    assert all(torch.allclose(first, other, rtol=1e-5, atol=1e-7) for other in others)
    return first


def note_gradients(trainer: MegatronTrainer) -> dict[str, list[Tensors]]:
    """Lists that fill with the gathered gradients of every step, before they are clipped; by the prefixes of names."""
    noted: dict[str, list[Tensors]] = {}
    for prefix, learner in learners_of(trainer).items():
        noted[prefix] = []
        learner._optimizer.step = _noting(trainer, learner, prefix, noted[prefix])
    return noted


def _noting(trainer: MegatronTrainer, learner: MegatronLearner, prefix: str, noted: list[Tensors]) -> Callable[[], Any]:
    step = learner._optimizer.step

    def noting() -> Any:
        for chunk in learner.chunks:
            _gather_shards(chunk)
        noted.append(gathered(trainer, learner, prefix, lambda parameter: parameter.main_grad))
        return step()

    return noting


def _gather_shards(chunk: Any) -> None:
    """Of a distributed optimizer, where each rank has the sum of its own part only."""
    if not chunk.ddp_config.use_distributed_optimizer:
        return
    for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            shard = bucket.grad_data.view(ranks.size(), -1)[ranks.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, shard, group=ranks)
