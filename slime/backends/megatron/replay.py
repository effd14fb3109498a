"""Routing replay: in a pass, each router's experts are those that another pass, or an engine, chose for its tokens.

Megatron's routers ask an object beside them, ``router_replay``, for their experts. Its own kind keeps one list of all
routers of a process and takes ids unchecked; ours belongs to one model's routers and to the micro-batch under way. The
scores of the experts that are replayed are computed anew, so routers learn.
"""

from __future__ import annotations

import enum
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from slime.data.columns import ROUTES
from slime.data.routes import RouteShape
from slime.training.micro_batch import MicroBatch
from slime.training.parallel import gathered
from slime.utils.errors import BadInputError

_NONE = -1
"""In place of a layer's number among those with experts: by the model's config it has none."""


class Routing(enum.Enum):
    """What routers do in a pass."""

    LIVE = "live"
    """They choose."""
    RECORD = "record"
    """They choose, and each micro-batch keeps what."""
    REPLAY = "replay"
    """They take what the micro-batch has; where it has nothing they choose."""


class RouterReplay:
    """What one router asks for its experts.

    Attributes:
        layer: its number among all layers with experts of the model.
        given: int [t, top-k], what it is to take, with `RouteShape.absent` where it chooses; None: it chooses.
        chosen: what it took in this call, where anybody wants to know.
        again: what it took in forward passes whose backward passes compute it again, oldest first.
    """

    def __init__(self, layer: int, shape: RouteShape) -> None:
        self.layer = layer
        self._absent, self._dtype = shape.absent, torch.from_numpy(np.empty(0, shape.dtype)).dtype
        self.within_forward = False
        self.given: Tensor | None = None
        self.chosen: Tensor | None = None
        self.again: deque[Tensor] = deque()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What Megatron's routers call: scores and numbers of the experts of each token, both [t, topk], of scores
        [t, experts]; ``default_compute_topk`` chooses."""
        assert default_compute_topk is not None
        if not self.within_forward and self.again:
            experts = self.again.popleft().long()
            return scores.gather(1, experts), experts
        values, experts = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.given is not None:
            given = self.given.long()
            experts = torch.where((given == self._absent).any(1, keepdim=True), experts, given)
            values = scores.gather(1, experts)
        if self.within_forward:
            self.chosen = experts.to(self._dtype)
        return values, experts


class RoutingReplay:
    """The routers of one learner's model; none of a run that replays nothing, for which every pass is LIVE."""

    def __init__(self, args: Namespace, model_chunks: Sequence[Any]) -> None:
        """Gives the routers of the decoder's layers their `RouterReplay`; heads of MTP have rows of nobody's and choose
        as they come. BadInputError where all stages together have other layers of experts than the model's config says:
        a layer that is not seen would not be replayed."""
        self._routers: list[list[RouterReplay]] = [[] for _ in model_chunks]
        self._from_engine = args.use_rollout_routing_replay
        self._again = args.use_routing_replay and recomputes_experts(model_chunks[0].config)
        self._routing, self._forwards = Routing.LIVE, [0] * len(model_chunks)
        self._cut = model_chunks[0].config.sequence_parallel
        if not args.use_routing_replay:
            return
        shape = RouteShape.of(args)
        for routers, chunk in zip(self._routers, model_chunks, strict=True):
            for number, router in _routers_of(chunk):
                layer = shape.moe_layers.index(number) if number in shape.moe_layers else _NONE
                router.router_replay = RouterReplay(layer, shape)
                routers.append(router.router_replay)
        _check_layers([router.layer for router in chain.from_iterable(self._routers)], len(shape.moe_layers))

    @property
    def of_log_probs(self) -> Routing:
        """What the pass of the old log-probs does."""
        return Routing.REPLAY if self._from_engine else Routing.RECORD

    @contextmanager
    def passing(self, routing: Routing) -> Iterator[None]:
        """Around one pass over micro-batches. RuntimeError where backward passes asked for other experts than forward
        passes took."""
        self._routing, self._forwards = routing, [0] * len(self._routers)
        try:
            yield
            for routers, forwards in zip(self._routers, self._forwards, strict=True):
                # Of some layers nothing is computed again, and of a pass without gradients nothing at all.
                if wrong := [len(router.again) for router in routers if len(router.again) not in (0, forwards)]:
                    raise RuntimeError(f"routing replay: of {forwards} forward passes {wrong[0]} were not recomputed")
        finally:
            self._routing = Routing.LIVE
            for router in chain.from_iterable(self._routers):
                router.again.clear()
                router.given = router.chosen = None

    @contextmanager
    def forward(self, number: int, micro_batch: MicroBatch) -> Iterator[None]:
        """Around the forward call of a model chunk, by its number among this rank's."""
        routers = self._routers[number]
        if not routers or self._routing is Routing.LIVE:
            yield
            return
        kept = f"<{ROUTES} of chunk {number}>"
        if self._routing is Routing.REPLAY:
            self._give(routers, micro_batch, kept)
        for router in routers:
            router.within_forward, router.chosen = True, None
        yield
        for router in routers:
            router.within_forward, router.given = False, None
        chosen = [router.chosen for router in routers if router.chosen is not None]
        if self._routing is Routing.RECORD:
            micro_batch.put_on_host(kept, torch.stack(chosen, dim=1))
        elif self._again:
            self._forwards[number] += 1
            for router, experts in zip(routers, chosen, strict=True):
                router.again.append(experts)

    def _give(self, routers: Sequence[RouterReplay], micro_batch: MicroBatch, kept: str) -> None:
        if (recorded := micro_batch.get(kept)) is not None:
            for place, router in enumerate(routers):
                router.given = recorded[:, place]
        elif (routes := micro_batch.get(ROUTES)) is not None:
            if self._cut:
                ranks = parallel_state.get_tensor_model_parallel_world_size()
                routes = routes.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
            for router in routers:
                router.given = routes[:, router.layer]


def _routers_of(chunk: Any) -> Iterator[tuple[int, Any]]:
    """The routers of a model chunk's decoder, each after the number of its layer, from 0; a user's own model may be
    built otherwise, and then has none."""
    for layer in getattr(getattr(chunk, "decoder", None), "layers", ()):
        if isinstance(getattr(layer, "mlp", None), MoELayer):
            yield layer.layer_number - 1, layer.mlp.router


def _check_layers(own: list[int], expected: int) -> None:
    """Hold the layers of experts that this rank's stage and all others have found against their number."""
    stages = gathered(own, parallel_state.get_pipeline_model_parallel_group(check_initialized=False))
    found = sorted(chain.from_iterable(stages))
    if found != list(range(expected)):
        raise BadInputError(
            f"--use-routing-replay: {len(set(found) - {_NONE})} of the {expected} layers with experts of the model "
            "have a router that can be told its experts (megatron.core's MoELayer, as the mlp of a decoder layer)"
            + (": --custom-model-provider-path must make them so" if len(found) < expected else ", and others do")
        )


def recomputes_experts(config: TransformerConfig) -> bool:
    """Whether backward passes compute layers of experts again."""
    if config.recompute_granularity == "selective":
        return "moe" in (config.recompute_modules or ())
    return config.recompute_granularity == "full"
