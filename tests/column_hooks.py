"""Columns and media that slime knows nothing of, and a model that says of every token whether it has the right ones.

Their values encode the sample and the token, so that one that is shifted, swapped or lost shows.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime.data import Column, Sample
from slime.data.media import MediaRef, keep

SHAPE = (2, 3)


def load(args: Namespace, media: Sequence[bytes]) -> dict[str, np.ndarray]:
    """A processor: float32 [bytes, 2] of each picture's bytes and its number in the sample, and their sizes."""
    parts = [np.frombuffer(data, np.uint8).astype(np.float32) for data in media]
    numbered = [np.stack([part, np.full_like(part, number)], axis=1) for number, part in enumerate(parts)]
    return {"pixels": np.concatenate(numbered), "grid": np.array([len(part) for part in parts])}


COLUMNS = (
    Column("route", np.int16, "response", trailing=SHAPE, padding=-1, model_input="route"),
    Column("place", np.int64, "sequence", padding=-1, model_input="place", upstream="places"),
    Column("pictures", np.object_, "media", load=load),
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


def picture_of(group: int, number: int) -> bytes:
    """Other bytes, and as many as no other one has within a group."""
    return bytes((7 * group + number + i) % 256 for i in range(5 + number))


def pictures_of(group: int, directory: str | Path) -> list[MediaRef]:
    """Of a group none, one or two, which its members share."""
    return [keep(picture_of(group, number), directory) for number in range(group % 3)]


def fill(sample: Sample, directory: str | Path) -> None:
    """Give a sample all of them, by its index and group."""
    assert sample.index is not None
    assert sample.group_index is not None
    length = len(sample.tokens)
    sample.columns["pictures"] = pictures_of(sample.group_index, directory)
    sample.columns["route"] = route_of(sample.index, length, sample.response_length)
    sample.columns["place"] = place_of(sample.index, length)


def megatron_init(args: Namespace) -> None:
    """A function that needs no model."""


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample | list[Sample]:
    """slime's own, then cut into three samples, each of a part of the response after all that came before."""
    from slime.rollout.sglang_rollout import generate as plain

    sample = await plain(args, sample, sampling_params)
    whole = sample.status is Sample.Status.ABORTED or sample.response_length < 3
    parts = [sample] if whole else [part_of(sample, *cut) for cut in pairwise(cuts_of(sample.response_length))]
    for part in parts:
        fill(part, f"{args.run_dir}/media")
    return sample if whole else parts


def cuts_of(length: int) -> list[int]:
    """Where three parts of a response begin, and its end."""
    return [length * part // 3 for part in range(4)]


def part_of(sample: Sample, start: int, end: int) -> Sample:
    """The response tokens from ``start`` to ``end`` as a sample of the same rollout."""
    prompt = len(sample.tokens) - sample.response_length
    part = copy.copy(sample)
    part.tokens, part.response_length = sample.tokens[: prompt + end], end - start
    assert sample.rollout_log_probs is not None
    assert sample.loss_mask is not None
    part.rollout_log_probs = sample.rollout_log_probs[start:end]
    part.loss_mask = sample.loss_mask[start:end]
    part.columns, part.metadata = {}, dict(sample.metadata)
    part.weight_versions, part.segment_starts, part.segment_lengths = sample.weight_versions[-1:], [0], [end - start]
    return part


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
            route, place = options.pop("route")[0], options.pop("place")[0]
            pixels, grid = options.pop("pixels", None), options.pop("grid", None)
            self.seen.append({"place": place.clone(), "pixels": pixels, "grid": grid})
            check(positions[0], route, place)
            return super().forward(tokens, positions, *rest, **options)

    stage.__class__ = Looking
    return stage


def check(positions: Tensor, route: Tensor, place: Tensor) -> None:
    """The entries of every token are those of its own sample and position.

    Args:
        positions, place: [T]
        route: [T, 2, 3]
    """
    assert route.shape == (len(positions), *SHAPE)
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
