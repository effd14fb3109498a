"""Weights by a shared file system: a Hugging Face directory for each version, renamed into place when complete."""

from __future__ import annotations

import re
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

from slime.files import atomic_io
from slime.files.hf_writer import NamedTensors
from slime.utils.user_functions import call_user_function
from slime.weights.hf_directory import HFDirectoryWriter, load_format, stored_tensors
from slime.weights.publisher import WeightPublisher

_NAME = re.compile(r"weight_v(\d+)")


class DiskPublisher(WeightPublisher):
    """Rank 0 writes ``weight_v000012``; the engines load it; the version that it wrote before is removed, and any of a
    run that has gone back.

    Requests that engines have go on while the files are written, and pause only while they are read.
    """

    pauses_for_buckets = False

    def __init__(self, args: Namespace, rank: int) -> None:
        super().__init__(args, rank)
        self._writer: HFDirectoryWriter | None = None
        self._written: Path | None = None
        self._previous: Path | None = None

    def _prepare(self, version: int) -> None:
        self._writer = HFDirectoryWriter(self.args, f"weight_v{version:06d}")

    def _deliver(self, bucket: NamedTensors, staged: Any) -> None:
        # Not beside the next gather: engines do not wait for it, what they have goes on meanwhile.
        assert self._writer is not None
        self._writer.add(bucket)

    def _seal(self, version: int) -> None:
        assert self._writer is not None
        directory = self._written = self._writer.commit()
        if (path := self.args.custom_update_weight_post_write_path) is not None:
            values = {"args": self.args, "version_dir": str(directory), "rollout_engines": self.engines}
            call_user_function("--custom-update-weight-post-write-path", path, values)
            self._proof.send_instead(stored_tensors(directory))  # which it may have changed

    def _complete(self, version: int) -> None:
        directory, how = self._written, load_format(self.args)
        assert directory is not None
        self.each_engine("push", lambda control: control.update_weights_from_disk(str(directory), how))
        self._writer = None  # the engines have it: a later publication that fails must not take it away
        self._remove_others(version, directory)
        self._previous = directory

    def _remove_others(self, version: int, directory: Path) -> None:
        """The version before, and what trainers that were killed left: they may have been ahead of these, which then
        make versions of the same numbers anew."""
        for left in atomic_io.leftovers(directory.parent, "weight_v*"):
            shutil.rmtree(left, ignore_errors=True)
        if self.args.update_weight_disk_keep_files:
            return
        for other in directory.parent.iterdir():
            ahead = (found := _NAME.fullmatch(other.name)) is not None and int(found[1]) > version
            if ahead or other == self._previous != directory:
                atomic_io.remove_directory(other)

    def _abandon(self) -> None:
        if self._writer is not None:
            self._writer.discard()
            self._writer = None
