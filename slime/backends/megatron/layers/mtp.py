"""MTP heads (multi-token prediction): the model's part for speculative decoding, and its loss.

Head k reads at position t what the model (or head k - 1) made of t and the embedding of token t + k, and predicts token
t + k + 1 through the model's own output layer. Hidden states, embedding and output layer are constants to it: its loss
changes the heads and nothing else. That is also why these are not megatron-core's ``MultiTokenPredictionBlock``: there
embedding and output layer learn from the heads, a pipeline's last stage holds an embedding of its own to train, and the
loss is made inside the model, of labels that slime's model does not get. The parameters have the names that they have
there.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from slime.backends.megatron.layers.norm import RMSNorm
from slime.models import family_of, hf_config
from slime.models.family import Heads
from slime.training.loss.log_probs import token_terms
from slime.training.micro_batch import MicroBatch
from slime.training.packing import Responses
from slime.utils.errors import BadInputError


class NextTokenHead(MegatronModule):
    """Norms of hidden state and embedding, a projection of both, a layer like the decoder's last, and a norm.

    Norms and projection are whole on every tensor-parallel rank, which under sequence parallelism computes them for its
    own tokens.
    """

    def __init__(self, config: TransformerConfig, layer: ModuleSpec, number: int, vp_stage: int | None) -> None:
        """``layer`` is of the decoder's last layer, ``number`` counts heads from 0."""
        super().__init__(config)
        self.enorm, self.hnorm, self.final_layernorm = (
            RMSNorm(config, config.hidden_size, config.layernorm_epsilon) for _ in range(3)
        )
        self.eh_proj = torch.nn.Linear(
            2 * config.hidden_size,
            config.hidden_size,
            bias=False,
            dtype=config.params_dtype,
            device=self.enorm.weight.device,
        )
        self.eh_proj.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if config.perform_initialization and config.init_method is not None:
            config.init_method(self.eh_proj.weight)
        # The layer adds the number of those before its stage.
        layer_number = config.num_layers + number + 1 - get_transformer_layer_offset(config, vp_stage)
        self.transformer_layer = build_module(layer, config=config, layer_number=layer_number, vp_stage=vp_stage)

    @property
    def mtp_model_layer(self) -> Any:
        """The layer, by the name that megatron-core 0.19 looks for."""
        return self.transformer_layer

    def forward(self, hidden: Tensor, embedded: Tensor, packed_seq_params: PackedSeqParams) -> Tensor:
        """Both [T or, under sequence parallelism, T / tp, 1, h], as is the result."""
        mixed = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        output, _ = self.transformer_layer(mixed, attention_mask=None, packed_seq_params=packed_seq_params)
        return self.final_layernorm(output)


class NextTokenHeads(MegatronModule):
    """The heads of a model, on its last pipeline stage."""

    def __init__(
        self, config: TransformerConfig, layer: ModuleSpec, count: int, style: Heads, vp_stage: int | None
    ) -> None:
        super().__init__(config)
        self.mask_first_embedding = style.mask_first_embedding
        self.layers = torch.nn.ModuleList(NextTokenHead(config, layer, i, vp_stage) for i in range(count))
        for parameter in self.parameters():
            # megatron-core then leaves it out of the gradient norm: heads must not change how the policy is clipped.
            parameter.shared = True

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """That of every head; of a list of modules megatron-core would not know how they are sharded."""
        state: dict[str, Any] = {}
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, NextTokenHead)
            state |= layer.sharded_state_dict(f"{prefix}layers.{i}.", sharded_offsets, metadata)
        return state


def attach(model: GPTModel, args: Namespace) -> None:
    """Put heads on a last pipeline stage; BadInputError where it has no layer that theirs could be like."""
    style = family_of(hf_config(args.hf_checkpoint)).heads
    assert style is not None
    layers = model.decoder.submodules.layer_specs
    if not layers:
        raise BadInputError("--enable-mtp-training: the last pipeline stage has no layer of the decoder: give it one")
    model.mtp = NextTokenHeads(model.config, layers[-1], args.mtp_num_layers, style, model.vp_stage)


@contextmanager
def embedding_at_hand(chunks: Sequence[Any]) -> Iterator[None]:
    """Within: the heads of a model have its embedding, as it is now and wherever in the pipeline it is; collective over
    the pipeline's first and last ranks."""
    last = chunks[-1]
    weight = _embedding(chunks[0], last) if last.next_token_heads else None
    if weight is None:
        yield
        return
    last.mtp.embedding = weight
    try:
        yield
    finally:
        last.mtp.embedding = None


def _embedding(first: Any, last: Any) -> Tensor | None:
    """This tensor-parallel rank's rows of the vocabulary, on the last pipeline stage; of this rank's outer chunks."""
    is_last_stage = hasattr(last, "mtp")
    if last.share_embeddings_and_output_weights:
        return last.shared_embedding_or_output_weight().detach() if is_last_stage else None
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return first.embedding.word_embeddings.weight.detach()
    if first.pre_process:
        weight = first.embedding.word_embeddings.weight.detach()
    elif is_last_stage:
        weight = torch.empty_like(last.output_layer.weight, requires_grad=False)
    else:
        return None
    dist.broadcast(weight, group_src=0, group=parallel_state.get_embedding_group())
    return weight if is_last_stage else None


def heads_loss(
    args: Namespace, batch: MicroBatch, model: Any, weight: Tensor, hidden: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's share of the heads' loss, and of its metrics, as of `token_loss.reduce_tokens`.

    That of a head is the mean negative log-likelihood of the step's trained tokens, without those whose sequence has
    too few tokens before them; positions never look into the sequence after theirs.

    Args:
        model: the last pipeline stage, within `embedding_at_hand`.
        weight: of its output layer.
        hidden: what it returned, [1, T, h].
    """
    heads, group = model.mtp, model.pg_collection.tp
    states = _own_part(hidden.detach()[0, :, None].to(model.config.params_dtype), model)
    positions, losses = batch.position_ids[0], []
    for number, head in enumerate(heads.layers, 1):
        embedded = _embedded(_later(batch.responses, batch.tokens[0], number), heads.embedding, group)
        if heads.mask_first_embedding:
            embedded = embedded.masked_fill((positions == 0)[:, None], 0)
        states = head(states, _own_part(embedded[:, None], model), batch.packed_seq_params)
        log_probs, _ = token_terms(
            model.output_layer(states)[0][:, 0],
            weight.detach(),
            _later(batch.responses, batch.labels, number),
            vocab_size=args.vocab_size,
            group=group,
            chunk_size=args.log_probs_chunk_size,
        )
        is_same = _later(batch.responses, positions, number) == positions + number
        losses.append(-(log_probs * _later(batch.responses, batch.mean_weights, number) * is_same).sum())
    mean = torch.stack(losses).mean()
    report = {"train/mtp_loss": mean.detach()}
    if len(losses) > 1:
        report |= {f"train/mtp_{number}_loss": loss.detach() for number, loss in enumerate(losses, 1)}
    return args.mtp_loss_scaling_factor * mean, report


def _later(responses: Responses, column: Tensor, number: int) -> Tensor:
    """What a token vector has ``number`` tokens further on in the whole stream; no gradient, collective over the
    context-parallel ranks."""
    stream = column.new_zeros(responses.stream_length)
    stream[responses.local] = column
    if responses.group is not None and responses.group.size() > 1:
        dist.all_reduce(stream, group=responses.group)
    return stream.roll(-number)[responses.local]


def _own_part(rows: Tensor, model: Any) -> Tensor:
    group = model.pg_collection.tp
    return rows.chunk(group.size())[group.rank()].contiguous() if model.config.sequence_parallel else rows


def _embedded(tokens: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[T, h] of an embedding that is cut over the tensor-parallel ranks; no gradient."""
    row = tokens - group.rank() * len(weight)
    is_own = (row >= 0) & (row < len(weight))
    rows = torch.nn.functional.embedding(row.where(is_own, 0), weight) * is_own[:, None]
    if group.size() > 1:
        dist.all_reduce(rows, group=group)
    return rows
