"""Engines load a bucket while the next one is gathered: from memory that stays as it is, and whatever fails."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from slime.backends.sglang.client import EngineError
from slime.files.hf_writer import NamedTensors
from slime.weights import distributed
from slime.weights import publisher as publisher_module
from slime.weights.distributed import DistributedPublisher
from slime.weights.float8 import Float8Blocks
from slime.weights.payload import flat_layout
from slime.weights.publisher import WeightPublisher
from slime.weights.tensor import SharedBuffer, TensorPublisher, flat_parts
from tests.fake_control import addresses_of, read_payload

NUM_GPUS = 0

BUCKETS = 5
URL = "http://127.0.0.1:1"


class Gate:
    """How far the trainer has come with buckets, for an engine to wait for."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def passed(self) -> None:
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def wait(self, count: int, timeout: float = 60.0) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._count >= count, timeout)


class LoadingEngine:
    """Takes everything; of each bucket it is brought it calls ``load`` with its number, from 0, and what came."""

    url = URL

    def __init__(self, load: Callable[[int, Any], None]) -> None:
        self.calls: list[str] = []
        self.loading = 0
        self._load = load
        self._version = ""

    def update_weights_from_tensor(self, payloads: list[str], *, leaves_draft: bool) -> None:
        self._take("push", payloads)

    def update_weights_from_distributed(self, **what: Any) -> None:
        self._take("push", what)

    def _take(self, name: str, what: Any) -> None:
        number = self.calls.count(name)
        self.calls.append(name)
        self.loading += 1
        assert self.loading == 1, "one bucket at a time"
        try:
            self._load(number, what)
        finally:
            self.loading -= 1

    def set_weight_version(self, version: str) -> None:
        self._version = version

    def weight_version(self) -> str:
        return self._version

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append(name)


class Pushed:
    """A publisher and the one engine that it pushes to."""

    def __init__(self, transport: str, monkeypatch: pytest.MonkeyPatch, load: Callable[[int, Any], None]) -> None:
        args = Namespace(
            weight_update_timeout=200.0,
            drafts_apart=False,
            check_weight_update_equal=False,
            asynchronous=False,
            allow_untested_versions=False,
        )
        kinds: dict[str, type[WeightPublisher]] = {"tensor": TensorPublisher, "distributed": DistributedPublisher}
        self.publisher = kinds[transport](args, 0)
        self.engine = LoadingEngine(load)
        sent = Namespace(wait=lambda timeout: None)
        self.abandoned: list[int] = []
        """Of each group that was left in the middle of something, the buckets that the engine was still loading."""
        group = Namespace(abort=lambda: self.abandoned.append(self.engine.loading))
        monkeypatch.setattr(distributed, "join_as_sender", lambda *_: group)
        monkeypatch.setattr(distributed.dist, "destroy_process_group", lambda group: None)
        monkeypatch.setattr(distributed.dist, "broadcast", lambda *_, **__: sent)

    def publish(self, version: int, buckets: Iterable[NamedTensors]) -> dict[str, float]:
        return self.publisher.publish(version, buckets, addresses_of([self.engine]))


def bucket(number: int) -> NamedTensors:
    # Larger and smaller in turns: a buffer is replaced where it is too small.
    size = 1000 * (1 + number if number % 2 else 1)
    return [(f"{number}.a", torch.full((size,), float(number))), (f"{number}.b", torch.full((3,), number))]


def buckets(asked: Gate | None = None) -> Iterator[NamedTensors]:
    """Notes each request for one more."""
    for number in range(BUCKETS):
        yield bucket(number)
        if asked is not None:
            asked.passed()


@pytest.mark.parametrize("transport", ["tensor", "distributed"])
def test_the_next_bucket_is_gathered_while_engines_load(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Gate()

    def load(number: int, _: Any) -> None:
        if not asked.wait(number + 1):
            raise EngineError("nothing was gathered meanwhile")

    pushed = Pushed(transport, monkeypatch, load)
    pushed.publish(1, buckets(asked))
    assert pushed.engine.calls.count("push") == BUCKETS


def opened(payloads: list[str]) -> dict[str, torch.Tensor]:
    """Views of the buffer, as an engine has them."""
    (payload,) = payloads
    content = read_payload(payload)
    flat = content["flattened_tensor"]
    return {m.name: flat[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape) for m in content["metadata"]}


class Reader:
    """An engine that reads its bucket twice: at once, and when ``ahead`` later ones are staged or do not come."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ahead: int, patience: float) -> None:
        self.met: list[bool] = []
        """Of each bucket, whether later ones were staged while it was read."""
        self.changed: list[int] = []
        self.pushed = Pushed("tensor", monkeypatch, self._load)
        self._staged, self._ahead, self._patience = Gate(), ahead, patience
        self._stage = self.pushed.publisher._stage
        monkeypatch.setattr(self.pushed.publisher, "_stage", self._counted)

    def _counted(self, bucket: NamedTensors) -> Any:
        staged = self._stage(bucket)
        self._staged.passed()
        return staged

    def _load(self, number: int, payloads: list[str]) -> None:
        views, expected = opened(payloads), dict(bucket(number))
        right = [all(torch.equal(views[name], expected[name]) for name in expected)]
        self.met.append(self._staged.wait(min(number + 1 + self._ahead, BUCKETS), self._patience))
        right.append(all(torch.equal(views[name], expected[name]) for name in expected))
        if not all(right):
            self.changed.append(number)


def test_a_buffer_is_not_written_while_an_engine_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(monkeypatch, ahead=1, patience=60.0)
    reader.pushed.publish(1, buckets())
    assert reader.met == [True] * BUCKETS
    assert reader.changed == []


def test_what_fails_elsewhere_leaves_an_engine_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoRoom:
        def __init__(self, *_: Any) -> None: ...
        def discard(self) -> None: ...
        def add(self, bucket: NamedTensors) -> None:
            raise OSError("no room")

    monkeypatch.setattr(publisher_module, "EqualityCheck", NoRoom)
    reader = Reader(monkeypatch, ahead=2, patience=0.5)
    reader.pushed.publisher.args.check_weight_update_equal = True
    with pytest.raises(EngineError, match=r"version 1 .*no room"):
        reader.pushed.publish(1, buckets())
    assert (reader.met, reader.changed) == ([False], [])


@pytest.mark.parametrize("transport", ["tensor", "distributed"])
def test_a_delivery_that_fails_while_the_next_bucket_is_gathered(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Gate()

    def load(number: int, _: Any) -> None:
        if number == 1:
            assert asked.wait(2)
            raise EngineError(f"engine {URL}: connection reset")

    pushed = Pushed(transport, monkeypatch, load)
    engine = pushed.engine
    with pytest.raises(EngineError, match=rf"weight update to version 7 \(\w+\): push: engine {URL}: connection reset"):
        pushed.publish(7, buckets(asked))
    assert asked.wait(BUCKETS, timeout=0), "other ranks wait in the collectives of every bucket"
    assert engine.calls.count("push") == 2, "nothing is brought after a failure"
    assert "continue_" not in engine.calls
    assert (engine.loading, pushed.abandoned) == (0, [0] if transport == "distributed" else [])


@pytest.mark.parametrize("transport", ["tensor", "distributed"])
def test_a_gather_that_fails_leaves_no_engine_reading(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = Pushed(transport, monkeypatch, lambda *_: time.sleep(0.5))
    engine = pushed.engine

    def broken() -> Iterator[NamedTensors]:
        yield bucket(0)
        raise RuntimeError("the gather failed")

    with pytest.raises(EngineError, match="the gather failed"):
        pushed.publish(1, broken())
    assert (engine.loading, pushed.abandoned) == (0, [0] if transport == "distributed" else [])
    assert engine.calls.count("push") == 1


def test_an_engine_that_hangs_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = Pushed("tensor", monkeypatch, lambda *_: time.sleep(200))
    pushed.publisher.timeout = 1.0
    started = time.monotonic()
    with pytest.raises(EngineError, match=rf"push: no answer within \d s .* from {URL}"):
        pushed.publish(1, buckets())
    assert time.monotonic() - started < 100


@pytest.mark.parametrize("transport", ["tensor", "distributed"])
@pytest.mark.parametrize("quantised", [False, True])
def test_no_bucket_is_held_while_the_next_is_gathered(
    transport: str, quantised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a push would take one bucket more of the GPU: what engines load from is a copy."""
    made: list[weakref.ref[torch.Tensor]] = []
    held: list[int] = []

    def noted(number: int) -> NamedTensors:
        held.append(sum(tensor() is not None for tensor in made))
        named = bucket(number)
        made.extend(weakref.ref(tensor) for _, tensor in named)
        return named

    source = map(noted, range(BUCKETS))
    pushed = Pushed(transport, monkeypatch, lambda *_: None)
    pushed.publish(1, Float8Blocks((128, 128), frozenset()).quantised(source) if quantised else source)
    assert held == [0] * BUCKETS


def test_no_buffer_stays_after_a_push(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer then sleeps: what only the garbage collector would find is gibibytes of a GPU until it looks."""
    made: list[weakref.ref[SharedBuffer]] = []

    class Noted(SharedBuffer):
        def __init__(self, nbytes: int) -> None:
            super().__init__(nbytes)
            made.append(weakref.ref(self))

    monkeypatch.setattr("slime.weights.tensor.SharedBuffer", Noted)
    pushed = Pushed("tensor", monkeypatch, lambda *_: None)
    gc.disable()
    try:
        pushed.publish(1, buckets())
        assert [buffer() for buffer in made] == [None] * len(made)
    finally:
        gc.enable()
    assert len(made) >= 2


def test_what_lies_in_memory_as_in_the_buffer_is_copied_at_once() -> None:
    """Views of one tensor that leave no room or the same room between them; nothing else."""
    values = torch.randn(200)
    line = [("a", values[:16].view(4, 4)), ("b", values[16:19]), ("c", values[20:28]), ("d", values[28:32].int())]
    apart = [("e", values[40:48]), ("f", values[32:40]), ("g", values[50:58]), ("h", values[60:76].view(4, 4).t())]
    others = [("i", values[76:80]), ("j", torch.randn(3, requires_grad=True)), ("k", values[0]), ("l", values[:0])]
    bucket = line + apart + others
    layout, size = flat_layout(bucket)
    flat, starts = torch.zeros(size, dtype=torch.uint8), []
    for start, part in flat_parts(layout, bucket):
        starts.append(start)
        flat[start : start + part.numel()].copy_(part)
    for place, (name, tensor) in zip(layout, bucket, strict=True):
        found = flat[place.start_idx : place.end_idx].view(place.dtype).reshape(place.shape)
        assert torch.equal(found, tensor), name
    begins = [place.name for place in layout if place.start_idx in starts]
    assert begins[:2] == ["a", "d"], "a, b and c are one part"
    assert begins[2:8] == ["e", "f", "g", "h", "i", "j"]
