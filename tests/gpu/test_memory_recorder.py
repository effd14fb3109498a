"""Snapshots of what is allocated on a GPU, as torch's own reader finds them: with the code that allocated it."""

from __future__ import annotations

import pickle
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.training.memory.log import DeviceMemoryError, MemoryLog
from slime.training.memory.recorder import MemoryRecorder
from slime.utils import device

NUM_GPUS = 1
_SIZE = 38 * 2**20
"""Bytes; the allocator gives blocks of whole 2 MiB what was asked for, and no more."""


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[MemoryRecorder]:
    options = {"record_memory_history": True, "memory_recorder": "torch", "memory_snapshot_num_steps": 2}
    yield MemoryRecorder(Namespace(**options, memory_snapshot_dir=None, run_dir=str(tmp_path)), 0)
    device.stop_recording()


def _allocate(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device.current_device())


def made_by(entry: dict[str, Any]) -> set[tuple[str, str]]:
    """File and function of each frame of a block, or of an event."""
    return {(Path(frame["filename"]).name, frame["name"]) for frame in entry["frames"]}


HERE = Path(__file__).name, "_allocate"


def test_a_snapshot_names_the_code_that_allocated(recorder: MemoryRecorder, tmp_path: Path) -> None:
    """What lives, and in the order of time what is gone as well; after the last rollout nothing more."""
    kept = _allocate(_SIZE)
    _allocate(2 * _SIZE)
    recorder.after_rollout(0)
    recorder.after_rollout(1)
    (file,) = (tmp_path / "memory").iterdir()
    assert file.name == "rollout_1_rank0.pickle"
    snapshot = pickle.loads(file.read_bytes())
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    mine = [block for block in blocks if block["state"] == "active_allocated" and HERE in made_by(block)]
    assert [block["requested_size"] for block in mine] == [kept.nbytes]
    events = [event for events in snapshot["device_traces"] for event in events]
    assert [e["size"] for e in events if e["action"] == "alloc" and HERE in made_by(e)] == [_SIZE, 2 * _SIZE]
    _allocate(3 * _SIZE)
    device.dump_allocations(file)
    events = [event for events in pickle.loads(file.read_bytes())["device_traces"] for event in events]
    assert 3 * _SIZE not in [event["size"] for event in events]


def test_a_snapshot_of_what_does_not_fit(recorder: MemoryRecorder, tmp_path: Path) -> None:
    kept = _allocate(_SIZE)
    with pytest.raises(DeviceMemoryError, match="which code allocated what"), MemoryLog(recorder).phase("actor_train"):
        _allocate(device.memory().total * 2)
    snapshot = pickle.loads((tmp_path / "memory" / "actor_train_did_not_fit_rank0.pickle").read_bytes())
    events = [event for events in snapshot["device_traces"] for event in events]
    assert "oom" in [event["action"] for event in events]
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    assert kept.nbytes in [block["requested_size"] for block in blocks if HERE in made_by(block)]
