"""The transports to engines that trainers talk to, by tensors and by a group, with stand-ins for engines."""

from __future__ import annotations

import functools
import threading
import time
from argparse import Namespace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.sglang.client import EngineError
from slime.utils.hf_writer import NamedTensors
from slime.utils.stores import NODE_ADDRESS_VARIABLE
from slime.weights import distributed
from slime.weights.distributed import DistributedPublisher
from slime.weights.engines import EngineAddress, call_all
from slime.weights.tensor import TensorPublisher
from tests.fake_control import Dying, FakeControl

NUM_GPUS = 0


_WHOLE = ["pause", "flush_cache", "begin_weight_update", *["update_weights_from_tensor"] * 2]
_WHOLE += ["end_weight_update", "set_weight_version", "continue_"]


@pytest.mark.parametrize("phase", ["pause", "update_weights_from_tensor", "set_weight_version", "continue_"])
def test_a_push_that_loses_an_engine_is_made_again_as_a_whole(phase: str, tmp_path: Path) -> None:
    args = Namespace(
        run_dir=str(tmp_path),
        check_weight_update_equal=False,
        asynchronous=False,
        weight_update_timeout=100.0,
        drafts_apart=False,
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
    args = Namespace(weight_update_timeout=100.0, drafts_apart=False)
    publisher = TensorPublisher(args, 0, [EngineAddress(f"http://e{rank}", 2) for rank in range(3)])
    got: dict[int, Any] = {}

    def take(rank: int, payloads: list[str], *, leaves_draft: bool) -> None:
        got[rank] = payloads, leaves_draft

    publisher.controls = [  # type: ignore[assignment]
        Namespace(url=f"http://e{r}", update_weights_from_tensor=functools.partial(take, r)) for r in (0, 2)
    ]
    publisher._deadline = time.monotonic() + 100
    for args.drafts_apart in (False, True):
        publisher._deliver([], [f"slot {slot}" for slot in range(6)])()
        assert got == {0: (["slot 0", "slot 1"], args.drafts_apart), 2: (["slot 4", "slot 5"], args.drafts_apart)}


def test_nothing_is_shared_for_an_engine_that_is_gone() -> None:
    """torch would keep a GPU's memory, of which nobody opens the handle, until the trainer ends."""
    engines = [EngineAddress(f"http://e{rank}", 2) for rank in range(2)]
    publishers = [
        TensorPublisher(Namespace(weight_update_timeout=100.0, drafts_apart=False), rank, engines) for rank in range(5)
    ]
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
    args = Namespace(
        weight_update_timeout=100.0, drafts_apart=False, check_weight_update_equal=False, asynchronous=False
    )
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
