"""Two Hugging Face directories of one model, compared tensor by tensor."""

from __future__ import annotations

from pathlib import Path

from slime.utils.hf_reader import HFWeights, whole


def differences(one: Path, other: Path) -> dict[str, float]:
    """The largest difference of each tensor, infinite where only one side has it or the shapes are not the same.

    Raises:
        FileNotFoundError: no weights in one of them.
    """
    with HFWeights(one) as a, HFWeights(other) as b:
        names = set(a) | set(b)
        found = dict.fromkeys(names, float("inf"))
        for name in set(a) & set(b):
            if list(a[name].shape) == list(b[name].shape):
                found[name] = float((whole(a[name]).double() - whole(b[name]).double()).abs().max())
        return found
