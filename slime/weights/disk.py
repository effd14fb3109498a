"""Weights by a shared file system: a Hugging Face directory for each version, renamed into place when complete."""

from __future__ import annotations

import contextlib
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

from slime.files.hf_writer import NamedTensors
from slime.utils.user_functions import call_user_function
from slime.weights.hf_directory import HFDirectoryWriter, load_format, stored_tensors
from slime.weights.publisher import WeightPublisher


class DiskPublisher(WeightPublisher):
    """Rank 0 writes ``weight_v000012``; the engines load it; the version that it wrote before is removed.

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
        self.each_engine("push", lambda control: control.update_weights_from_disk(str(directory), how))
        self._writer = None  # the engines have it: a later publication that fails must not take it away
        if self._previous not in (None, directory) and not self.args.update_weight_disk_keep_files:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self._previous)
        self._previous = directory

    def _abandon(self) -> None:
        if self._writer is not None:
            self._writer.discard()
            self._writer = None
