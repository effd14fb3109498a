"""Where a rank has the experts of a stack."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slime.backends.sglang.loads import stack_loader
from slime.files.expert_stacks import Stack

NUM_GPUS = 0


class Layer(SimpleNamespace):
    """Experts ``first`` to ``first + num_local_experts - 1``, by their physical numbers."""

    layer_id = 3

    def _map_global_expert_id_to_local_expert_id(self, number: int) -> int:
        return number - self.first if self.first <= number < self.first + self.num_local_experts else -1


@pytest.mark.parametrize(
    ("first", "count", "physical", "runs"),
    [
        (0, 8, None, [(2, 0, 4)]),  # all of the stack's experts 2 to 5, one after the other
        (4, 8, None, [(0, 2, 2)]),  # of which this rank has two
        (6, 8, None, []),
        (0, 8, {2: [5], 3: [4], 4: [3], 5: [2]}, [(5, 0, 1), (4, 1, 1), (3, 2, 1), (2, 3, 1)]),
        (0, 8, {2: [2, 6], 3: [3, 7], 4: [4], 5: [5]}, [(2, 0, 1), (6, 0, 1), (3, 1, 1), (7, 1, 1), (4, 2, 2)]),
    ],
)
def test_runs_are_places_here_and_in_the_stack(
    first: int,
    count: int,
    physical: dict[int, list[int]] | None,
    runs: list[tuple[int, int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    location = None
    if physical is not None:
        location = SimpleNamespace(logical_to_all_physical=lambda layer, number, _: physical[number])
    module = SimpleNamespace(get_global_expert_location_metadata=lambda: location)
    monkeypatch.setattr(stack_loader.importlib, "import_module", lambda name: module)
    layer: Any = Layer(first=first, num_local_experts=count)
    stack = Stack("model.layers.3.mlp.experts", 2, 4, (("down_proj.weight", (4, 2)),))
    assert list(stack_loader._runs(layer, stack)) == runs
