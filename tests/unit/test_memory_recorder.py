"""Snapshots of ``--record-memory-history``: of which rollouts, of what does not fit, and complete or not there."""

from __future__ import annotations

import pickle
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.files.storage import StorageError
from slime.fleet.placement import _what_trainers_lack, describe_placement
from slime.training.memory.log import DeviceMemoryError, MemoryLog
from slime.training.memory.recorder import MemoryRecorder
from slime.training.trainer import RolloutTrainer
from slime.utils import device
from tests.command_line import Fails, Parse

NUM_GPUS = 0


class _Gpu:
    """What of a GPU's recording is asked for, in order."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.fails = False

    def record_allocations(self, entries: int) -> None:
        self.asked.append(entries)

    def stop_recording(self) -> None:
        self.asked.append("stop")

    def dump_allocations(self, file: Path) -> None:
        self.asked.append("dump")
        file.write_bytes(b"half")
        if self.fails:
            raise OSError(28, "No space left on device", str(file))
        file.write_bytes(pickle.dumps(self.asked))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> _Gpu:
    fake = _Gpu()
    for name in ("record_allocations", "stop_recording", "dump_allocations"):
        monkeypatch.setattr(device, name, getattr(fake, name))
    return fake


def options(run_dir: Path, **given: Any) -> Namespace:
    usual = {"record_memory_history": True, "memory_recorder": "torch", "memory_snapshot_dir": None}
    return Namespace(**{**usual, "memory_snapshot_num_steps": None, "run_dir": str(run_dir), **given})


def files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def test_the_rollouts_that_were_asked_for(gpu: _Gpu, tmp_path: Path) -> None:
    """It has all since the rank's start, also of a run that goes on at a later rollout; then nothing is recorded."""
    recorder = MemoryRecorder(options(tmp_path, memory_snapshot_num_steps=2), 3)
    assert gpu.asked == [100_000]
    recorder.after_rollout(7)
    assert files(tmp_path) == []
    recorder.after_rollout(8)
    recorder.after_rollout(9)
    assert files(tmp_path) == ["memory/rollout_8_rank3.pickle"]
    assert pickle.loads((tmp_path / "memory/rollout_8_rank3.pickle").read_bytes()) == [100_000, "dump"]
    assert gpu.asked == [100_000, "dump", "stop"]
    assert recorder.after_failure("actor_train") == ""


def test_a_phase_that_does_not_fit(gpu: _Gpu, tmp_path: Path) -> None:
    """Its error says where the snapshot is, which is of before anything was released."""
    recorder = MemoryRecorder(options(tmp_path, memory_snapshot_dir=str(tmp_path / "mine")), 0)
    with pytest.raises(DeviceMemoryError) as error, MemoryLog(recorder).phase("actor_train"):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    file = tmp_path / "mine" / "actor_train_did_not_fit_rank0.pickle"
    assert str(error.value).splitlines()[-1].startswith(f"which code allocated what: {file}, ")
    assert pickle.loads(file.read_bytes()) == [100_000, "dump"]


def test_what_cannot_be_written(gpu: _Gpu, tmp_path: Path) -> None:
    """Is a line of the flag, with nothing half-written; of a phase that does not fit its own error counts."""
    recorder = MemoryRecorder(options(tmp_path, memory_snapshot_num_steps=1), 0)
    gpu.fails = True
    with pytest.raises(DeviceMemoryError) as error, MemoryLog(recorder).phase("save"):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert "which code" not in str(error.value)
    with pytest.raises(StorageError, match=f"^--memory-snapshot-dir {tmp_path}/memory: the disk is full"):
        recorder.after_rollout(0)
    assert files(tmp_path) == []


def test_nothing_is_recorded_unasked(gpu: _Gpu, tmp_path: Path) -> None:
    recorder = MemoryRecorder(options(tmp_path, record_memory_history=False), 0)
    recorder.after_rollout(0)
    assert recorder.after_failure("save") == ""
    assert gpu.asked == []
    assert files(tmp_path) == []


def test_a_trainer_says_when_a_rollout_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its last optimizer step."""
    done: list[Any] = []
    trainer = RolloutTrainer.__new__(RolloutTrainer)
    trainer.args = Namespace(
        **{"profile_target": None, "custom_convert_samples_to_train_data_path": None, "loss_type": "sft_loss"},
        **{"ref_update_interval": None, "save_debug_train_data": None, "rollout_data_postprocess_path": None},
    )
    trainer._seconds = {}
    trainer._recorder = Namespace(after_rollout=lambda rollout_id: done.append(rollout_id))  # type: ignore[assignment]
    trainer._memory = MemoryLog(trainer._recorder)
    learner = Namespace(gathering_parameters=lambda: device.side_stream())
    monkeypatch.setattr(trainer, "_training_order", lambda _: [(learner, None, "actor")])

    def take_steps(rollout_id: int, _: Any, steps: list[dict[str, float]], __: Any) -> tuple[float, bool]:
        done.append("steps")
        steps[0]["tokens"] = 1.0
        return 1.0, True

    monkeypatch.setattr(trainer, "_take_steps", take_steps)
    trainer.train(5, Namespace(steps=[Namespace(micro_batches=[])]))  # type: ignore[arg-type]
    assert done == ["steps", 5]


@pytest.mark.usefixtures("launch_directory")
def test_hosts_without_gpus(parse: Parse) -> None:
    """Have nothing that torch would record: a run is refused, a dry run warns, as it may look at another host's."""
    args, fleet = parse("--record-memory-history"), Namespace(trainers=1, engines=[])
    (reason,) = _what_trainers_lack(args, fleet, gpus=False)  # type: ignore[arg-type]
    assert reason.startswith("--record-memory-history: --memory-recorder torch records what is allocated on GPUs, and")
    assert describe_placement(args).splitlines()[-1] == f"warning: {reason}"
    assert not list(_what_trainers_lack(args, fleet, gpus=True))  # type: ignore[arg-type]
    assert not list(_what_trainers_lack(parse(), fleet, gpus=False))  # type: ignore[arg-type]


@pytest.mark.usefixtures("launch_directory")
def test_memray_that_is_not_there(fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = "--record-memory-history --memory-recorder memray --memory-snapshot-num-steps 1"
    assert "--memory-recorder memray: not installed here: pip install memray" in fails(words)


class _Tracker:
    """memray's, as far as it is used: the file is whole when it ends, and is made anew only if that is asked for."""

    def __init__(self, *, destination: Any, native_traces: bool) -> None:
        self._file = destination.open("wb" if destination.overwrite else "xb")

    def __enter__(self) -> None:
        self._file.write(b"begun ")

    def __exit__(self, *_: Any) -> None:
        self._file.write(b"ended")
        self._file.close()


@pytest.mark.parametrize("is_real", [False, True], ids=["stand-in", "memray"])
def test_the_hosts_memory(is_real: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By memray, with the function that allocated; what a process that was killed left is written over."""
    if is_real:
        memray = pytest.importorskip("memray")
    else:

        def destination(path: Path, overwrite: bool) -> Any:
            return Namespace(open=path.open, overwrite=overwrite)

        monkeypatch.setitem(sys.modules, "memray", Namespace(Tracker=_Tracker, FileDestination=destination))
    directory = tmp_path / "memory"
    directory.mkdir()
    (directory / ".rank1.tmp").write_bytes(b"half")
    recorder = MemoryRecorder(options(tmp_path, memory_recorder="memray", memory_snapshot_num_steps=1), 1)
    kept = _allocate()
    assert recorder.after_failure("actor_train") == ""
    recorder.after_rollout(0)
    assert files(directory) == ["rollout_0_rank1.bin"]
    if not is_real:
        assert (directory / "rollout_0_rank1.bin").read_bytes() == b"begun ended"
        return
    records = memray.FileReader(directory / "rollout_0_rank1.bin").get_high_watermark_allocation_records()
    mine = [record for record in records if "_allocate" in [function for function, *_ in record.stack_trace()]]
    assert sum(record.size for record in mine) >= kept.nbytes


def test_what_does_not_begin_to_record_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_Tracker, "__enter__", fail)
    destination = lambda path, overwrite: Namespace(open=path.open, overwrite=overwrite)  # noqa: E731
    monkeypatch.setitem(sys.modules, "memray", Namespace(Tracker=_Tracker, FileDestination=destination))
    with pytest.raises(StorageError, match=f"^--memory-snapshot-dir {tmp_path}/memory: the disk is full"):
        MemoryRecorder(options(tmp_path, memory_recorder="memray", memory_snapshot_num_steps=1), 0)


def _allocate() -> torch.Tensor:
    return torch.ones(2**24, dtype=torch.uint8)
