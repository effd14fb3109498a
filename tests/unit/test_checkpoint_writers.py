"""Who writes the files of a training checkpoint: threads of the rank."""

from __future__ import annotations

import io
import queue
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.planner_helpers import _create_write_item_for_tensor

from slime.backends.megatron.patches import write_by_threads

NUM_GPUS = 0
_NAME = "write_preloaded_data_multiproc"


def write(files: dict[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write files of named tensors each as a rank does; what it puts among its results."""
    monkeypatch.setattr(FileSystemWriterAsync, _NAME, None, raising=False)  # to have it back after the test
    write_by_threads()
    monkeypatch.setattr("os.fork", None)
    buckets = []
    for path, tensors in files.items():
        items = [(_create_write_item_for_tensor(name, tensor), tensor) for name, tensor in tensors.items()]
        buckets.append((str(path), path.name, ([], items)))
    results: queue.Queue[Any] = queue.Queue()
    getattr(FileSystemWriterAsync, _NAME)([_StorageWriterTransforms()], False, 0, buckets, results)
    return results.get_nowait()


def test_files_are_written_and_told_of_by_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [{f"{file}.{name}": torch.randn(5, 3) for name in range(4)} for file in range(3)]
    files = {tmp_path / f"{file}.distcp": of_file for file, of_file in enumerate(tensors)}
    told = write(files, monkeypatch)
    assert sorted(told) == [0, 1, 2]
    for (path, of_file), written in zip(files.items(), (told[number] for number in range(3)), strict=True):
        assert [result.index.fqn for result in written] == list(of_file)
        for result, tensor in zip(written, of_file.values(), strict=True):
            place = result.storage_data
            assert place.relative_path == path.name
            with path.open("rb") as file:
                file.seek(place.offset)
                assert torch.equal(torch.load(io.BytesIO(file.read(place.length))), tensor)


def test_a_file_that_cannot_be_written_is_what_a_save_fails_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {tmp_path / "there": {"a": torch.ones(2)}, tmp_path / "missing" / "gone": {"b": torch.ones(2)}}
    told = write(files, monkeypatch)
    assert isinstance(told, FileNotFoundError)
    assert told.filename == str(tmp_path / "missing" / "gone")
