"""Tokens to the ranks that have their experts and back, each once a rank, in the place of Megatron's dispatcher.

Megatron's all-to-all dispatcher sends a token once for each of its experts, and each of these outputs back. Here a rank
that has several of a token's experts gets the token once, with its probabilities for all experts there, makes the rows
for its experts of what arrived, and sends back the sum of their outputs. Sums are of a fixed order and rounded once on
each side, as `permutation` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher, MoETokenDispatcher
from torch import Tensor

from slime.backends.megatron.layers.permutation import to_rows, to_tokens
from slime.utils import device

_NOT_HERE = float("-inf")
"""In the place of a probability: the token does not take this expert. A probability may be 0, or NaN."""


def attach(model: torch.nn.Module) -> None:
    """Give a model's mixture-of-experts layers this dispatcher, where it can do what their own does."""
    for layer in model.modules():
        if isinstance(layer, MoELayer) and _replaceable(layer.token_dispatcher):
            own = layer.token_dispatcher
            groups = ProcessGroupCollection(ep=own.ep_group, expt_tp=own.tp_group, tp_ep=own.tp_ep_group)
            layer.token_dispatcher = DedupDispatcher(own.config, groups)


def _replaceable(dispatcher: MoETokenDispatcher) -> bool:
    config = dispatcher.config
    return (
        type(dispatcher) is MoEAlltoAllTokenDispatcher
        and dispatcher.ep_size > 1
        and dispatcher.tp_size == 1
        and config.moe_expert_capacity_factor is None  # tokens may be dropped, or experts padded
        and not config.moe_router_padding_for_quantization
        and not config.moe_shared_expert_overlap
        and config.cuda_graph_impl == "none"
    )


@dataclass(frozen=True)
class Copies:
    """Rows that are made of tokens, in order of the places that they go to, then of tokens; for `to_rows`, `to_tokens`.

    A place is a rank, or an expert of one.
    """

    place: Tensor
    """int64 [rows]"""
    token: Tensor
    """int64 [rows]"""
    of_token: Tensor
    """int64 [t, most], in order of places, then -1."""

    @classmethod
    def of(cls, goes: Tensor, count: int, of_token: Tensor) -> Copies:
        """
        Args:
            goes: bool [t, places]
            count: how many are set.
            of_token: `numbered` of them.
        """
        entry = torch.nonzero_static(goes.t().reshape(-1), size=count)[:, 0]
        tokens = max(len(goes), 1)
        return cls(entry // tokens, entry % tokens, of_token)


def numbered(goes: Tensor, most: int) -> Tensor:
    """The numbers of each token's rows: bool [t, places], no more than ``most`` of a token set -> int64 [t, most].

    Rows are numbered in order of places, then of tokens. A token's are in order of places; -1 follows where it has
    fewer. The number of rows need not be known.
    """
    number = goes.t().reshape(-1).cumsum(0).view(goes.size(1), len(goes)).t() - 1
    slot = torch.where(goes, goes.cumsum(1) - 1, most)
    # What is not set is written, in any order, into one column too many.
    return number.new_full((len(goes), most + 1), -1).scatter_(1, slot, number)[:, :most]


class DedupDispatcher(MoETokenDispatcher):
    """What `MoELayer` calls, in the order of the methods.

    Attributes:
        input_splits, output_splits: tokens that go to, and come from, each expert-parallel rank.
    """

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        super().__init__(config, groups)
        self.local_experts = cast(int, config.num_moe_experts) // self.ep_size
        self._there: Copies | None = None
        self._here: Copies | None = None

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """What is sent: tokens [copies, h] and their probabilities for the receiving rank's experts [copies, experts],
        of t tokens [..., h], and routing map (bool) and probabilities [t, all experts]. Waits for the device, once."""
        self._shape = tokens.shape
        chosen = routing_map.view(-1, self.ep_size, self.local_experts)
        goes = chosen.any(2)
        counted = device.to_host(self._exchanged_counts(chosen, goes))
        of_token = numbered(goes, min(self.config.moe_router_topk, self.ep_size))
        sent, received, rows = counted().split([self.ep_size, self.ep_size, self.local_experts])
        self.input_splits, self.output_splits, self._rows_per_expert = sent.tolist(), received.tolist(), rows
        self._there = there = Copies.of(goes, sum(self.input_splits), of_token)
        shares = probs.masked_fill(~routing_map, _NOT_HERE).view(-1, self.local_experts)
        shares = shares.index_select(0, there.token * self.ep_size + there.place)
        return to_rows(tokens.view(-1, self._shape[-1]), there.token, there.of_token), shares

    def _exchanged_counts(self, chosen: Tensor, goes: Tensor) -> Tensor:
        """int64 [ranks + ranks + experts]: tokens to each rank and from each, and rows of each expert of this rank."""
        own = torch.cat([goes.sum(0)[:, None], chosen.sum(0)], dim=1)
        others = torch.empty_like(own)
        dist.all_to_all_single(others, own, group=self.ep_group)
        return torch.cat([own[:, 0], others[:, 0], others[:, 1:].sum(0)])

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """What arrives of what `dispatch_preprocess` returned, in order of the sending ranks."""
        splits = self.output_splits, self.input_splits
        return all_to_all(self.ep_group, hidden_states, *splits), all_to_all(self.ep_group, probs, *splits)

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows sorted by expert [rows, h], how many each expert has, in host memory, and their probabilities [rows]."""
        goes = probs != _NOT_HERE
        of_token = numbered(goes, min(self.config.moe_router_topk, self.local_experts))
        self._here = here = Copies.of(goes, int(self._rows_per_expert.sum()), of_token)
        shares = probs.reshape(-1).gather(0, here.token * self.local_experts + here.place)
        return to_rows(hidden_states, here.token, here.of_token), self._rows_per_expert, shares

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """The sums of the rows of each token that arrived."""
        here, self._here = self._here, None
        assert here is not None
        return to_tokens(hidden_states, here.token, here.of_token)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """The sums come back."""
        return cast(Tensor, all_to_all(self.ep_group, hidden_states, self.input_splits, self.output_splits))

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """The sums of what came back for each token, in the shape that tokens had."""
        there, self._there = self._there, None
        assert there is not None
        return to_tokens(hidden_states, there.token, there.of_token).view(self._shape)
