"""Media by reference: the same bytes wherever they are loaded, and small wherever they are only referred to."""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slime.data import Column, OptimizerStep, Ragged, Sample, TrainBatch
from slime.data.columns import with_declared
from slime.data.media import MediaError, MediaRef, from_plain, keep, refer, to_plain
from slime.training.micro_batch import MicroBatch, Pass
from slime.utils.errors import BadInputError
from tests.micro_batches import pack_layout

NUM_GPUS = 0
BYTES = os.urandom(3000)


def test_bytes_are_kept_once_and_loaded_as_they_were(tmp_path: Path) -> None:
    one, same = keep(BYTES, tmp_path), keep(BYTES, tmp_path)
    assert one == same
    assert one.sha256 == hashlib.sha256(BYTES).hexdigest()
    assert [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()] == [BYTES]
    assert one.load() == BYTES
    assert keep(BYTES, tmp_path, "audio") != one


def test_a_file_is_referred_to_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cat.png").write_bytes(BYTES)
    monkeypatch.chdir(tmp_path)
    reference = refer("cat.png")
    assert reference == keep(BYTES, tmp_path / "media")
    assert reference.where == str(tmp_path / "cat.png")
    assert reference.load() == BYTES
    with pytest.raises(MediaError, match=r"video \S+/dog.mp4: No such file or directory"):
        refer("dog.mp4", "video")


@pytest.mark.parametrize("change", ["gone", "shorter", "other bytes"])
def test_what_is_no_longer_there_is_named(change: str, tmp_path: Path) -> None:
    path = tmp_path / "cat.png"
    path.write_bytes(BYTES)
    reference = refer(path)
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes(BYTES[:-1] if change == "shorter" else bytes(len(BYTES)))
    with pytest.raises(MediaError) as error:
        reference.load()
    said = "readable on every host" if change == "gone" else "it has changed since the sample that refers to it"
    assert str(error.value).startswith(f"image {path}: ")
    assert said in str(error.value)


def test_bytes_may_be_anywhere_else(tmp_path: Path) -> None:
    reference = keep(BYTES, tmp_path)
    elsewhere = replace(reference, where=functools.partial(bytes, BYTES))
    assert elsewhere == reference
    assert elsewhere.load() == BYTES
    with pytest.raises(MediaError, match=r"^sample 4: image \w{12}: its bytes are in no file, and would not outlive"):
        Sample(index=4, multimodal_inputs={"image": [elsewhere]}).to_dict()
    gone = replace(reference, where=functools.partial({}.__getitem__, "x"))
    with pytest.raises(MediaError, match=r"image \w{12}: getting its bytes raised KeyError\('x'\)"):
        gone.load()


def test_half_a_file_is_written_again(tmp_path: Path) -> None:
    reference = keep(BYTES, tmp_path)
    Path(str(reference.where)).write_bytes(BYTES[:100])
    assert keep(BYTES, tmp_path).load() == BYTES
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


def test_plain_values_lead_back(tmp_path: Path) -> None:
    inputs = {"image": [keep(BYTES, tmp_path)], "more": {"x": (1, "y")}}
    assert from_plain(to_plain(inputs)) == {"image": inputs["image"], "more": {"x": (1, "y")}}
    prompt = [{"role": "user", "content": [{"type": "image", "image": inputs["image"][0]}]}]
    sample = Sample(index=1, prompt=prompt, multimodal_inputs=inputs, columns={"pictures": inputs["image"]})
    again = Sample.from_dict(sample.to_dict())
    assert again.multimodal_inputs["image"][0].load() == BYTES  # type: ignore[index]
    assert again.columns["pictures"] == inputs["image"]
    assert again.prompt == prompt
    again.reset_response()
    assert again.columns["pictures"] == inputs["image"], "they are the prompt's"


def test_a_group_of_large_media_is_small(tmp_path: Path) -> None:
    """As the data source copies its prompt for each member, and keeps it while it is in flight."""
    large = [keep(os.urandom(2 << 20), tmp_path) for _ in range(8)]
    group = [Sample(index=i, multimodal_inputs={"image": large}) for i in range(8)]
    assert len(pickle.dumps(group)) < 10_000


# ---- as a model gets them


def sizes(args: Namespace, media: Sequence[bytes]) -> Mapping[str, np.ndarray]:
    return {"sizes": np.array([len(data) for data in media])}


def batch_of(references: list[tuple[MediaRef, ...]]) -> TrainBatch:
    column = np.empty(len(references), dtype=object)
    column[:] = references
    ones = np.ones(len(references), dtype=np.int64)
    return TrainBatch({}).changed(
        tokens=Ragged.from_rows([[1, 2, 3]] * len(references), np.int32),
        loss_mask=Ragged.from_rows([[1, 1]] * len(references), np.uint8),
        rollout_mask_sums=2 * ones,
        sample_indices=10 * np.arange(len(references)),
        pictures=column,
    )


def micro_batches_of(batch: TrainBatch, column: Column) -> list[MicroBatch]:
    layout = pack_layout(columns=with_declared([column]))
    step = OptimizerStep([], len(batch), 2 * len(batch), len(batch))
    return [MicroBatch(batch, np.array([row]), step, layout) for row in range(len(batch))]


def test_they_are_loaded_when_a_pass_comes_to_them_and_then_let_go(tmp_path: Path) -> None:
    """The next one's are read meanwhile, and no more than those."""
    loaded: list[int] = []

    def get(number: int) -> bytes:
        loaded.append(number)
        return BYTES[:number]

    references = [
        replace(keep(BYTES[:number], tmp_path), where=functools.partial(get, number)) for number in range(1, 5)
    ]
    batch = batch_of([(reference,) for reference in references])
    micro_batches = micro_batches_of(batch, Column("pictures", np.object_, "media", load=sizes))
    assert loaded == []
    with Pass(micro_batches) as taken:
        for number, micro_batch in enumerate(taken, start=1):
            assert micro_batch.model_inputs["sizes"].tolist() == [number]
            assert len(loaded) <= number + 1
    assert loaded == [1, 2, 3, 4]
    assert not any(m._loaded or "pictures" in m._host for m in micro_batches)


def test_members_of_a_group_have_theirs_loaded_once(tmp_path: Path) -> None:
    loaded: list[int] = []

    def get() -> bytes:
        loaded.append(1)
        return BYTES

    reference = replace(keep(BYTES, tmp_path), where=get)
    batch = batch_of([(reference,), (reference, reference)])
    layout = pack_layout(columns=with_declared([Column("pictures", np.object_, "media", load=sizes)]))
    both = MicroBatch(batch, np.arange(2), OptimizerStep([], 2, 4, 2), layout)
    assert both.model_inputs["sizes"].tolist() == [3000] * 3
    assert loaded == [1]


def test_samples_without_any_have_no_input() -> None:
    (micro_batch,) = micro_batches_of(batch_of([()]), Column("pictures", np.object_, "media", load=sizes))
    assert micro_batch.model_inputs == {}


def broken(args: Namespace, media: Sequence[bytes]) -> Mapping[str, np.ndarray]:
    raise KeyError("size")


def test_mistakes_name_the_sample(tmp_path: Path) -> None:
    reference = keep(BYTES, tmp_path)
    batch = batch_of([(), (reference,)])
    _, second = micro_batches_of(batch, Column("pictures", np.object_, "media", load=broken))
    with pytest.raises(BadInputError, match=r"sample 10: column pictures: its load raised KeyError: 'size'"):
        second.prepare()
    Path(str(reference.where)).unlink()
    _, second = micro_batches_of(batch, Column("pictures", np.object_, "media", load=sizes))
    with pytest.raises(BadInputError, match=r"sample 10: column pictures: image \S+: No such file or directory"):
        second.prepare()
