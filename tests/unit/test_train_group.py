"""The trainers of a run as a group, and the slots that engines take and give back, with stand-ins for Ray."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import ray

from slime.fleet import placement, train_group
from slime.fleet.placement import Placement, Slot
from slime.fleet.train_group import TrainGroup
from slime.ray.supervision import Deadline, InputError, RunError
from tests.small_fleet import entry

NUM_GPUS = 0
_LIMIT = Deadline(5.0)


class Rank:
    """Answers every call with what was set for it, at once."""

    def __init__(self, **answers: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        def remote(*values: Any) -> Any:
            self.calls.append((name, *values))
            return self._answers.get(name)

        return Namespace(remote=remote)


class Watcher:
    """In the place of the supervisor."""

    def __init__(self) -> None:
        self.watched: list[str] = []
        self.phases: list[str] = []

    def watch(self, name: str, actor: Any) -> None:
        self.watched.append(name)

    def forget(self, name: str) -> None:
        self.watched.remove(name)

    def wait(self, calls: dict[str, Any], phase: str, limit: Deadline) -> list[Any]:
        self.phases.append(phase)
        return list(calls.values())


@pytest.mark.parametrize("other_host", ["here", "there"])
def test_trainers_start_go_on_train_and_end_together(other_host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [
        Rank(serve_rendezvous=("host", 7), start=(3, 2, {"optimizer_steps": 12}), dp_rank=0, train=[{"loss": 1.0}]),
        Rank(start=(3, 2, None), dp_rank=1, train=[]),
    ]
    watcher, killed = Watcher(), list[Any]()
    waited: list[tuple[Any, ...]] = []

    class Actor:
        def options(self, **options: Any) -> Actor:
            return self

        def remote(self, args: Namespace, rank: int, world_size: int, gpu: str | None, sharing: int | None) -> Rank:
            assert (world_size, gpu, sharing) == (2, None, 2 if other_host == "here" else 1)
            return ranks[rank]

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(train_group, "as_actor", lambda cls: Actor())
    monkeypatch.setattr(ray, "wait", lambda refs, *, num_returns, timeout: waited.append((refs, num_returns, timeout)))
    monkeypatch.setattr(ray, "kill", killed.append)
    monkeypatch.setattr(ray, "get", lambda ref, *, timeout: ref)
    slots = [Slot(0, "here", None), Slot(1, other_host, None)]
    modes = {"true_on_policy_mode": False, "deterministic_mode": False}
    group = TrainGroup(Namespace(checkpoint_timeout=9.0, train_env_vars=None, **modes), watcher)  # type: ignore[arg-type]
    assert group.call("sleep", "sleep", _LIMIT, True) == [], "a run without trainers"
    group.kill()
    group.create(Placement([*slots, Slot(2, "elsewhere", None)], slots, []))
    assert group.start(8) == 3
    assert [rank.calls for rank in ranks] == [
        [("serve_rendezvous", other_host == "here"), ("start", ("host", 7), 8), ("dp_rank",)],
        [("start", ("host", 7), 8), ("dp_rank",)],
    ]
    assert group.take_state() == {"optimizer_steps": 12}
    assert (group.optimizer_steps, group.dp_size) == (12, 2)
    assert group.train(3, ["for 0", "for 1"], _LIMIT) == [{"loss": 1.0}]  # type: ignore[list-item]
    assert [rank.calls[-1] for rank in ranks] == [("train", 3, "for 0"), ("train", 3, "for 1")]
    assert watcher.phases[-1] == "train on rollout 3"
    assert watcher.watched == ["trainer 0", "trainer 1"]
    group.kill()
    for rank in ranks:
        assert rank.calls[-2:] == [("stop",), ("watch",)], "engines leave the group of a push, and its end is seen"
    assert waited == [([None, None], 2, 20.0)] * 2
    assert (killed, watcher.watched, group.actors) == (ranks, [], [])


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> list[Slot]:
    """What the cluster gives next."""
    slots: list[Slot] = []
    monkeypatch.setattr(placement, "_reserve", lambda count, resource, timeout: slots[:count])
    return slots


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[list[Slot]]:
    """What went back to the cluster."""
    slots: list[list[Slot]] = []
    monkeypatch.setattr(placement, "_release", slots.append)
    return slots


def test_an_engine_takes_the_slots_of_one_that_left_before_others(
    reserved: list[Slot], released: list[list[Slot]]
) -> None:
    own, others = [Slot(i, "a", None) for i in range(4)], [Slot(i, "a", None, group=1) for i in range(2)]  # type: ignore[arg-type]
    made = Placement(own, own[:2], [own[2:]])
    reserved += others
    assert made.take(entry(width=2), 1.0) == others
    assert [made.number(slot) for slot in (*own, others[0])] == [0, 1, 2, 3, 4]
    made.give_back(own[2:])
    assert not released
    assert made.take(entry(width=1), 1.0) == others[:1], "an engine of another width"
    assert made.take(entry(width=2), 1.0) == own[2:]
    assert made.take(entry(width=2), 1.0) == others
    made.give_back(others)
    assert released == [others]


def test_slots_where_an_engine_cannot_join_go_back(reserved: list[Slot], released: list[list[Slot]]) -> None:
    made = Placement([Slot(0, "a", None)], [], [])
    reserved += [Slot(0, "b", None), Slot(1, "c", None)]
    with pytest.raises(RunError, match="the free slots are on b, and the run's are all on a"):
        made.take(entry(), 1.0)
    with pytest.raises(InputError, match="engine 0 of 2 slots would lie on the hosts b, c"):
        made.take(entry(width=2), 1.0)
    assert released == [reserved[:1], reserved]
    several = Placement([Slot(0, "a", None), Slot(1, "b", None)], [], [])
    assert several.take(entry(), 1.0) == reserved[:1]
