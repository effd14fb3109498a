"""Run by test_own_experts: SGLang's own class of a mixture of experts loads weights with and without slime's list.

    python -m tests.integration.expert_loading MODEL

Prints a JSON object: how many entries of the list are looked at for each weight of an expert, without and with, and for
each order of the weights what then differs from what the class loads without.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from slime.backends.sglang import fixes, patches
from tests.integration.float8_engine import differing, held, sglang_model, tensors_of

_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)_proj\.weight")
Named = list[tuple[str, Tensor]]


class Counted(tuple[Any, ...]):
    """An entry that knows how often entries are looked at."""

    looks = 0

    def __iter__(self) -> Iterator[Any]:
        Counted.looks += 1
        return super().__iter__()


def trainers_place(named: tuple[str, Tensor]) -> tuple[Any, ...]:
    """What sorts weights as a trainer pushes them: a layer's gates and ups by expert, and after all of those its
    downs."""
    match = _EXPERT.fullmatch(named[0])
    return (1, match[3] == "down", int(match[1]), int(match[2]), match[3]) if match else (0,)


def orders(weights: Named) -> dict[str, Named]:
    pushed = sorted(weights, key=trainers_place)
    return {"pushed": pushed, "backwards": pushed[::-1], "shuffled": random.Random(1).sample(weights, len(weights))}


def looks_of(model: Any, weights: Named) -> float:
    """Load experts, and count for each."""
    experts = [named for named in weights if _EXPERT.fullmatch(named[0])]
    Counted.looks = 0
    model.load_weights(experts)
    return Counted.looks / len(experts)


def main(checkpoint: Path) -> dict[str, Any]:
    """Load in every order, compare."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    build, make = sglang_model(checkpoint), FusedMoE.make_expert_params_mapping
    FusedMoE.make_expert_params_mapping = staticmethod(lambda **kwargs: [Counted(entry) for entry in make(**kwargs)])
    changed = orders([(name, tensor * 2) for name, tensor in tensors_of(checkpoint).items()])
    plain = build()
    before = held(plain)
    looks = looks_of(plain, changed["pushed"])
    plain.load_weights(changed["pushed"])
    wanted = held(plain)
    fixes.find_experts_in_turn()
    differ: dict[str, list[str]] = {}
    for order, weights in changed.items():
        model = build()
        for part in (weights[: len(weights) // 3], weights[len(weights) // 3 :]):
            model.load_weights(part)
        differ[order] = differing(held(model), wanted)
    return {
        "looks": (looks, looks_of(plain, changed["pushed"])),
        "differ": differ,
        "changed": len(differing(before, wanted)),
    }


if __name__ == "__main__":
    patches.install()
    print(json.dumps(main(Path(sys.argv[1]))))
