"""A torch.distributed.checkpoint directory with Hugging Face names, as FSDP trainers save them, to Hugging Face."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from slime.convert.hf_files import Spec, stored_specs
from slime.convert.running import check_output, run_all, written_model
from slime.convert.stored import METADATA, StoredTensors
from slime.files.checkpoints import COMMON
from slime.models import hf_config
from slime.utils.errors import BadInputError, abbreviate

_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")
_FUSED = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", None)}
"""Where transformers 5 has an expert's matrices while a model is in memory: key, and which half of the rows."""


@dataclass(frozen=True)
class Part:
    """A Hugging Face tensor, as what it is of a stored one."""

    name: str
    expert: int | None = None
    """Index of the first dimension."""
    half: int | None = None
    """Of the rows of that."""

    def of(self, whole: Tensor) -> Tensor:
        """Itself, of the stored tensor; works on meta tensors too."""
        tensor = whole if self.expert is None else whole[self.expert]
        return tensor if self.half is None else tensor.chunk(2, dim=0)[self.half]

    def shape_of(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Its shape, of the stored tensor's."""
        shape = whole if self.expert is None else whole[1:]
        return shape if self.half is None else (shape[0] // 2, *shape[1:])


def convert(source: Path, output: Path, origin: Path, *, shard_bytes: int, workers: int, force: bool) -> None:
    """Write a Hugging Face directory; BadInputError where the checkpoint does not hold the origin's tensors, or where
    there is no room for the output.

    Args:
        source: the checkpoint, or a directory with it in ``model``.
        origin: the Hugging Face directory that the model came from, whose tensors are looked for.
        output, shard_bytes, workers, force: as of `fp8.convert`.
    """
    check_output(output, [source, origin], force=force)
    stored = StoredTensors(find_checkpoint(source))
    wanted = stored_specs(origin)
    tied = bool(hf_config(origin).tie_word_embeddings)
    parts = assign(stored, wanted, optional={"lm_head.weight"} if tied else set())
    specs: dict[str, Spec] = {}
    for key, own in parts.items():
        for part in own:
            shape = part.shape_of(stored.shape(key))
            if shape != wanted[part.name].shape:
                raise BadInputError(
                    f"{source}: {key} makes {part.name} {list(shape)}, and that of {origin} is "
                    f"{list(wanted[part.name].shape)}: is it another model's?"
                )
            specs[part.name] = Spec(shape, stored.dtype(key))
    with written_model("dcp to hf", output, specs, shard_bytes, origin) as write:

        def do(key: str) -> None:
            whole = stored.read(key)
            for part in parts[key]:
                write(part.name, part.of(whole))

        run_all(parts, do, workers)


def find_checkpoint(directory: Path) -> Path:
    """The directory itself or ``model`` in it; BadInputError where neither is a checkpoint, or it is one of
    Megatron's."""
    for place in (directory, directory / "model"):
        if (place / METADATA).is_file():
            if (place / COMMON).is_file():
                raise BadInputError(f"{place} is Megatron's (it has {COMMON}): use tools/convert_torch_dist_to_hf.py")
            return place
    raise BadInputError(f"there is no {METADATA} in {directory} or {directory / 'model'}: it is not a whole checkpoint")


def assign(stored: Iterable[str], wanted: Mapping[str, Spec], optional: set[str]) -> dict[str, list[Part]]:
    """Stored key -> the Hugging Face tensors that it becomes; BadInputError where wanted ones, other than ``optional``,
    are not stored. Keys may have anything before the Hugging Face names, the same before all of them; what has no such
    name is other state."""
    keys = list(stored)
    candidates = {name: list(places(name)) for name in wanted}
    prefix = _prefix(keys, {key for own in candidates.values() for key, _ in own})
    present = set(keys)
    parts: dict[str, list[Part]] = {}
    missing = []
    for name, own in candidates.items():
        found = next(((prefix + key, part) for key, part in own if prefix + key in present), None)
        if found is not None:
            parts.setdefault(found[0], []).append(found[1])
        elif name not in optional:
            missing.append(name)
    if missing:
        raise BadInputError(
            f"the checkpoint has no tensors for {abbreviate(missing)}; it has, for example, {abbreviate(keys)}"
        )
    return parts


def places(name: str) -> Iterator[tuple[str, Part]]:
    """Under which keys transformers may have a tensor in memory, and as which part of what is there."""
    yield name, Part(name)
    if found := _EXPERT.match(name):
        key, half = _FUSED[found[3]]
        yield f"{found[1]}.{key}", Part(name, int(found[2]), half)


def _prefix(keys: Iterable[str], names: set[str]) -> str:
    """What is before most names; not the optimizer's, whose state of a parameter may have its name too."""
    counts: Counter[str] = Counter()
    for key in keys:
        words = key.split(".")
        for i in range(len(words)):
            if ".".join(words[i:]) in names:
                counts["".join(word + "." for word in words[:i])] += 1
                break
    if not counts:
        return ""
    return max(counts, key=lambda prefix: ("optim" not in prefix, counts[prefix], -len(prefix)))
