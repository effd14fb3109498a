"""Hugging Face weight directories: written bucket by bucket and renamed into place; names and tensors of one."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

NamedTensors = list[tuple[str, torch.Tensor]]
"""One bucket: Hugging Face names and full tensors."""

INDEX_NAME = "model.safetensors.index.json"
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")


class HFDirectoryWriter:
    """Writes a Hugging Face directory bucket by bucket, aside; `commit` renames it into place."""

    def __init__(self, directory: Path, template: Path) -> None:
        """
        Args:
            directory: where it shall be; replaced if it is there.
            template: a Hugging Face directory whose other files (config, tokenizer) are copied.
        """
        self.directory = directory
        self._aside = directory.with_name(f".{directory.name}.tmp")
        self._file_of: dict[str, str] = {}
        self._size = 0
        shutil.rmtree(self._aside, ignore_errors=True)
        self._aside.mkdir(parents=True)
        for path in template.iterdir():
            if path.is_file() and not any(path.match(pattern) for pattern in _WEIGHT_FILES):
                shutil.copy2(path, self._aside / path.name)

    def add(self, bucket: NamedTensors) -> None:
        """Write one bucket as one file."""
        file_name = f"model-{len(set(self._file_of.values())) + 1:05d}.safetensors"
        tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in bucket}
        # A copy for each: safetensors refuses tensors that share memory, as views of one buffer do.
        save_file({name: t.clone() for name, t in tensors.items()}, self._aside / file_name, metadata={"format": "pt"})
        self._file_of |= dict.fromkeys(tensors, file_name)
        self._size += sum(tensor.nbytes for tensor in tensors.values())

    def commit(self) -> Path:
        """Write the index and move the directory into place; its path."""
        index = {"metadata": {"total_size": self._size}, "weight_map": self._file_of}
        (self._aside / INDEX_NAME).write_text(json.dumps(index, indent=1))
        shutil.rmtree(self.directory, ignore_errors=True)
        self._aside.rename(self.directory)
        return self.directory

    def discard(self) -> None:
        """Remove what has been written, committed or not."""
        shutil.rmtree(self._aside, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)


def weights_directory(args: Namespace) -> Path:
    """Where versions are written: ``--update-weight-disk-dir``, or ``weights`` in the run's directory."""
    return Path(args.update_weight_disk_dir or Path(args.run_dir, "weights")).absolute()


def stored_tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a directory's safetensors files, one at a time, on the CPU."""
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as stored:
            yield from ((name, stored.get_tensor(name)) for name in sorted(stored.keys()))


def stored_names(directory: Path) -> set[str]:
    """The tensor names of a directory's safetensors files."""
    names: set[str] = set()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as stored:
            names.update(stored.keys())
    return names
