"""Which experts a mixture of experts sent each token to: as engines report it, and as it is trained on.

The routes of a sample of T tokens are an array [rows, layers, top-k] of expert numbers, of its first tokens: at most
T - 1, as nothing has been computed of the last one. ``layers`` are all of the model but those of MTP, whether they have
experts or not: engines count so. They travel by reference, as arrays of the smallest integer that holds them.
"""

from __future__ import annotations

import base64
import binascii
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime.data.columns import ROUTES, Column

FIELD, START = "routed_experts", "routed_experts_start_len"
"""Of an engine's ``meta_info``: routes, and the number of tokens before the first of them."""
_ENGINES, _ABSENT_TOO = np.dtype("<i4"), -1
_OPTIONS = ("use_rollout_routing_replay", "num_layers", "moe_layer_freq", "moe_router_topk", "num_experts")


class RouteError(ValueError):
    """Routes are not those of this model and these tokens; one line, without the sample's name."""


@dataclass(frozen=True)
class RouteShape:
    """What a model's routes are like.

    Attributes:
        layers: of the model.
        moe_layers: the numbers, from 0, of those with experts.
        topk: experts that a token is sent to.
        experts: in a layer.
    """

    layers: int
    moe_layers: tuple[int, ...]
    topk: int
    experts: int

    @classmethod
    def of(cls, args: Namespace) -> RouteShape:
        """That of the run's model, by Megatron's options."""
        every = args.moe_layer_freq
        pattern = every if isinstance(every, list) else [int(n % every == 0) for n in range(args.num_layers)]
        moe_layers = tuple(n for n, has_experts in enumerate(pattern) if has_experts)
        return cls(args.num_layers, moe_layers, args.moe_router_topk, args.num_experts)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest integer that holds an expert's number, and `absent`."""
        return np.dtype(np.uint8 if self.experts <= np.iinfo(np.uint8).max else np.int16)

    @property
    def kept_by_engine(self) -> int:
        """Bytes that SGLang keeps of a token in each rank of an engine."""
        return self.layers * self.topk * _ENGINES.itemsize

    @property
    def absent(self) -> int:
        """A number that no expert has: the token has no route in this layer, and is routed as it comes."""
        return self.experts

    def read(self, told: Any) -> np.ndarray:
        """[rows, layers, topk] of what an engine says, base64 of int32, or of an array or tensor of that shape;
        RouteError where it is neither, or a number is none of an expert's."""
        try:
            if isinstance(told, (str, bytes)):
                values = np.frombuffer(base64.b64decode(told), dtype=_ENGINES)
                routes = values.reshape(-1, self.layers, self.topk)
            else:
                routes = np.asarray(told)
        except (binascii.Error, ValueError, TypeError, RuntimeError) as error:
            raise RouteError(f"{FIELD} are not of {self.layers} layers by {self.topk} experts: {error}") from error
        if routes.shape[1:] != (self.layers, self.topk) or routes.dtype.kind not in "iu":
            raise RouteError(
                f"{FIELD} are an array of {routes.dtype}, shape {routes.shape}, and must be integers of shape "
                f"[rows, {self.layers}, {self.topk}]"
            )
        if routes.size and routes.min() == _ABSENT_TOO:
            routes = np.where(routes == _ABSENT_TOO, self.absent, routes)
        wrong = routes[(routes < 0) | (routes > self.absent)]
        if wrong.size:
            raise RouteError(f"{FIELD} name expert {wrong.flat[0]}, and there are {self.experts}, from 0 on")
        return routes.astype(self.dtype, copy=False)

    def trained(self, routes: Any, tokens: int) -> np.ndarray:
        """[tokens, layers with experts, topk] of a sample's routes, `absent` where it has none; RouteError where they
        cannot have been: more rows than were computed, an expert twice, or experts of a layer that has none."""
        whole = np.full((tokens, len(self.moe_layers), self.topk), self.absent, self.dtype)
        if routes is None:
            return whole
        known = self.read(routes)
        if len(known) > tokens - 1:
            raise RouteError(f"there are routes of {len(known)} tokens, and {tokens - 1} that they can be of")
        dense = np.delete(known, self.moe_layers, axis=1)
        if dense.size and not np.isin(dense, (0, self.absent)).all():
            raise RouteError(f"{FIELD} of a layer without experts are not 0: they are another model's")
        of_experts = known[:, self.moe_layers]
        for one in range(self.topk):
            for other in range(one):
                twice = (of_experts[..., one] == of_experts[..., other]) & (of_experts[..., one] != self.absent)
                if twice.any():
                    row, layer = (int(where[0]) for where in np.nonzero(twice))
                    number = int(of_experts[row, layer, one])
                    raise RouteError(f"token {row} has expert {number} twice in layer {self.moe_layers[layer]}")
        # One number alone is missing of no engine: such a token's place would be taken by a live one, maybe twice.
        partly = (of_experts == self.absent).any(-1)
        of_experts[partly] = self.absent
        whole[: len(known)] = of_experts
        return whole

    def column(self) -> Column:
        """The column that trainers replay."""
        trailing = (len(self.moe_layers), self.topk)
        return Column(
            ROUTES,
            self.dtype,
            "sequence",
            trailing,
            made_by="rollout",
            padding=self.absent,
            upstream="rollout_routed_experts",
            shown=False,
        )


def route_columns(args: Namespace) -> tuple[Column, ...]:
    """The column of a run that replays its engines' routes; none of another, or before its model is known."""
    known = args.use_rollout_routing_replay and args.num_experts and args.num_layers
    return (RouteShape.of(args).column(),) if known else ()


def route_options(args: Namespace) -> dict[str, Any]:
    """Of a run's options those that the functions here read, for requests that others send; of one that does not replay
    its engines' routes, or of options without any, that alone."""
    if not getattr(args, "use_rollout_routing_replay", False):
        return {"use_rollout_routing_replay": False}
    return {name: getattr(args, name) for name in _OPTIONS}


def joined(held: np.ndarray | None, meta_info: Mapping[str, Any], shape: RouteShape, tokens: int) -> Any:
    """Routes of a sample that has ``tokens`` with a reply's, whose ``meta_info`` has them from a token on, or all of
    them; those that are ``held`` count for tokens before that. As they are where the reply has none. RouteError where
    its rows are not those of these tokens."""
    if meta_info.get(FIELD) is None:
        return held
    start, rows = int(meta_info.get(START) or 0), shape.read(meta_info[FIELD])
    if len(rows) == tokens - 1 and start:
        rows = rows[start:]  # some builds heed no start
    if start + len(rows) != tokens - 1:
        raise RouteError(f"{FIELD} have {len(rows)} rows from token {start} on, of {tokens} tokens")
    if not start:
        return rows
    if held is None or len(held) < start:
        raise RouteError(f"{FIELD} begin at token {start}, and those of {0 if held is None else len(held)} are known")
    return np.concatenate([held[:start].astype(rows.dtype, copy=False), rows])


def asked_for(args: Namespace, routes: np.ndarray | Sequence[Any] | None, tokens: int) -> dict[str, Any]:
    """Fields of a request for a prompt of ``tokens`` of which these routes are known; none where nobody replays."""
    if not args.use_rollout_routing_replay:
        return {}
    return {f"return_{FIELD}": True, START: 0 if routes is None else min(len(routes), tokens)}
