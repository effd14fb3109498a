"""Pushed weights follow the trainer's also where they came from float8: in the mean, and not only after half a step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slime.files import block_scaled
from slime.files.block_scaled import BlockScaled, quantise
from slime.weights.float8 import Float8Blocks

NUM_GPUS = 0

BLOCK = (128, 128)
SHAPE = (300, 520)


def meant(weight: Tensor, *, in_the_mean: bool) -> Tensor:
    values, scales = quantise(weight, BLOCK, in_the_mean=in_the_mean)
    return BlockScaled(values, scales, BLOCK)[slice(None), slice(None)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def published() -> Tensor:
    """What a float8 checkpoint means."""
    weight = torch.randn(SHAPE) * 0.02
    weight[:, 7] = 0
    weight[128:256, :128] = 0
    return meant(weight, in_the_mean=False)


@pytest.mark.parametrize("at_once", [2**22, 1])
@pytest.mark.parametrize("part", [0.01, 0.05, 0.1, 0.15])
def test_what_moves_by_a_part_of_a_step_arrives_in_the_mean(
    part: float, at_once: int, published: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is about a tenth of a weight."""
    monkeypatch.setattr(block_scaled, "_AT_ONCE", at_once)
    up = 1 - 2 * (torch.arange(SHAPE[0]) % 2)[:, None]
    change = 0.1 * part * up * published
    moved = published + change

    def arrived(in_the_mean: bool) -> float:
        """The part of the change that is found after rounding, by least squares."""
        difference = meant(moved, in_the_mean=in_the_mean) - published
        return ((difference * change).sum() / change.square().sum()).item()

    assert arrived(True) == pytest.approx(1, abs=0.1)
    assert abs(arrived(False)) < 0.1, "or the matter needs no such rounding"


def test_what_did_not_move_is_what_was_published(published: Tensor) -> None:
    for ours, theirs in zip(
        quantise(published, BLOCK, in_the_mean=True), quantise(published, BLOCK, in_the_mean=False), strict=True
    ):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_what_bfloat16_holds_of_it_is_nearly_what_was_published(published: Tensor) -> None:
    held = published.bfloat16().float()
    assert ((meant(held, in_the_mean=True) - published).norm() / published.norm()).item() < 0.02
    assert (meant(held, in_the_mean=True) != meant(held, in_the_mean=False)).float().mean().item() < 0.03


def test_the_largest_number_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every place of a matrix: torch before 2.13 makes NaN of 480, the number that would be next."""
    before: list[Tensor] = []
    rounded = block_scaled._rounded_in_the_mean

    def noted(scaled: Tensor) -> Tensor:
        before.append(rounded(scaled))
        return before[-1]

    monkeypatch.setattr(block_scaled, "_rounded_in_the_mean", noted)
    weight = torch.full((2048, 7168), 448.0)
    weight[::2] = -448.0
    quantise(weight, BLOCK, in_the_mean=True)
    assert torch.equal(torch.cat(before), weight)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_named(value: float) -> None:
    weight = torch.randn(SHAPE)
    weight[200, 300] = value
    blocks = Float8Blocks(BLOCK, frozenset({"a.weight"}))
    with pytest.raises(ValueError, match=r"a\.weight: a weight is not finite"):
        list(blocks.quantised([[("a.weight", weight)]]))


def test_no_value_is_further_than_a_neighbour(published: Tensor) -> None:
    moved = published + 1e-4 * torch.randn(SHAPE)
    values, scales = quantise(moved, BLOCK, in_the_mean=True)
    rounded = BlockScaled(values, scales, BLOCK)[slice(None), slice(None)]
    step = torch.maximum(
        moved.abs() / 8, scales.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :520] / 512
    )
    assert ((rounded - moved).abs() <= step * 1.0001).all()
    assert torch.equal(values.view(torch.uint8), quantise(moved, BLOCK, in_the_mean=True)[0].view(torch.uint8))


def test_weights_that_were_never_in_float8_are_rounded_to_the_nearest() -> None:
    weight = (torch.randn(SHAPE) * 0.02).bfloat16()
    weight[:, 7] = 0
    assert torch.equal(meant(weight, in_the_mean=True), meant(weight, in_the_mean=False))


def test_parts_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(SHAPE)
    whole = quantise(weight, BLOCK)
    monkeypatch.setattr(block_scaled, "_AT_ONCE", 1)
    for ours, theirs in zip(quantise(weight, BLOCK), whole, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
