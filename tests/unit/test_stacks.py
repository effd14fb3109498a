"""Experts that travel as one tensor: what makes a stack, and that it is the same tensors again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from slime.files.expert_stacks import Stack
from slime.files.hf_writer import NamedTensors
from tests.pushed import received

NUM_GPUS = 0
INNER, OUTER = 16, 32
GATE, UP, DOWN = (
    ("gate_proj.weight", (INNER, OUTER)),
    ("up_proj.weight", (INNER, OUTER)),
    ("down_proj.weight", (OUTER, INNER)),
)
Parts = Sequence[tuple[str, tuple[int, ...]]]


def experts(
    numbers: Sequence[int], parts: Parts = (GATE, UP), module: str = "m.0.experts", dtype: torch.dtype = torch.bfloat16
) -> NamedTensors:
    return [(f"{module}.{n}.{end}", torch.randn(shape).to(dtype)) for n in numbers for end, shape in parts]


def apart(named: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    found: list[tuple[str, Tensor]] = []
    for name, tensor in named:
        stack = Stack.of_name(name)
        found += [(name, tensor)] if stack is None else stack.tensors(tensor)
    return found


NORM = [("m.0.norm.weight", torch.randn(OUTER))]
CASES: dict[str, tuple[NamedTensors, list[tuple[int, int] | None]]] = {
    "gates and ups, then downs": (NORM + experts(range(4, 8)) + experts(range(4, 8), [DOWN]), [None, (4, 4), (4, 4)]),
    "all of an expert together": (experts(range(3), [GATE, UP, DOWN]) + NORM, [(0, 3), None]),
    "two layers": (experts(range(2)) + experts(range(2), module="m.1.experts"), [(0, 2), (0, 2)]),
    "one that is missing": (experts([0, 1, 3, 4]), [(0, 2), (3, 2)]),
    "one alone": (experts([5]), [None, None]),
    "backwards": (experts([2, 1, 0]), [None] * 6),
    "of two types": (experts([0, 1]) + experts([2, 3], dtype=torch.float32), [(0, 2), (2, 2)]),
    "a part of another type": (
        [each for n in range(2) for each in experts([n]) + experts([n], [DOWN], dtype=torch.float32)],
        [None] * 6,
    ),
    "one of another shape": (
        experts([0, 1]) + experts([2], [GATE, ("up_proj.weight", (INNER, 8))]),
        [(0, 2), None, None],
    ),
    "with gaps": (experts(range(3), [("gate_proj.weight", (3, 5))]), [None] * 3),
    "shared experts": ([(f"m.0.shared_experts.{end}", torch.randn(shape)) for end, shape in (GATE, DOWN)], [None] * 2),
    "nothing": ([], []),
}


@pytest.mark.parametrize("case", CASES)
def test_experts_that_follow_one_another_alike_are_one_and_the_same_again(case: str) -> None:
    bucket, kinds = CASES[case]
    travelling = received(bucket)
    stacks = [Stack.of_name(name) for name, _ in travelling]
    assert [None if stack is None else (stack.first, stack.count) for stack in stacks] == kinds
    found = apart(travelling)
    assert [name for name, _ in found] == [name for name, _ in bucket]
    for (name, tensor), (_, want) in zip(found, bucket, strict=True):
        assert torch.equal(tensor, want), name
        assert tensor.dtype == want.dtype


def test_a_part_of_all_experts_is_one_tensor() -> None:
    bucket = experts(range(3), [GATE, UP, DOWN])
    ((name, rows),) = received(bucket)
    stack = Stack.of_name(name)
    assert stack is not None
    for i, (end, column) in enumerate(stack.columns(rows)):
        assert end == (GATE, UP, DOWN)[i][0]
        assert torch.equal(column, torch.stack([tensor for _, tensor in bucket[i::3]]))
