"""Writing weights, and the disk transport's versions, with stand-ins for engines."""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from argparse import Namespace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime.backends.sglang.client import EngineError
from slime.utils.hf_writer import HFWriter, NamedTensors
from slime.weights import disk, distributed
from slime.weights.disk import DiskPublisher
from slime.weights.distributed import DistributedPublisher
from slime.weights.engines import EngineAddress, call_all
from slime.weights.hf_directory import weights_directory
from slime.weights.tensor import TensorPublisher

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


class FakeControl:
    """An engine that takes everything, unless told to refuse to load."""

    url = "http://127.0.0.1:1"

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.version = ""
        self.refuses = False
        self.formats: list[str | None] = []

    def update_weights_from_disk(self, path: str, load_format: str | None) -> None:
        assert Path(path, "model.safetensors").is_file()
        self.formats.append(load_format)
        if self.refuses:
            raise EngineError("refused")
        self.loaded.append(path)

    def set_weight_version(self, version: str) -> None:
        self.version = version

    def weight_version(self) -> str:
        return self.version

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


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
    publisher = DiskPublisher(args, 0, [])
    publisher.controls = [FakeControl()]  # type: ignore[list-item]
    return publisher


class Dying(FakeControl):
    """An engine that notes the order of its calls and dies in the one it is told."""

    def __init__(self, url: str, dies_in: str = "") -> None:
        super().__init__()
        self.url = url
        self.calls: list[str] = []
        self._dies_in = dies_in

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name in ("url", "calls", "version", "loaded", "refuses", "weight_version"):
            return object.__getattribute__(self, name)

        def call(*args: Any, **kwargs: Any) -> None:
            self.calls.append(name)
            if name == self._dies_in:
                raise EngineError(f"engine {self.url}: connection reset")
            if name == "set_weight_version":
                self.version = args[0]

        return call


_WHOLE = ["pause", "flush_cache", "begin_weight_update", *["update_weights_from_tensor"] * 2]
_WHOLE += ["end_weight_update", "set_weight_version", "continue_"]


@pytest.mark.parametrize("phase", ["pause", "update_weights_from_tensor", "set_weight_version", "continue_"])
def test_a_push_that_loses_an_engine_is_made_again_as_a_whole(phase: str, tmp_path: Path) -> None:
    args = Namespace(
        run_dir=str(tmp_path), check_weight_update_equal=False, asynchronous=False, weight_update_timeout=100.0
    )
    engines = [EngineAddress(f"http://e{rank}", 1 + rank) for rank in range(3)]
    publisher = TensorPublisher(args, 0, engines)
    controls = [Dying("http://e0"), Dying("http://e1", dies_in=phase), Dying("http://e2")]
    publisher.controls = list(controls)  # type: ignore[arg-type]
    staged: list[str] = []

    def stage(bucket: NamedTensors) -> list[str]:
        staged.append(bucket[0][0])
        return [f"{bucket[0][0]} of slot {slot}" for slot in range(6)]

    publisher._stage = stage  # type: ignore[method-assign,assignment]
    buckets = [[("a", torch.ones(2))], [("b", torch.ones(2))]]
    with pytest.raises(EngineError, match=r"weight update to version 1 .*http://e1: connection reset"):
        publisher.publish(1, buckets)
    assert staged == ["a", "b"], "other ranks wait in the collectives of every bucket"
    survivors = [controls[0], controls[2]]
    for control in survivors:
        assert phase == "continue_" or "continue_" not in control.calls, "half of a version would generate"
        control.calls.clear()
    dead = list(controls[1].calls)
    publisher.publish(1, buckets, gone=["http://e1"])
    publisher.publish(2, buckets, gone=["http://e1"])
    for control in survivors:
        assert control.calls == _WHOLE * 2
        assert control.version == "2"
    assert controls[1].calls == dead


def test_payloads_keep_to_their_slots_when_an_engine_before_them_is_gone() -> None:
    args = Namespace(weight_update_timeout=100.0)
    publisher = TensorPublisher(args, 0, [EngineAddress(f"http://e{rank}", 2) for rank in range(3)])
    got: dict[str, Any] = {}
    publisher.controls = [  # type: ignore[assignment]
        Namespace(url=f"http://e{r}", update_weights_from_tensor=functools.partial(got.setdefault, r)) for r in (0, 2)
    ]
    publisher._deadline = time.monotonic() + 100
    publisher._deliver([], [f"slot {slot}" for slot in range(6)])()
    assert got == {0: ["slot 0", "slot 1"], 2: ["slot 4", "slot 5"]}


def test_nothing_is_shared_for_an_engine_that_is_gone() -> None:
    """torch would keep a GPU's memory, of which nobody opens the handle, until the trainer ends."""
    engines = [EngineAddress(f"http://e{rank}", 2) for rank in range(2)]
    publishers = [TensorPublisher(Namespace(weight_update_timeout=100.0), rank, engines) for rank in range(5)]
    bucket = [("a", torch.ones(2))]
    assert [publisher._stage(bucket)[0] is not None for publisher in publishers] == [True] * 4 + [False]
    for publisher in publishers:
        publisher.living = engines[1:]
    assert [publisher._stage(bucket)[0] is not None for publisher in publishers] == [False] * 2 + [True] * 2 + [False]


def test_others_are_waited_for_before_what_they_read_is_given_up() -> None:
    ended: list[str] = []

    def slow() -> None:
        time.sleep(0.3)
        ended.append("slow")

    def dies() -> None:
        raise EngineError("connection reset")

    with pytest.raises(EngineError, match="push: connection reset"):
        call_all({"slow": slow, "dies": dies}, 100, "push", settle=True)
    assert ended == ["slow"]
    started = time.monotonic()
    with pytest.raises(EngineError, match="push: connection reset"):
        call_all({"hangs": lambda: time.sleep(200), "dies": dies}, 5, "push", settle=True)
    with pytest.raises(EngineError, match="push: connection reset"):
        call_all({"hangs": lambda: time.sleep(200), "dies": dies}, 200, "push")
    assert time.monotonic() - started < 100


def versions(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "versions").glob("run-*/*"))


@pytest.mark.parametrize(("random_weights", "load_format"), [(False, None), (True, "auto")])
def test_engines_with_random_weights_can_read_a_directory(
    random_weights: bool, load_format: str | None, publisher: DiskPublisher
) -> None:
    """They started with the format dummy, which reads none."""
    publisher.args.random_weights = random_weights
    publisher.publish(1, [views_of_one_buffer()])
    (control,) = publisher.controls
    assert control.formats == [load_format]  # type: ignore[attr-defined]


def test_a_failed_publication_leaves_the_version_before_it(
    publisher: DiskPublisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (control,) = publisher.controls
    publisher.publish(1, [views_of_one_buffer()])
    assert versions(tmp_path) == ["weight_v000001"]

    def fail(*_: Any) -> None:
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("slime.weights.publisher.EqualityCheck", fail)
        publisher.args.check_weight_update_equal = True
        with pytest.raises(EngineError, match=r"version 2 .*no room"):
            publisher.publish(2, [views_of_one_buffer()])
    assert versions(tmp_path) == ["weight_v000001"], "before the writer was made"
    publisher.args.check_weight_update_equal = False
    with monkeypatch.context() as patch:
        patch.setattr(disk.HFDirectoryWriter, "add", fail)
        with pytest.raises(EngineError, match=r"version 3 .*no room"):
            publisher.publish(3, [views_of_one_buffer()])
    assert versions(tmp_path) == ["weight_v000001"], "while it was written"
    control.refuses = True  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match=r"version 4 .*refused"):
        publisher.publish(4, [views_of_one_buffer()])
    assert versions(tmp_path) == ["weight_v000001"], "complete, but the engine refused it"
    control.refuses = False  # type: ignore[attr-defined]
    publisher.publish(5, [views_of_one_buffer()])
    assert versions(tmp_path) == ["weight_v000005"]


def test_a_users_function_sees_the_version_before_the_engines_pause(publisher: DiskPublisher, tmp_path: Path) -> None:
    (control,), order = publisher.controls, []
    (tmp_path / "mine.py").write_text(
        "import pathlib\n"
        "def f(args, version_dir, rollout_engines):\n"
        "    assert pathlib.Path(version_dir, 'model.safetensors').is_file()\n"
        "    args.order.append((version_dir, rollout_engines))\n"
        "def fails(args, version_dir, rollout_engines): raise OSError('no disk')\n"
    )
    publisher.args.order = order
    control.pause = lambda: order.append("pause")  # type: ignore[method-assign]
    control.update_weights_from_disk = lambda path, load_format: order.append(path)  # type: ignore[method-assign]
    publisher.args.custom_update_weight_post_write_path = f"{tmp_path}/mine.py:f"
    publisher.publish(1, [views_of_one_buffer()])
    directory = str(publisher._root / "weight_v000001")
    assert order == [(directory, publisher.engines), "pause", directory]
    flag = "--custom-update-weight-post-write-path"
    publisher.args.custom_update_weight_post_write_path = f"{tmp_path}/mine.py:fails"
    with pytest.raises(EngineError, match=rf"version 2 .*{flag} \S+:fails raised OSError: no disk[\s\S]*in fails"):
        publisher.publish(2, [views_of_one_buffer()])
    assert versions(tmp_path) == ["weight_v000001"]


def test_runs_that_share_a_directory_leave_each_others_versions_alone(publisher: DiskPublisher, tmp_path: Path) -> None:
    ours = Namespace(**vars(publisher.args))
    theirs = Namespace(**vars(publisher.args) | {"run_dir": str(tmp_path / "elsewhere" / "run")})
    publishers = [publisher, DiskPublisher(theirs, 0, [])]
    publishers[1].controls = [FakeControl()]  # type: ignore[list-item]
    (tmp_path / "versions" / "weight_v000000").mkdir(parents=True)
    for version in (1, 2):
        for each in publishers:
            each.publish(version, [views_of_one_buffer()])
    assert versions(tmp_path) == ["weight_v000002"] * 2
    assert (tmp_path / "versions" / "weight_v000000").is_dir()
    assert weights_directory(ours) == publisher._root, "a resumed run writes where it wrote before"


@pytest.mark.parametrize(
    ("engine_host", "master", "expected"),
    [("127.0.0.1", "10.1.2.3", "127.0.0.1"), ("10.1.2.4", "10.1.2.3", "10.1.2.3"), ("10.1.2.4", None, "10.9.9.9")],
)
def test_the_group_meets_at_the_trainers_address(
    engine_host: str, master: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reserved(Exception):
        pass

    def reserve(host: str) -> None:
        raise Reserved(host)

    monkeypatch.setattr(distributed, "PortReservation", reserve)
    monkeypatch.setattr(distributed, "host_ip", lambda: "10.9.9.9")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    if master is not None:
        monkeypatch.setitem(os.environ, "MASTER_ADDR", master)
    args = Namespace(weight_update_timeout=100.0)
    publisher = DistributedPublisher(args, 0, [EngineAddress(f"http://{engine_host}:1", 1)])
    with pytest.raises(Reserved, match=expected):
        publisher.connect()


def test_a_broadcast_that_waits_for_the_engine_is_no_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL makes a group's communicator in the first collective, which returns when every rank is in one."""
    engine_joined = threading.Event()

    class Joining(FakeControl):
        def update_weights_from_distributed(self, **_: Any) -> None:
            engine_joined.set()

    class Broadcast:
        def wait(self, timeout: timedelta) -> None:
            sent.append(True)

    def broadcast(*_: Any, **__: Any) -> Broadcast:
        assert engine_joined.wait(60), "the engine was not asked to join"
        return Broadcast()

    sent: list[bool] = []
    monkeypatch.setattr(distributed.dist, "broadcast", broadcast)
    publisher = DistributedPublisher(Namespace(weight_update_timeout=100.0), 0, [])
    publisher.controls = [Joining()]  # type: ignore[list-item]
    publisher._group = object()  # type: ignore[assignment]
    publisher._deadline = time.monotonic() + 100
    publisher._deliver([("weight", torch.ones(3))], None)()
    assert sent == [True]


def test_a_group_with_a_dead_member_is_left_and_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    class Member(Dying):
        def __getattribute__(self, name: str) -> Any:
            if name == "init_weights_update_group":
                return lambda **group: joined.append((self.url, group["rank_offset"], group["world_size"]))
            return super().__getattribute__(name)

    class Group:
        def abort(self) -> None:
            left.append(self)

    joined: list[tuple[str, int, int]] = []
    left: list[Any] = []
    monkeypatch.setattr(distributed, "join_as_sender", lambda *_: Group())
    monkeypatch.setattr(distributed.dist, "destroy_process_group", lambda group: None)
    args = Namespace(weight_update_timeout=100.0, check_weight_update_equal=False, asynchronous=False)
    publisher = DistributedPublisher(args, 0, [EngineAddress(f"http://127.0.0.{r}:1", 1 + r) for r in range(3)])
    publisher.controls = [Member(engine.url) for engine in publisher.engines]  # type: ignore[misc]
    monkeypatch.setattr(publisher, "_send", lambda flat, timeout: None)
    publisher.connect()
    assert sorted(joined) == [("http://127.0.0.0:1", 1, 7), ("http://127.0.0.1:1", 2, 7), ("http://127.0.0.2:1", 4, 7)]
    joined.clear()
    publisher.publish(1, [[("a", torch.ones(2))]])
    assert (joined, left) == ([], [])
    for version in (2, 3):
        publisher.publish(version, [[("a", torch.ones(2))]], gone=["http://127.0.0.1:1"])
    assert sorted(joined) == [("http://127.0.0.0:1", 1, 5), ("http://127.0.0.2:1", 2, 5)]
    assert len(left) == 1

    def breaks(flat: torch.Tensor, timeout: timedelta) -> None:
        raise RuntimeError("connection closed by peer")

    with monkeypatch.context() as patch:
        patch.setattr(publisher, "_send", breaks)
        with pytest.raises(EngineError, match="closed by peer"):
            publisher.publish(4, [[("a", torch.ones(2))]], gone=["http://127.0.0.1:1"])
    assert len(left) == 2, "the survivors may hang in the broadcast"
    joined.clear()
    publisher.publish(4, [[("a", torch.ones(2))]], gone=["http://127.0.0.1:1", "http://127.0.0.2:1"])
    assert joined == [("http://127.0.0.0:1", 1, 2)]
