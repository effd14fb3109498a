"""Tensors whose memory is given back and taken again, and those that stay within a budget."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slime.training.memory.sleep import SleepingTensors

NUM_GPUS = 0
SIZES = (100, 300, 50, 7)
NBYTES = [4 * size for size in SIZES]


def made() -> list[Tensor]:
    return [torch.randn(size) for size in SIZES]


def awake(tensors: list[Tensor]) -> list[bool]:
    return [tensor.untyped_storage().nbytes() > 0 for tensor in tensors]


@pytest.mark.parametrize(
    ("budget", "stays"),
    [
        (0, [False, False, False, False]),
        (399, [False, False, True, True]),
        (400, [True, False, False, False]),
        (NBYTES[0] + NBYTES[2] + 1, [True, False, True, False]),
        (sum(NBYTES) - 1, [True, True, True, False]),
        (sum(NBYTES), [True, True, True, True]),
    ],
)
def test_what_fits_into_the_budget_stays(budget: int, stays: list[bool]) -> None:
    tensors = made()
    values, sleeping = [tensor.clone() for tensor in tensors], SleepingTensors(lambda: tensors, keep=True)
    kept = sum(nbytes for nbytes, stay in zip(NBYTES, stays, strict=True) if stay)
    for _ in range(2):  # the second finds its host memory made
        assert sleeping.fitting(budget) == kept
        assert sleeping.sleep(budget) == kept
        assert awake(tensors) == stays
        assert sleeping.sleep(sum(NBYTES)) == kept  # what sleeps already stays so
        assert awake(tensors) == stays
        sleeping.wake()
        assert all(torch.equal(tensor, value) for tensor, value in zip(tensors, values, strict=True))


def test_views_of_one_storage_count_once() -> None:
    buffer = torch.arange(10.0)
    views = [buffer[:4], buffer[4:], buffer]
    sleeping = SleepingTensors(lambda: views, keep=True)
    assert (sleeping.fitting(39), sleeping.fitting(40)) == (0, 40)
    assert sleeping.sleep(39) == 0
    assert not any(awake(views))
    sleeping.wake()
    assert torch.equal(buffer, torch.arange(10.0))
    assert sleeping.sleep(40) == 40
    assert all(awake(views))
