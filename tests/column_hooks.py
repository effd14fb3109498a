"""Two columns that slime knows nothing of, and a model that says of every token whether its entries are the right ones.

Their values encode the sample and the token, so that one that is shifted, swapped or lost shows.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime.data import Column, Sample

SHAPE = (2, 3)
COLUMNS = (
    Column("route", np.int16, "response", trailing=SHAPE, padding=-1, model_input="route"),
    Column("place", np.int64, "sequence", padding=-1, model_input="place", upstream="places"),
)
_TOKENS = 1000
"""More than a sample has."""


def route_of(sample: int, length: int, response: int) -> np.ndarray:
    """int16 [response, 2, 3], other numbers for each sample, token and cell."""
    token = np.arange(length - response, length)[:, None, None]
    return ((37 * sample + 6 * token + np.arange(6).reshape(SHAPE)) % 30_000).astype(np.int16)


def place_of(sample: int, length: int) -> np.ndarray:
    """int64 [length]"""
    return _TOKENS * sample + np.arange(length)


def fill(sample: Sample) -> None:
    """Give a sample both, by its index."""
    assert sample.index is not None
    length = len(sample.tokens)
    sample.columns["route"] = route_of(sample.index, length, sample.response_length)
    sample.columns["place"] = place_of(sample.index, length)


def model_provider(
    pre_process: bool, post_process: bool, *, vp_stage: int | None = None, args: Namespace, config: Any
) -> Any:
    """slime's own model, whose forward call takes the columns."""
    from slime.backends.megatron.model import default_stage

    stage = default_stage(args, config, pre_process, post_process, vp_stage)
    base = type(stage)
    stage.seen = []

    class Looking(base):  # type: ignore[misc, valid-type]
        def forward(self, tokens: Tensor, positions: Tensor, *rest: Any, **options: Any) -> Tensor:
            columns = {column.name: options.pop(column.name) for column in COLUMNS}
            self.seen.append({"tokens": tokens.clone(), "positions": positions.clone(), **columns})
            check(tokens[0], positions[0], **{name: values[0] for name, values in columns.items()})
            return super().forward(tokens, positions, *rest, **options)

    stage.__class__ = Looking
    return stage


def check(tokens: Tensor, positions: Tensor, route: Tensor, place: Tensor) -> None:
    """The entries of every token are those of its own sample and position.

    Args:
        tokens, positions, place: [T]
        route: [T, 2, 3]
    """
    assert route.shape == (len(tokens), *SHAPE)
    assert (route.dtype, place.dtype) == (torch.int16, torch.int64)
    is_padding = place == -1
    assert torch.equal(place[~is_padding] % _TOKENS, positions[~is_padding]), "a place is at another position"
    # A response token's entry lies where it is predicted from: one position before it.
    has_route = (route != -1).all(dim=(-1, -2))
    assert torch.equal(has_route, (route != -1).any(dim=(-1, -2)))
    assert not (has_route & is_padding).any()
    sample, token = place[has_route] // _TOKENS, positions[has_route] + 1
    wanted = (37 * sample + 6 * token)[:, None, None] + torch.arange(6, device=place.device).view(SHAPE)
    assert torch.equal(route[has_route].long(), wanted % 30_000), "a route is another token's"
