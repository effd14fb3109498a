"""What a process of an engine has loaded, in words that the process and whoever pushes weights both know."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING
from zlib import crc32

if TYPE_CHECKING:  # who only calls engines does without
    import torch

ACTION = "slime_loads_"
"""What `/weights_checker` is asked, followed by the number of the sample. Servers without `load_record` refuse it."""
DRAFT = "draft."
"""How SGLang begins what the model to draft by answers."""
_RECORD, _PARAMETER = "record", "="
_SAMPLE = 512
"""Elements of each tensor, at least, that are sampled of larger ones."""
_STEP = 7919
"""A prime: samples of consecutive numbers are far from each other."""
_WORD = (1 << 64) - 1


@dataclass
class Tally:
    """Tensors by name and bytes, in whatever order they came: tallies of others differ."""

    tensors: int = 0
    nbytes: int = 0
    digest: int = 0
    """Of 64 bits: a sum over the tensors. There may be tens of thousands, so it is a cheap one."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Count one more."""
        nbytes = tensor.nbytes
        self.tensors += 1
        self.nbytes += nbytes
        self.digest = (self.digest + crc32(name.encode()) * (2 * nbytes + 1)) & _WORD

    def include(self, other: Tally) -> None:
        """Count all of another's."""
        self.tensors += other.tensors
        self.nbytes += other.nbytes
        self.digest = (self.digest + other.digest) & _WORD

    def __str__(self) -> str:
        return f"{self.tensors} tensors of {self.nbytes} bytes"


@dataclass(frozen=True)
class Held:
    """One parameter, as it is now."""

    dtype: str
    shape: tuple[int, ...]
    digest: str
    """Of a sample of its elements; empty where they do not lie in order."""
    loaded: bool = False
    """Whether a load has reached it since the engine was last asked."""


@dataclass
class Loaded:
    """What one tensor-parallel rank of an engine has loaded since it was last asked, and what it has now."""

    given: Tally = field(default_factory=Tally)
    """What loads were given: of the model's weights, or of an adapter's."""
    taken: int | None = 0
    """Bytes of it that a parameter's own loader, or a module with an adapter, took; None where nobody counted."""
    drafts: int = 0
    """Bytes that parameters of a model to draft by took."""
    stale: tuple[str, ...] = ()
    """Copies that the model computes with, and that are no longer those of its weights."""
    parameters: Mapping[str, Held] = field(default_factory=dict)

    def as_strings(self) -> dict[str, str]:
        """As SGLang passes it on, which knows strings by name."""
        given = self.given
        record = [given.tensors, given.nbytes, given.digest, self.taken, list(self.stale)]
        held = ((name, [h.dtype, h.shape, h.digest, h.loaded]) for name, h in self.parameters.items())
        return {_RECORD: json.dumps(record)} | {f"{_PARAMETER}{name}": json.dumps(values) for name, values in held}

    @classmethod
    def of_strings(cls, strings: Mapping[str, str]) -> Loaded:
        """The inverse, with what a model to draft by has answered."""
        tensors, nbytes, digest, taken, stale = json.loads(strings[_RECORD])
        *_, drafts, stale_drafts = json.loads(strings.get(DRAFT + _RECORD, "[0, []]"))
        parameters = {}
        for prefix in ("", DRAFT):
            begin = prefix + _PARAMETER
            for key, value in strings.items():
                if key.startswith(begin):
                    dtype, shape, of_sample, loaded = json.loads(value)
                    parameters[prefix + key.removeprefix(begin)] = Held(dtype, tuple(shape), of_sample, loaded)
        stale = (*stale, *(DRAFT + name for name in stale_drafts))
        return cls(Tally(tensors, nbytes, digest), taken, drafts or 0, stale, parameters)


def sample(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """Some of a tensor's elements, as they lie in memory, as bytes: others for another ``number``. ValueError where
    they do not lie in order."""
    import torch

    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of strides {tensor.stride()} is not contiguous")
    flat = tensor.detach().reshape(-1)
    stride = max(1, flat.numel() // _SAMPLE) | 1  # odd: not always the same columns
    picked = flat[number * _STEP % stride :: stride]
    return picked.contiguous().view(torch.uint8)


def held_by(
    parameters: Iterable[tuple[str, torch.Tensor]], number: int, loaded: Container[int] = ()
) -> dict[str, Held]:
    """Parameters by name, with digests of the samples of ``number``; those of the ids ``loaded`` were loaded."""
    found: list[tuple[str, torch.Tensor]] = list(parameters)
    samples: dict[str, torch.Tensor] = {}
    for name, tensor in found:
        if tensor.is_contiguous() and tensor.numel():
            samples[name] = sample(tensor, number)
    of_samples = digests(samples)
    return {
        name: Held(str(tensor.dtype), tuple(tensor.shape), of_samples.get(name, ""), id(tensor) in loaded)
        for name, tensor in found
    }


def digests(samples: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """64 bits of each of some tensors of bytes, which are brought to the host as one."""
    import torch

    if not samples:
        return {}
    raw, found, start = torch.cat(list(samples.values())).cpu().numpy(), {}, 0
    for name, each in samples.items():
        found[name] = blake2b(raw[start : start + len(each)].tobytes(), digest_size=8).hexdigest()
        start += len(each)
    return found
