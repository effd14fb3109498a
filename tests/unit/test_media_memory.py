"""What a rollout of many samples with large media holds, from samples to the trainer's forward calls."""

from __future__ import annotations

import pickle
import tracemalloc
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.data import Column, Sample
from slime.data.columns import with_declared
from slime.data.media import MediaRef, refer
from slime.rollout.batches.train_data import to_columns
from slime.training.micro_batch import MicroBatch, Pass
from tests.micro_batches import pack_layout, step_of
from tests.unit.test_train_data import make_args, make_samples

NUM_GPUS = 0
GROUPS, PER_GROUP, ITEMS, ITEM_BYTES = 64, 8, 8, 2_000_000
MIB = 1 << 20


def pixels(args: Namespace, media: Sequence[bytes]) -> dict[str, np.ndarray]:
    """As large as the bytes."""
    return {"pixels": np.stack([np.frombuffer(data, np.uint8) for data in media])}


COLUMNS = (Column("pictures", np.object_, "media", load=pixels),)


@pytest.fixture
def samples(tmp_path: Path) -> list[Sample]:
    """512 in groups of 8, each group with 8 items of 2 MB: 1 GB in files, 8 GB if every sample had its own."""

    def item(group: int, number: int) -> MediaRef:
        path = tmp_path / f"{group}_{number}"
        with open(path, "wb") as file:
            file.write(f"{group} {number}".encode())
            file.truncate(ITEM_BYTES)
        return refer(path)

    made = make_samples(groups=GROUPS, per_group=PER_GROUP)
    references = [[item(group, number) for number in range(ITEMS)] for group in range(GROUPS)]
    for index, sample in enumerate(made):
        sample.columns["pictures"] = references[index // PER_GROUP]
    return made


def peak_of(call: Callable[[], Any]) -> tuple[Any, float]:
    """What a call returns, and the most that it held beyond what was there before, in MiB."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        value = call()
        return value, (tracemalloc.get_traced_memory()[1] - before) / MIB
    finally:
        tracemalloc.stop()


@pytest.mark.full
def test_media_are_in_memory_a_micro_batch_at_a_time(
    samples: list[Sample], record_property: Callable[[str, object], None]
) -> None:
    """Samples, what crosses the object store and a batch are references; a pass has two micro-batches' bytes: the one
    that it is at and the one that is prepared meanwhile."""
    args = make_args()
    args.column_modules = [__file__]
    plain = [sample.to_dict() for sample in samples]
    batch, building = peak_of(lambda: to_columns(args, samples))
    crossing, saved = len(pickle.dumps(batch)) / MIB, len(pickle.dumps(plain)) / MIB
    layout = pack_layout(columns=with_declared(COLUMNS))
    micro_batches = [MicroBatch(batch, rows, step_of(batch), layout) for rows in np.split(np.arange(len(batch)), 64)]

    def go_through() -> int:
        total = 0
        with Pass(micro_batches) as taken:
            for micro_batch in taken:
                total += micro_batch.model_inputs["pixels"].numel()
        return total

    total, training = peak_of(go_through)
    figures = {"object store": crossing, "checkpoint of all samples": saved, "building": building, "a pass": training}
    for name, value in figures.items():
        record_property(f"{name}, MiB", round(value, 1))
    assert total == GROUPS * PER_GROUP * ITEMS * ITEM_BYTES
    micro_batch_bytes = PER_GROUP * ITEMS * ITEM_BYTES / MIB
    assert crossing < 5
    assert saved < 5
    assert building < 5
    assert training < 4 * micro_batch_bytes
