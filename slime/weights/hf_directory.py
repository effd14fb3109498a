"""Hugging Face weight directories: written bucket by bucket and renamed into place; the tensors of one."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from slime.files import atomic_io
from slime.files.exports import weights_directory
from slime.files.hf_writer import HFWriter, NamedTensors
from slime.files.storage import writing


class HFDirectoryWriter(HFWriter):
    """A `HFWriter` of a staging directory, which `commit` renames into place."""

    def __init__(self, args: Namespace, name: str) -> None:
        """In `weights_directory`, where one of the name is replaced; its other files (config, tokenizer) are those of
        ``--hf-checkpoint``. Every method raises StorageError where it cannot be written."""
        self._final = weights_directory(args) / name
        self._flag = "--update-weight-disk-dir" if args.update_weight_disk_dir else "--run-dir"
        self._committed = False
        with writing(self._flag, self._final):
            super().__init__(atomic_io.staging_directory(self._final), Path(args.hf_checkpoint))

    def add(self, bucket: NamedTensors) -> None:
        """Write one bucket, as `HFWriter.add` does."""
        with writing(self._flag, self._final):
            super().add(bucket)

    def commit(self) -> Path:
        """Complete the directory and move it into place; its path."""
        with writing(self._flag, self._final):
            self.finish()
            atomic_io.commit_directory(self._final)
        self._committed = True
        return self._final

    def discard(self) -> None:
        """Remove what has been written, committed or not."""
        atomic_io.discard_directory(self._final)
        if self._committed:
            shutil.rmtree(self._final, ignore_errors=True)


def load_format(args: Namespace) -> str | None:
    """How engines read such a directory; None is as they read their first weights, which may have been random ones."""
    return "auto" if args.random_weights else None


def stored_tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a directory's safetensors files, one at a time, on the CPU."""
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as stored:
            yield from ((name, stored.get_tensor(name)) for name in sorted(stored.keys()))
