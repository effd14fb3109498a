"""The transports to engines that trainers talk to, by tensors and by a group, with stand-ins for engines."""

from __future__ import annotations

import functools
import threading
import time
from argparse import Namespace
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch

from slime.backends.sglang.client import EngineError
from slime.files.hf_writer import NamedTensors
from slime.utils.stores import NODE_ADDRESS_VARIABLE
from slime.weights import distributed
from slime.weights.distributed import DistributedPublisher
from slime.weights.engines import EngineAddress, start_all
from slime.weights.mixed import MixedPublisher
from slime.weights.publisher import Wait, WeightPublisher
from slime.weights.tensor import TensorPublisher
from tests.fake_control import Dying, FakeControl, addresses_of

NUM_GPUS = 0


_WHOLE = ["pause", "flush_cache", "begin_weight_update", *["update_weights_from_tensor"] * 2]
_WHOLE += ["end_weight_update", "set_weight_version", "continue_"]
BUCKETS = [[("a", torch.ones(2))], [("b", torch.ones(2))]]


def arguments() -> Namespace:
    return Namespace(
        check_weight_update_equal=False,
        asynchronous=False,
        weight_update_timeout=100.0,
        drafts_apart=False,
        allow_untested_versions=False,
    )


class Simple(WeightPublisher):
    """The least that a transport is."""

    def __init__(self) -> None:
        super().__init__(arguments(), 0)
        self.staged: list[str] = []

    def _stage(self, bucket: NamedTensors) -> None:
        self.staged.append(bucket[0][0])

    def _deliver(self, bucket: NamedTensors, staged: Any) -> Wait:
        return self.start(
            "push",
            {
                each.url: functools.partial(self.control(each).update_weights_from_tensor, [bucket[0][0]])
                for each in self.engines
            },
        )


@pytest.mark.parametrize("phase", ["pause", "update_weights_from_tensor", "set_weight_version", "continue_"])
def test_a_push_that_loses_an_engine_is_made_again_as_a_whole(phase: str) -> None:
    publisher = Simple()
    controls = [Dying("http://e0"), Dying("http://e1", dies_in=phase), Dying("http://e2")]
    engines = addresses_of(controls)
    with pytest.raises(EngineError, match=r"weight update to version 1 .*http://e1: connection reset"):
        publisher.publish(1, BUCKETS, engines)
    assert publisher.staged == ["a", "b"], "other ranks wait in the collectives of every bucket"
    survivors = [controls[0], controls[2]]
    for control in survivors:
        assert phase == "continue_" or "continue_" not in control.calls, "half of a version would generate"
        control.calls.clear()
    dead = list(controls[1].calls)
    for version in (1, 2):
        publisher.publish(version, BUCKETS, [engines[0], engines[2]])
    for control in survivors:
        assert control.calls == _WHOLE * 2
        assert control.version == "2"
    assert controls[1].calls == dead


def test_an_engine_that_joined_gets_everything_and_its_version_is_checked() -> None:
    publisher = Simple()
    controls = [Dying("http://e0"), Dying("http://e1")]
    engines = addresses_of(controls)
    publisher.publish(1, BUCKETS, engines[:1])
    publisher.publish(2, BUCKETS, engines)
    assert [control.calls for control in controls] == [_WHOLE * 2, _WHOLE]
    assert [control.version for control in controls] == ["2", "2"]
    old = Dying("http://e2")
    old.weight_version = lambda: "1"  # type: ignore[method-assign]
    with pytest.raises(EngineError, match=r"check version: engines report {'http://e2': '1'} instead of 3"):
        publisher.publish(3, BUCKETS, [*engines, *addresses_of([old])])
    publisher.publish(3, BUCKETS, engines[1:])
    assert [control.version for control in controls] == ["3", "3"]
    assert controls[0].calls.count("continue_") == 2, "it left after it had been paused"


def test_an_engine_that_came_back_gets_the_version_that_others_have_and_no_other_gets_it_again() -> None:
    publisher = Simple()
    controls = [Dying("http://e0"), Dying("http://e1")]
    engines = addresses_of(controls)
    publisher.publish(3, BUCKETS, engines)
    again = Dying("http://e1")  # its next life, at the same URL
    back = replace(*addresses_of([again]), life=1)
    assert back != engines[1]
    publisher.publish(3, BUCKETS, [back])
    assert (again.calls, again.version) == (_WHOLE, "3")
    assert [control.calls for control in controls] == [_WHOLE, _WHOLE]
    for version, whom in ((2, [back]), (3, [back]), (3, [engines[0], replace(back, life=2)])):
        with pytest.raises(ValueError, match=f"weight version {version} does not grow: 3 was published before"):
            publisher.publish(version, BUCKETS, whom)
    publisher.publish(4, BUCKETS, [engines[0], back])
    assert again.version == "4"


def test_engines_must_lie_beside_trainers_and_not_on_each_other() -> None:
    publisher = TensorPublisher(arguments(), 0)
    with pytest.raises(EngineError, match=r"version 1 .* beside each engine rank.* an engine rank in slot 2,"):
        publisher.publish(1, BUCKETS, [EngineAddress("http://e1", 2, first_slot=1)])
    with pytest.raises(EngineError, match=r"engines share slots: http://e0 has range\(0, 1\), http://e1 has"):
        publisher.publish(1, BUCKETS, [EngineAddress("http://e0", 1), EngineAddress("http://e1", 1)])


def test_others_are_waited_for_before_what_they_read_is_given_up() -> None:
    ended: list[str] = []

    def slow() -> None:
        time.sleep(0.3)
        ended.append("slow")

    def dies() -> None:
        raise EngineError("connection reset")

    with pytest.raises(EngineError, match="push: connection reset"):
        start_all({"slow": slow, "dies": dies}, 100, "push", settle=True)()
    assert ended == ["slow"]
    started = time.monotonic()
    with pytest.raises(EngineError, match="push: connection reset"):
        start_all({"hangs": lambda: time.sleep(200), "dies": dies}, 5, "push", settle=True)()
    with pytest.raises(EngineError, match="push: connection reset"):
        start_all({"hangs": lambda: time.sleep(200), "dies": dies}, 200, "push")()
    assert time.monotonic() - started < 100


@pytest.mark.parametrize(
    ("engine_host", "own", "master", "expected"),
    [
        ("127.0.0.1", "10.1.2.3", "10.1.2.3", "127.0.0.1"),
        ("10.1.2.4", None, "10.1.2.3", "10.1.2.3"),
        ("10.1.2.4", "10.1.2.3", "127.0.0.1", "10.1.2.3"),
        ("10.1.2.3", "127.0.0.1", "127.0.0.1", "127.0.0.1"),
        # An engine may have a further node, which reaches no loopback of this one.
        ("10.1.2.3", "10.1.2.3", "127.0.0.1", "10.1.2.3"),
        ("10.1.2.4", None, None, "10.9.9.9"),
    ],
)
def test_the_group_meets_at_the_trainers_address(
    engine_host: str, own: str | None, master: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reserved(Exception):
        pass

    def reserve(host: str) -> None:
        raise Reserved(host)

    monkeypatch.setattr(distributed, "PortReservation", reserve)
    monkeypatch.setattr(distributed, "host_ip", lambda: "10.9.9.9")
    for name, value in (("MASTER_ADDR", master), (NODE_ADDRESS_VARIABLE, own)):
        monkeypatch.setenv(name, value or "")
    publisher = DistributedPublisher(arguments(), 0)
    with pytest.raises(EngineError, match=rf"version 1 \(DistributedPublisher\): {expected}$"):
        publisher.publish(1, [], [EngineAddress(f"http://{engine_host}:1", 1)])


class Sent:
    """A broadcast under way."""

    def wait(self, timeout: timedelta) -> None:
        pass


class Group:
    """What a sender has joined."""

    left: ClassVar[list[Group]] = []

    def abort(self) -> None:
        self.left.append(self)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """Collectives without processes; the groups that were left in the middle of something."""
    monkeypatch.setattr(Group, "left", [])
    monkeypatch.setattr(distributed, "join_as_sender", lambda *_: Group())
    monkeypatch.setattr(distributed.dist, "destroy_process_group", lambda group: None)
    monkeypatch.setattr(distributed.dist, "broadcast", lambda *_, **__: Sent())
    return Group.left


def test_a_broadcast_that_waits_for_the_engine_is_no_deadlock(
    groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL makes a group's communicator in the first collective, which returns when every rank is in one."""
    engine_joined = threading.Event()
    sent: list[bool] = []

    class Joining(FakeControl):
        def update_weights_from_distributed(self, **_: Any) -> None:
            engine_joined.set()

    def broadcast(*_: Any, **__: Any) -> Sent:
        assert engine_joined.wait(60), "the engine was not asked to join"
        sent.append(True)
        return Sent()

    monkeypatch.setattr(distributed.dist, "broadcast", broadcast)
    DistributedPublisher(arguments(), 0).publish(1, [[("weight", torch.ones(3))]], addresses_of([Joining()]))
    assert sent == [True]


class Member(Dying):
    """An engine that notes which groups it joins and leaves."""

    def __init__(self, number: int, notes: list[tuple[str, int, int]], left: list[str]) -> None:
        super().__init__(f"http://127.0.0.{number}:1")
        self._notes, self._left = notes, left

    def __getattribute__(self, name: str) -> Any:
        if name == "init_weights_update_group":
            return lambda **group: self._notes.append((self.url, group["rank_offset"], group["world_size"]))
        if name == "destroy_weights_update_group":
            return lambda name: self._left.append(self.url)
        return super().__getattribute__(name)


def test_a_group_is_made_anew_when_its_members_have_changed(
    groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[tuple[str, int, int]] = []
    left: list[str] = []
    controls = [Member(number, joined, left) for number in range(3)]
    urls = [control.url for control in controls]
    engines = addresses_of(controls, [1, 2, 3])
    publisher = DistributedPublisher(arguments(), 0)
    bucket = [[("a", torch.ones(2))]]
    publisher.publish(1, bucket, engines[:2])
    publisher.publish(2, bucket, engines[:2])
    assert sorted(joined) == [(urls[0], 1, 4), (urls[1], 2, 4)]
    assert (left, groups) == ([], [])
    joined.clear()
    publisher.publish(3, bucket, engines)
    assert sorted(joined) == [(urls[0], 1, 7), (urls[1], 2, 7), (urls[2], 4, 7)]
    assert (sorted(left), len(groups)) == (urls[:2], 1)
    assert [control.version for control in controls] == ["3"] * 3
    joined.clear()
    for version in (4, 5):
        publisher.publish(version, bucket, [engines[0], engines[2]])
    assert sorted(joined) == [(urls[0], 1, 5), (urls[2], 2, 5)]
    assert len(groups) == 2

    def breaks(*_: Any, **__: Any) -> None:
        raise RuntimeError("connection closed by peer")

    with monkeypatch.context() as patch:
        patch.setattr(distributed.dist, "broadcast", breaks)
        with pytest.raises(EngineError, match="closed by peer"):
            publisher.publish(6, bucket, [engines[0], engines[2]])
    assert len(groups) == 3, "the survivors may hang in the broadcast"
    joined.clear()
    publisher.publish(6, bucket, engines[:1])
    assert joined == [(urls[0], 1, 2)]


@pytest.mark.parametrize("kind", [DistributedPublisher, MixedPublisher])
def test_a_group_is_called_what_the_driver_calls_it(groups: list[Group], kind: type[WeightPublisher]) -> None:
    """So that engines can leave it when this process is dead; by itself it gives each another name."""
    names: list[str] = []

    class Named(FakeControl):
        def init_weights_update_group(self, **group: Any) -> None:
            names.append(group["group_name"])

    engines = [replace(each, apart=True) for each in addresses_of([Named("http://e0"), Named("http://e1")])]
    publisher = kind(arguments(), 0)
    publisher.group_name = "theirs"
    publisher.publish(1, [], engines[:1])
    publisher.group_name = ""
    publisher.publish(2, [], engines[:1])
    assert names == ["theirs"]
    for version in (3, 4):
        publisher.publish(version, [], engines[version - 3 :])
    assert len(set(names)) == 3


def test_an_engine_that_left_is_not_waited_for(groups: list[Group]) -> None:
    ends = threading.Event()

    class Hanging(Member):
        def __getattribute__(self, name: str) -> Any:
            if name == "destroy_weights_update_group":
                return lambda name: ends.wait(60)
            return super().__getattribute__(name)

    controls = [Member(0, [], []), Hanging(1, [], [])]
    engines = addresses_of(controls)
    publisher = DistributedPublisher(arguments(), 0)
    publisher.publish(1, [], engines)
    started = time.monotonic()
    publisher.publish(2, [], engines[:1])
    assert time.monotonic() - started < 5
    ends.set()


def test_an_engine_that_does_not_join_is_named_at_the_deadline(
    groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = threading.Event()

    class Hanging(Member):
        def __getattribute__(self, name: str) -> Any:
            if name == "init_weights_update_group":
                return lambda **group: ends.wait(60)
            return super().__getattribute__(name)

    args = arguments()
    args.weight_update_timeout = 1.0
    controls = [Member(0, [], []), Hanging(1, [], [])]
    message = r"version 1 .*joining the weight update group: no answer within 1 s .* from http://127.0.0.1:1$"
    with pytest.raises(EngineError, match=message):
        DistributedPublisher(args, 0).publish(1, [], addresses_of(controls))
    ends.set()
