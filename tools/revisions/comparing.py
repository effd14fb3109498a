"""What two runs have written, compared bit for bit: metrics, recorded samples, requests and weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

Steps = dict[str, dict[str, Any]]
"""``train/step 3`` -> its metrics."""
Samples = dict[str, dict[str, Any]]
"""``rollout 0, sample 3`` -> its fields."""
_SHOWN = 100
_NEITHER = "neither base nor head has any"
_OWN_ROW = ("loss", "grad_norm")
"""A metric of training with one of these in its name has a row of its own."""
_SAMPLE_FIELDS = {
    "prompts": ("prompt",),
    "tokens": ("tokens", "response_length", "loss_mask"),
    "log-probs": ("rollout_log_probs",),
    "weight versions": ("weight_versions", "segment_starts", "segment_lengths"),
    "rewards": ("reward",),
}
_TIMES = ("_time", "trace")
_IDS = ("session_id",)
"""Of a sample; by chance, so that only whether there is one can be compared."""


@dataclass(frozen=True)
class Finding:
    """A quantity, and its first difference; None where base and head are equal."""

    quantity: str
    difference: str | None


def first_difference(base: Any, head: Any, at: str = "") -> str | None:
    """The first place in two values of JSON, or with tensors in them, where they are not the same to the bit.

    1 and 1.0 are not the same, nor are 0.0 and -0.0; NaN and NaN are.
    """
    if isinstance(base, torch.Tensor) and isinstance(head, torch.Tensor):
        return _of_tensors(base, head, at)
    if isinstance(base, Mapping) and isinstance(head, Mapping):
        for key in dict.fromkeys([*base, *head]):
            place = f"{at}, {key}" if at else str(key)
            if key not in base or key not in head:
                return f"{place}: only {'base' if key in base else 'head'} has it"
            if found := first_difference(base[key], head[key], place):
                return found
        return None
    if isinstance(base, list | tuple) and isinstance(head, list | tuple):
        for index, (one, other) in enumerate(zip(base, head, strict=False)):
            if found := first_difference(one, other, f"{at}[{index}]"):
                return found
        return None if len(base) == len(head) else f"{at}: base has {len(base)}, head {len(head)}"
    return None if repr(base) == repr(head) else f"{at}: base {_shown(base)}, head {_shown(head)}"


def _of_tensors(base: torch.Tensor, head: torch.Tensor, at: str) -> str | None:
    if base.dtype != head.dtype or base.shape != head.shape:
        return f"{at}: base {base.dtype} {list(base.shape)}, head {head.dtype} {list(head.shape)}"
    one, other = (tensor.contiguous().reshape(-1, 1).view(torch.uint8) for tensor in (base, head))
    if torch.equal(one, other):
        return None
    places = (one != other).any(dim=1).nonzero()[:, 0]
    first = int(places[0])
    values = f"base {base.reshape(-1)[first].item()!r}, head {head.reshape(-1)[first].item()!r}"
    return f"{at}: {values} at {first}; {len(places)} of {base.numel()} values differ"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _compared(quantity: str, base: Any, head: Any, at: str = "") -> Finding:
    """Nothing on either side is a difference: it would be equal whatever the revisions do."""
    if not base and not head:
        return Finding(quantity, _NEITHER)
    return Finding(quantity, first_difference(base, head, at))


def metrics(base: Path, head: Path, needed: Sequence[str]) -> Iterator[Finding]:
    """The metrics of two run directories: each loss and gradient norm, and the others together; no times.

    Args:
        needed: names without which the runs have not done what they are compared for.
    """
    one, other = _steps(base / "metrics.jsonl"), _steps(head / "metrics.jsonl")
    yield _compared("steps", dict.fromkeys(one), dict.fromkeys(other))
    logged = [name for steps in (one, other) for step in steps.values() for name in step]
    yield from (Finding(name, _NEITHER) for name in needed if name not in logged)
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(logged):
        prefix = name.partition("/")[0]
        alone = prefix == "train" and any(word in name for word in _OWN_ROW)
        groups.setdefault(name if alone else f"other {prefix}/ metrics", []).append(name)
    for group, names in groups.items():
        yield Finding(group, _of_metrics(names, one, other))


def _of_metrics(names: Sequence[str], base: Steps, head: Steps) -> str | None:
    both = [step for step in base if step in head]  # one that is missing is said once

    def chosen(steps: Steps, names: Sequence[str]) -> Steps:
        return {step: {name: value for name, value in steps[step].items() if name in names} for step in both}

    first = first_difference(chosen(base, names), chosen(head, names))
    if first is None or len(names) == 1:
        return first
    different = [name for name in names if first_difference(chosen(base, [name]), chosen(head, [name]))]
    return f"{first} ({len(different)} of {len(names)} metrics: {', '.join(different)})"


def _steps(path: Path) -> Steps:
    steps: Steps = {}
    for line in path.read_text().splitlines() if path.is_file() else ():
        values = json.loads(line)
        axis = next((name for name in values if name.endswith("/step")), None)
        if axis is not None:
            kept = {k: v for k, v in values.items() if k not in (axis, "time") and not k.startswith("perf/")}
            steps.setdefault(f"{axis} {values[axis]}", {}).update(kept)
    return steps


def samples(base: Path, head: Path) -> Iterator[Finding]:
    """The recorded samples of two directories, field by field; no times, and of ids whether there is one."""
    one, other = _samples(base), _samples(head)
    known = {name for names in _SAMPLE_FIELDS.values() for name in names}
    rest = [name for side in (one, other) for sample in side.values() for name in sample if name not in known]
    for quantity, names in {**_SAMPLE_FIELDS, "other fields of samples": rest}.items():
        yield _compared(quantity, _fields(one, names), _fields(other, names))


def _fields(samples: Samples, names: Sequence[str]) -> Samples:
    return {place: {name: value for name, value in s.items() if name in names} for place, s in samples.items()}


def _samples(directory: Path) -> Samples:
    found: Samples = {}
    for number, path in sorted((int(path.stem), path) for path in directory.glob("*.pt")):
        for place, sample in enumerate(torch.load(path, weights_only=True)["samples"]):
            ids = {name: "an id" for name in _IDS if sample.get(name) is not None}
            kept = {name: value for name, value in sample.items() if not name.endswith(_TIMES)}
            found[f"rollout {number}, sample {place}"] = kept | ids
    return found


def requests(base: Path, head: Path) -> Finding:
    """The requests that two directories' recorders wrote, in whatever order they were sent."""
    return _compared("requests", _requests(base), _requests(head), at="request")


def _requests(directory: Path) -> list[Any]:
    lines = [line for path in directory.glob("*.jsonl") for line in path.read_text().splitlines()]
    return sorted(map(json.loads, lines), key=lambda request: json.dumps(request["body"], sort_keys=True))


def weights(base: Path, head: Path) -> Finding:
    """The tensors of two Hugging Face directories, however they are dealt to files."""
    return _compared("weights after the last step", _weights(base), _weights(head))


def _weights(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is not a dict
    return tensors
