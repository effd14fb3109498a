"""Writing a Hugging Face directory bucket by bucket: sharded safetensors, and the origin's config and tokenizer."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

NamedTensors = list[tuple[str, torch.Tensor]]
"""One bucket: Hugging Face names and full tensors."""

INDEX_NAME = "model.safetensors.index.json"
_ASSETS = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py")
_INDEX_END = ".index.json"


class HFWriter:
    """Writes into a staging directory, which is a complete model after `finish`: commit it then."""

    def __init__(self, directory: Path, origin: Path) -> None:
        """``directory`` is an existing empty one; the other files (config, tokenizer) of ``origin`` belong to the
        weights."""
        self._directory = directory
        self._origin = origin
        self._parts: list[list[str]] = []
        self._bytes_of: Counter[torch.dtype] = Counter()

    def add(self, bucket: NamedTensors) -> None:
        """Write one bucket as one file. Its tensors may be views of one buffer, as long as they do not overlap."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in bucket}
        save_tensors(tensors, self._directory / _part(len(self._parts)))
        self._parts.append(list(tensors))
        for tensor in tensors.values():
            self._bytes_of[tensor.dtype] += tensor.nbytes

    def finish(self) -> None:
        """Give the files their names, and add what else makes a model: index, config, tokenizer."""
        count = len(self._parts)
        file_of: dict[str, str] = {}
        for number, names in enumerate(self._parts):
            file = file_name(number, count)
            (self._directory / _part(number)).rename(self._directory / file)
            file_of |= dict.fromkeys(names, file)
        complete(self._directory, self._origin, file_of, self._bytes_of)


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write one safetensors file, with the permissions that the process gives its files."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})  # puts one of its own in the place, for the owner only
    path.chmod(mode)


def complete(
    directory: Path,
    origin: Path,
    file_of: Mapping[str, str],
    bytes_of: Counter[torch.dtype],
    changes: Mapping[str, Any] | None = None,
) -> None:
    """Add to weights what else makes a model: an index, the origin's config, tokenizer and generation settings.

    Args:
        file_of: which file holds which tensor.
        bytes_of: how much of the weights has which type; config.json names the most common. Of weights in float8 it
            stays as it is: it names the type of the others, and says how these were quantised.
        changes: other entries of config.json to set.
    """
    if len(set(file_of.values())) > 1:
        index = {"metadata": {"total_size": bytes_of.total()}, "weight_map": file_of}
        (directory / INDEX_NAME).write_text(json.dumps(index, indent=2))
    for path in origin.iterdir():
        if path.is_file() and path.suffix in _ASSETS and not path.name.endswith(_INDEX_END):
            shutil.copyfile(path, directory / path.name)
    file = directory / "config.json"
    config = json.loads(file.read_text())
    changed = {**config, **(changes or {})}
    if bytes_of and not any(dtype.is_floating_point and dtype.itemsize == 1 for dtype in bytes_of):
        # The files hold what was trained, which need not be the origin's type and is not quantized.
        ((dtype, _),) = bytes_of.most_common(1)
        changed["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
        changed.pop("quantization_config", None)
    if changed != config:
        file.write_text(json.dumps(changed, indent=2) + "\n")


def file_name(number: int, count: int) -> str:
    """Of file ``number`` (from 0) of a model of ``count`` files."""
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"


def _part(number: int) -> str:
    # The number of files, which is in their final names, is known at the end only.
    return f"part-{number:05d}.safetensors"
