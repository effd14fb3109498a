"""Weights as float8 engines hold them: between what the trainer exports and every transport, one step on buckets."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from slime.files.block_scaled import SCALE_END, block_sizes, is_linear, quantise
from slime.files.hf_reader import read_headers
from slime.files.hf_writer import NamedTensors


@dataclass(frozen=True)
class Float8Blocks:
    """Which weights of a checkpoint are in float8, and in what blocks; engines that serve it hold the same ones."""

    block: tuple[int, ...]
    names: frozenset[str] | None
    """Those that have scales in the checkpoint; None where it has no weights."""
    kept: tuple[str, ...] = ()
    """Without weights: the modules that config.json leaves in high precision."""

    @classmethod
    def of(cls, checkpoint: Path) -> Float8Blocks | None:
        """Of a Hugging Face directory; None of one that is not quantised, ValueError of one that is in another way."""
        block = block_sizes(checkpoint)
        if block is None:
            return None
        if any(checkpoint.glob("*.safetensors")):
            stored = read_headers(checkpoint)
            return cls(block, frozenset(name for name in stored if name + SCALE_END in stored))
        config = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
        kept = config.get("ignored_layers") or config.get("modules_to_not_convert") or ()
        return cls(block, None, tuple(module.removeprefix("model.") for module in kept))

    def has(self, name: str, tensor: Tensor) -> bool:
        """Whether a weight is one of them."""
        if self.names is not None:
            return name in self.names
        path = f".{name.removesuffix('.weight')}."
        return is_linear(name, tensor.shape) and not any(f".{module}." in path for module in self.kept)

    def quantised(self, buckets: Iterable[NamedTensors]) -> Iterator[NamedTensors]:
        """The same buckets with values and, right after each, its scales: the bytes that convert_hf_to_fp8 writes, but
        for weights that came from float8 and have moved little: engines follow those in the mean.

        A bucket stays one, so that what SGLang needs at once (`Row.same_bucket`, values and their scales) still comes
        at once, and is smaller: a byte for two, and four for a block.
        """
        return map(self._each, buckets)  # which, unlike a loop, holds none while the next is made

    def _each(self, bucket: NamedTensors) -> NamedTensors:
        made: NamedTensors = []
        for name, tensor in bucket:
            if not self.has(name, tensor):
                made.append((name, tensor))
                continue
            try:
                values, scales = quantise(tensor, self.block, in_the_mean=True)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            made += [(name, values), (name + SCALE_END, scales)]
        return made
