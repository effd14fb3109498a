"""Writing weights, and the disk transport's versions, with stand-ins for engines."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime.backends.sglang.client import EngineError
from slime.files import atomic_io
from slime.files.exports import weights_directory
from slime.files.hf_writer import HFWriter, NamedTensors
from slime.weights import EngineAddress, disk
from slime.weights.disk import DiskPublisher
from tests.fake_control import FakeControl, addresses_of

NUM_GPUS = 0


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    directory = tmp_path / "origin"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "x", "dtype": "float64"}))
    (directory / "merges.txt").write_text("a b")
    for name in ("model.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json", "flax_model.msgpack"):
        (directory / name).write_text("weights")
    return directory


def views_of_one_buffer(dtype: torch.dtype = torch.bfloat16) -> NamedTensors:
    """Disjoint views, as a bucket of the trainer's has; of odd sizes, one of them transposed."""
    flat = torch.randn(3 + 35 + 24 + 1).to(dtype)
    a, b, c, d = flat.split([3, 35, 24, 1])
    return [("a", a), ("b", b.view(5, 7)), ("c", c.view(4, 6).T), ("d", d[0])]


@pytest.mark.parametrize("count", [1, 3])
def test_views_of_one_buffer_are_written_as_they_are(count: int, origin: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    buckets = [[(f"{i}.{name}", tensor) for name, tensor in views_of_one_buffer()] for i in range(count)]
    writer = HFWriter(target, origin)
    for bucket in buckets:
        writer.add(bucket)
    writer.finish()
    files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] if count > 1 else None
    written = {path.name for path in target.iterdir()}
    weights = {*files, "model.safetensors.index.json"} if files else {"model.safetensors"}
    assert written == {"config.json", "merges.txt"} | weights
    assert len({path.stat().st_mode for path in target.iterdir()}) == 1, "others may read the weights as its config"
    assert json.loads((target / "config.json").read_text()) == {"model_type": "x", "dtype": "bfloat16"}
    for file, bucket in zip(files or ["model.safetensors"], buckets, strict=True):
        stored = load_file(target / file)
        assert stored.keys() == dict(bucket).keys()
        assert all(torch.equal(stored[name], tensor) for name, tensor in bucket)
        assert (target / file).stat().st_size < 63 * 2 + 2000, "the buffer was not written once for each view"
    if files:
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == count * 63 * 2
        assert index["weight_map"] == {
            name: file for file, bucket in zip(files, buckets, strict=True) for name, _ in bucket
        }


def test_the_type_of_most_bytes_is_the_models(origin: Path, tmp_path: Path) -> None:
    writer = HFWriter(tmp_path, origin)
    writer.add([*views_of_one_buffer(torch.float16), ("router.bias", torch.randn(4))])
    writer.finish()
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float16"


@pytest.fixture
def publisher(origin: Path, tmp_path: Path) -> DiskPublisher:
    args = Namespace(
        run_dir=str(tmp_path / "run"),
        update_weight_disk_dir=str(tmp_path / "versions"),
        update_weight_disk_keep_files=False,
        check_weight_update_equal=False,
        asynchronous=False,
        weight_update_timeout=100.0,
        hf_checkpoint=str(origin),
        custom_update_weight_post_write_path=None,
        random_weights=False,
    )
    return DiskPublisher(args, 0)


@pytest.fixture
def control() -> FakeControl:
    return FakeControl()


@pytest.fixture
def engines(control: FakeControl) -> list[EngineAddress]:
    return addresses_of([control])


def versions(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "versions").glob("run-*/*"))


@pytest.mark.parametrize(("random_weights", "load_format"), [(False, None), (True, "auto")])
def test_engines_with_random_weights_can_read_a_directory(
    random_weights: bool,
    load_format: str | None,
    publisher: DiskPublisher,
    control: FakeControl,
    engines: list[EngineAddress],
) -> None:
    """They started with the format dummy, which reads none."""
    publisher.args.random_weights = random_weights
    publisher.publish(1, [views_of_one_buffer()], engines)
    assert control.formats == [load_format]


def test_a_failed_publication_leaves_the_version_before_it(
    publisher: DiskPublisher,
    control: FakeControl,
    engines: list[EngineAddress],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publisher.publish(1, [views_of_one_buffer()], engines)
    assert versions(tmp_path) == ["weight_v000001"]

    def fail(*_: Any) -> None:
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("slime.weights.publisher.EqualityCheck", fail)
        publisher.args.check_weight_update_equal = True
        with pytest.raises(EngineError, match=r"version 2 .*no room"):
            publisher.publish(2, [views_of_one_buffer()], engines)
    assert versions(tmp_path) == ["weight_v000001"], "before the writer was made"
    publisher.args.check_weight_update_equal = False
    with monkeypatch.context() as patch:
        patch.setattr(disk.HFDirectoryWriter, "add", fail)
        with pytest.raises(EngineError, match=r"version 3 .*no room"):
            publisher.publish(3, [views_of_one_buffer()], engines)
    assert versions(tmp_path) == ["weight_v000001"], "while it was written"
    control.refuses = True
    with pytest.raises(EngineError, match=r"version 4 .*refused"):
        publisher.publish(4, [views_of_one_buffer()], engines)
    assert versions(tmp_path) == ["weight_v000001"], "complete, but the engine refused it"
    control.refuses = False
    publisher.publish(5, [views_of_one_buffer()], engines)
    assert versions(tmp_path) == ["weight_v000005"]


def test_a_users_function_sees_the_version_before_the_engines_pause(
    publisher: DiskPublisher, control: FakeControl, engines: list[EngineAddress], tmp_path: Path
) -> None:
    order: list[Any] = []
    (tmp_path / "mine.py").write_text(
        "import pathlib\n"
        "def f(args, version_dir, rollout_engines):\n"
        "    assert pathlib.Path(version_dir, 'model.safetensors').is_file()\n"
        "    args.order.append((version_dir, rollout_engines))\n"
        "def fails(args, version_dir, rollout_engines): raise OSError('no disk')\n"
    )
    publisher.args.order = order
    control.pause = lambda: order.append("pause")  # type: ignore[attr-defined]
    control.update_weights_from_disk = lambda path, load_format: order.append(path)  # type: ignore[attr-defined]
    publisher.args.custom_update_weight_post_write_path = f"{tmp_path}/mine.py:f"
    publisher.publish(1, [views_of_one_buffer()], engines)
    directory = str(weights_directory(publisher.args) / "weight_v000001")
    assert order == [(directory, engines), "pause", directory]
    flag = "--custom-update-weight-post-write-path"
    publisher.args.custom_update_weight_post_write_path = f"{tmp_path}/mine.py:fails"
    with pytest.raises(EngineError, match=rf"version 2 .*{flag} \S+:fails raised OSError: no disk[\s\S]*in fails"):
        publisher.publish(2, [views_of_one_buffer()], engines)
    assert versions(tmp_path) == ["weight_v000001"]


@pytest.mark.parametrize("keeps", [False, True])
def test_what_killed_trainers_left_goes_with_the_next_version(
    keeps: bool, publisher: DiskPublisher, engines: list[EngineAddress], tmp_path: Path
) -> None:
    """They were at 190 and go on from 100: what is ahead is of no run now, unless it is to be kept, or not whole."""
    parent = weights_directory(publisher.args)
    whole = ("weight_v000050", "weight_v000190")
    for left in (*whole, ".weight_v000191.tmp", ".weight_v000189.replaced", ".check_v1.tmp"):
        (parent / left).mkdir(parents=True)
    publisher.args.update_weight_disk_keep_files = keeps
    publisher.publish(100, [views_of_one_buffer()], engines)
    kept = {".check_v1.tmp", "weight_v000050", "weight_v000100"} | ({"weight_v000190"} if keeps else set())
    assert {path.name for path in parent.iterdir()} == kept


def test_who_reads_a_version_that_is_removed_finds_all_of_it_or_none(
    publisher: DiskPublisher, engines: list[EngineAddress], monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.publish(1, [views_of_one_buffer()], engines)
    first, remove, seen = weights_directory(publisher.args) / "weight_v000001", shutil.rmtree, list[bool]()

    def removing(path: Path, **options: Any) -> None:
        seen.append(first.exists())
        remove(path, **options)

    monkeypatch.setattr(atomic_io.shutil, "rmtree", removing)
    publisher.publish(2, [views_of_one_buffer()], engines)
    assert not first.exists()
    assert seen[-1] is False, "it has another name when its files go"


def test_runs_that_share_a_directory_leave_each_others_versions_alone(
    publisher: DiskPublisher, engines: list[EngineAddress], tmp_path: Path
) -> None:
    ours = Namespace(**vars(publisher.args))
    theirs = Namespace(**vars(publisher.args) | {"run_dir": str(tmp_path / "elsewhere" / "run")})
    publishers = [publisher, DiskPublisher(theirs, 0)]
    (tmp_path / "versions" / "weight_v000000").mkdir(parents=True)
    for version in (1, 2):
        for each in publishers:
            each.publish(version, [views_of_one_buffer()], engines)
    assert versions(tmp_path) == ["weight_v000002"] * 2
    assert (tmp_path / "versions" / "weight_v000000").is_dir()
    resumed = weights_directory(ours)
    assert resumed != weights_directory(theirs)
    assert (resumed / "weight_v000002").is_dir(), "a resumed run writes where it wrote before"


def test_an_engine_that_joined_reads_the_next_version_too(
    publisher: DiskPublisher, control: FakeControl, engines: list[EngineAddress]
) -> None:
    joined = FakeControl("http://127.0.0.2:1")
    both = addresses_of([control, joined])
    for version, told in ((1, engines), (2, both), (3, both[1:])):
        publisher.publish(version, [views_of_one_buffer()], told)
    assert [Path(path).name for path in control.loaded] == ["weight_v000001", "weight_v000002"]
    assert [Path(path).name for path in joined.loaded] == ["weight_v000002", "weight_v000003"]
    assert (control.version, joined.version) == ("2", "3")


def test_a_version_that_is_written_again_for_one_that_came_back_stays_until_the_next(
    publisher: DiskPublisher, engines: list[EngineAddress]
) -> None:
    publisher.publish(1, [views_of_one_buffer()], engines)
    publisher.publish(1, [views_of_one_buffer()], addresses_of([FakeControl("http://127.0.0.2:1")]))
    assert publisher._previous is not None
    assert publisher._previous.is_dir()
    first = publisher._previous
    publisher.publish(2, [views_of_one_buffer()], engines)
    assert not first.exists()
