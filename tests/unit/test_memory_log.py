"""A phase that does not fit into a GPU: its error tells of the phases before it, and what helps."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.megatron import trainer as trainers
from slime.backends.megatron.trainer import MegatronTrainer
from slime.files.hf_writer import NamedTensors
from slime.ray.train_actor import TrainActor
from slime.training.memory.log import DeviceMemoryError, MemoryLog
from slime.training.memory.recorder import MemoryRecorder
from slime.weights.publisher import WeightPublisher
from tests.fake_control import FakeControl, addresses_of

NUM_GPUS = 0

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"


class _Publisher(WeightPublisher):
    """One whose buckets do not fit where they are made ready, or where they are brought to the engine."""

    fails_in = ""

    def _stage(self, bucket: NamedTensors) -> None:
        _fail(self.fails_in == "stage")

    def _deliver(self, bucket: NamedTensors, staged: Any) -> None:
        _fail(self.fails_in == "deliver")


def _fail(fails: bool = True) -> None:
    if fails:
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)


def trainer() -> MegatronTrainer:
    made = MegatronTrainer.__new__(MegatronTrainer)
    off = Namespace(record_memory_history=False, memory_snapshot_num_steps=None)
    made._memory = MemoryLog(MemoryRecorder(off, 0))
    with made._memory.phase("start"):
        pass
    return made


def check(error: DeviceMemoryError, phase: str, advice: str) -> None:
    first, _, start, failed, helps = str(error).splitlines()
    assert first == f"{phase}: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert start.startswith("start  ")
    assert failed.startswith(f"{phase} (did not fit)  ")
    assert helps.startswith(f"what helps: {advice}")


def test_training_that_does_not_fit() -> None:
    with pytest.raises(DeviceMemoryError) as error, trainer()._memory.phase("actor_train"):
        _fail()
    check(error.value, "actor_train", "lower --max-tokens-per-gpu")


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (
            "NCCL error: unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed.\n"
            "Last error:\nFailed to CUDA calloc 536870912 bytes",
            "Failed to CUDA calloc 536870912 bytes",
        ),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",) * 2,
        ("NCCL error\nLast error:\nCuda failure 2 'out of memory'", "Cuda failure 2 'out of memory'"),
        ("CUDA error: out of memory\nCompile with", "CUDA error: out of memory"),
    ],
)
def test_libraries_that_get_no_memory(said: str, line: str) -> None:
    """Which is no broken connection, after which trainers would be made anew."""
    error = torch.distributed.DistBackendError if said.startswith("NCCL") else RuntimeError
    with pytest.raises(DeviceMemoryError) as failed, trainer()._memory.phase("actor_train"):
        raise error(said)
    assert str(failed.value).splitlines()[0] == f"actor_train: {line}"


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="peer closed"), trainer()._memory.phase("actor_train"):
        raise RuntimeError("Connection reset: peer closed")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fails_in", ["export", "gather", "stage", "deliver"])
def test_a_push_that_does_not_fit(fails_in: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def export(version: int, *, own_experts: bool) -> Iterator[NamedTensors]:
        _fail(fails_in == "export")
        return gather()

    def gather() -> Iterator[NamedTensors]:
        _fail(fails_in == "gather")
        yield [("a", torch.ones(2))]

    args = Namespace(
        weight_update_timeout=100.0,
        drafts_apart=False,
        check_weight_update_equal=False,
        asynchronous=False,
        allow_untested_versions=False,
    )
    args.expert_model_parallel_size = args.expert_tensor_parallel_size = 1
    actor = TrainActor.__new__(TrainActor)
    actor._args, actor._float8, actor._trainer = args, None, trainer()
    monkeypatch.setattr(actor._trainer, "export_buckets", export)
    actor._publisher = publisher = _Publisher(args, rank)
    publisher.fails_in, engines = fails_in, addresses_of([FakeControl()])
    if (fails_in, rank) == ("deliver", 1):  # rank 0's alone
        actor.publish(1, engines, "group")
        assert "push  " in actor._trainer._memory.table()
        return
    with pytest.raises(DeviceMemoryError) as error:
        actor.publish(1, engines, "group")
    check(error.value, "push", "lower --update-weight-buffer-size, cut the model")


@pytest.mark.parametrize("what", ["save", "save_critic", "save_hf", "save_lora"])
def test_a_save_that_does_not_fit(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, learner = trainer(), Namespace(save=lambda directory: _fail())
    made.args, made.model_chunks = Namespace(hf_checkpoint="model"), []
    made.family = made.shape = made._actor = made._critic = learner  # type: ignore[assignment]
    for writer in ("save_hf", "save_adapters"):
        monkeypatch.setattr(trainers.weights_io, writer, lambda *words: _fail())
    words: list[Any] = [str(tmp_path / "saved")] + ([3] if what in ("save_hf", "save_lora") else [])
    monkeypatch.setattr(trainers.checkpoint_dirs, "staging_directory", lambda directory: directory)
    with pytest.raises(DeviceMemoryError) as error:
        getattr(made, what)(*words)
    check(error.value, "save", "cut the model over more GPUs")
