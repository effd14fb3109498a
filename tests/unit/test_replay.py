"""Which routers of a model are told their experts."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from slime.backends.megatron import replay
from slime.backends.megatron.replay import RoutingReplay
from slime.utils.errors import BadInputError

NUM_GPUS = 0
ARGS = Namespace(
    use_routing_replay=True,
    use_rollout_routing_replay=False,
    num_layers=4,
    moe_layer_freq=[0, 1, 1, 1],
    moe_router_topk=2,
    num_experts=8,
)
CONFIG = Namespace(sequence_parallel=False, recompute_granularity=None)


def layer(number: int, kind: Any = MoELayer) -> Namespace:
    """A layer, counted from 1, whose experts are of this class."""
    mlp = kind.__new__(kind)
    torch.nn.Module.__init__(mlp)
    mlp.router = torch.nn.Module()
    return Namespace(layer_number=number, mlp=mlp)


def chunk(*layers: Namespace) -> Namespace:
    return Namespace(config=CONFIG, decoder=Namespace(layers=list(layers)))


DENSE = layer(1, torch.nn.Module)
OTHERS = chunk(DENSE, *(layer(number, torch.nn.Module) for number in (2, 3, 4)))


@pytest.mark.parametrize(
    ("chunks", "elsewhere", "why"),
    [
        ([chunk(DENSE, layer(2), layer(3), layer(4))], [], None),
        ([chunk(DENSE, layer(2)), chunk(layer(3), layer(4))], [], None),
        ([chunk(DENSE, layer(2))], [1, 2], None),
        ([chunk(DENSE)], [0, 1, 2], None),
        ([OTHERS], [], "0 of the 3 layers with experts of the model .*: --custom-model-provider-path must"),
        ([Namespace(config=CONFIG)], [], "0 of the 3 layers"),
        ([chunk(DENSE, layer(2), layer(3))], [], "2 of the 3 layers"),
        ([chunk(DENSE, layer(2))], [1], "2 of the 3 layers"),
        ([chunk(layer(1), layer(2), layer(3), layer(4))], [], "3 of the 3 layers .*, and others do"),
    ],
)
def test_all_layers_with_experts_have_a_router(
    chunks: list[Any], elsewhere: list[int], why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``elsewhere``: what other stages of a pipeline have found."""
    monkeypatch.setattr(replay, "gathered", lambda own, _: [own, elsewhere])
    if why is None:
        RoutingReplay(ARGS, chunks)
        return
    with pytest.raises(BadInputError, match=why):
        RoutingReplay(ARGS, chunks)


def test_a_run_without_replay_asks_for_nothing() -> None:
    RoutingReplay(Namespace(**vars(ARGS) | {"use_routing_replay": False}), [Namespace(config=CONFIG)])
