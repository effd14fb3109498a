"""Two Hugging Face directories of one model, compared tensor by tensor."""

from __future__ import annotations

import math
from pathlib import Path

from slime.files.hf_reader import HFWeights, whole


def differences(one: Path, other: Path) -> dict[str, float]:
    """The largest difference of each tensor; infinite where one side lacks it, has another shape or what is not finite.

    Raises:
        FileNotFoundError: no weights in one of them.
    """
    with HFWeights(one) as a, HFWeights(other) as b:
        names = set(a) | set(b)
        found = dict.fromkeys(names, float("inf"))
        for name in set(a) & set(b):
            if list(a[name].shape) == list(b[name].shape):
                apart = float((whole(a[name]).double() - whole(b[name]).double()).abs().max())
                found[name] = apart if math.isfinite(apart) else float("inf")
        return found


def not_finite(directory: Path) -> list[str]:
    """The tensors in which something is infinite or no number."""
    with HFWeights(directory) as weights:
        return sorted(name for name in weights if not whole(weights[name]).double().isfinite().all())
