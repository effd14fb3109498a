"""What differs between two forward passes, place by place, and whether that is more than is allowed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from tools.forwards.places import SAMPLED

_LAYER = re.compile(r"layer (\d+): ")


@dataclass(frozen=True)
class Difference:
    """Of one place: the share of numbers that differ at all, and the largest and mean absolute difference."""

    place: str
    share: float
    largest: float
    mean: float


def differences(order: Iterable[str], ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[Difference]:
    """Of the places that both sides have, in ``order``; ValueError where they are of different shapes there."""
    found = []
    for place in order:
        if place in ours and place in theirs:
            if ours[place].shape != theirs[place].shape:
                shapes = f"{tuple(ours[place].shape)} of the trainer, {tuple(theirs[place].shape)} of the engine"
                raise ValueError(f"{place}: {shapes}")
            gap = (ours[place].double() - theirs[place].double()).abs()
            found.append(Difference(place, float((gap != 0).double().mean()), float(gap.max()), float(gap.mean())))
    return found


def first(found: Iterable[Difference]) -> str:
    """The first place at which a bit differs, or none; a number that is none differs too."""
    return next((d.place for d in found if d.share > 0), "none")


def kinds(found: Iterable[Difference]) -> list[tuple[str, str, float, float]]:
    """Of each kind of place, all layers together: its name, the first layer with a difference ('-' without one, '*'
    where there is one and no layers), the largest difference, and the mean of the layers' means."""
    rows: dict[str, list[Difference]] = {}
    for difference in found:
        rows.setdefault(_LAYER.sub("", difference.place), []).append(difference)
    return [
        (kind, _first_layer(own), max(d.largest for d in own), sum(d.mean for d in own) / len(own))
        for kind, own in rows.items()
    ]


def _first_layer(own: list[Difference]) -> str:
    place = first(own)
    layer = _LAYER.match(place)
    return layer[1] if layer else "-" if place == "none" else "*"


def table(title: str, found: list[Difference]) -> str:
    """The differences by kind, under a title that says where the first bit differs."""
    lines = [f"{title}: first difference at {first(found)}", f"{'':24}{'from layer':>12}{'max':>12}{'mean':>12}"]
    lines += [f"{kind:24}{layer:>12}{largest:12.2e}{mean:12.2e}" for kind, layer, largest, mean in kinds(found)]
    return "\n".join(lines)


def exceeded(title: str, found: list[Difference], largest: float | None, mean: float | None) -> list[str]:
    """What of the log-probs of the tokens is beyond a bound, a line each; None bounds nothing."""
    (of_tokens,) = (d for d in found if d.place == SAMPLED)
    bounds = (("max", of_tokens.largest, largest), ("mean", of_tokens.mean, mean))
    # Not "is above": a difference that is no number is within no bound.
    return [
        f"{title}: {SAMPLED}: {name} {value:.2e} is above {bound:.2e}"
        for name, value, bound in bounds
        if bound is not None and not value <= bound
    ]
