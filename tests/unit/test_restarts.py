"""Engines that are lost and start again: when they get requests, how often that is tried, when a run has too few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ray

from slime.backends.sglang.client import EngineError
from slime.fleet import actors as fleet_actors
from slime.fleet import placement
from slime.fleet.engines import NoEngineError
from slime.fleet.joining import RefusedError
from slime.fleet.placement import Slot
from slime.ray import budget
from slime.ray.budget import Budget, pause_before
from slime.ray.supervision import LostError, RayDownError, RunError
from slime.weights import EngineAddress
from tests.unit.test_engines import Actor, ActorClass, Cluster, Ref, failure, killed, urls_of

NUM_GPUS = 0
__all__ = ["killed"]


@pytest.fixture(autouse=True)
def told(told: Callable[[], list[dict[str, Any]]]) -> Callable[[], list[tuple[Any, ...]]]:
    """What events.jsonl has: kind, subject, action."""
    return lambda: [(line["kind"], line["subject"], line["action"]) for line in told()]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What `time.monotonic` gives where restarts are counted."""
    now = [1000.0]
    monkeypatch.setattr(budget.time, "monotonic", lambda: now[0])
    return now


class Fleet(Cluster):
    """Engines that are started again; those of later lives answer `start` with what ``starts`` gives, in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, restarts: int = 3, **options: Any) -> None:
        super().__init__(restarts=restarts, **options)
        self.starts: list[Any] = []
        self.pushed: list[tuple[int, list[str]]] = []
        monkeypatch.setattr(fleet_actors, "as_actor", lambda cls, **threads: ActorClass(self.again))

    def again(self, plan: Any) -> Actor:
        actor = self.create(plan)
        if self.starts:
            actor.answers["start"] = self.starts.pop(0)
        return actor

    def publish(self, engines: list[EngineAddress]) -> dict[str, float]:
        assert not {engine.url for engine in engines if engine.life} & set(self.serving()[-1]), "not before the weights"
        self.pushed.append((engines[-1].life, urls_of(engines)))
        return {"seconds": 1.0}


def lose(fleet: Fleet, *ranks: int) -> None:
    for rank in ranks:
        fleet.actors[rank].die()
    for _ in range(4):
        fleet.rollout()


def test_an_engine_that_was_lost_starts_again_and_serves_after_the_next_push(
    monkeypatch: pytest.MonkeyPatch,
    killed: list[Actor],
    told: Callable[[], list[tuple[Any, ...]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    fleet = Fleet(monkeypatch)
    stopped = fleet.actors[1].answers["stop"] = Ref()
    fleet.actors[1].die()
    fleet.rollout()
    fleet.rollout()
    assert not killed
    assert len(fleet.actors) == 2, "its memory is not free yet"
    stopped.give(None)
    starting = Ref()
    fleet.starts = [starting]
    fleet.rollout()
    assert killed == [fleet.actors[1]]
    assert fleet.engines.metrics() == {"rollout/engines_alive": 1, "rollout/engine_restarts": 1}
    starting.give("http://e1")
    fleet.rollout()
    assert [member.name for member in fleet.engines.waiting()] == ["engine 1"]
    assert fleet.engines.push(4, fleet.publish) == {"seconds": 1.0}
    assert fleet.serving()[-1] == ["http://e0"]
    fleet.engines.admit()
    assert fleet.pushed == [(1, ["http://e0", "http://e1"])]
    assert fleet.serving() == [["http://e0", "http://e1"], ["http://e0"], ["http://e0", "http://e1"]]
    figures = fleet.engines.metrics()
    assert figures.pop("perf/recovery_time") >= 0
    assert figures == {"rollout/engines_alive": 2, "rollout/engine_restarts": 0}
    (lost,) = capsys.readouterr().err.splitlines()
    assert "going on with 1 of 2 engines, which get its requests, and it is started again (log" in lost
    assert told() == [
        ("engine_died", "engine 1", "it is started again"),
        ("engine_back", "engine 1", "engine 1 (start 2) serves"),
    ]
    fleet.actors[2].die()
    fleet.rollout()
    assert fleet.engines.metrics()["rollout/engines_alive"] == 1, "its next life is watched as well"
    assert "engine 1 (start 2) failed" in capsys.readouterr().err


def test_one_that_comes_up_during_a_push_waits_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there when the push is over, and has none of its weights."""
    fleet, starting = Fleet(monkeypatch), Ref()
    fleet.starts = [starting]
    fleet.actors[1].die()
    fleet.rollout()
    fleet.rollout()

    def publish(engines: list[EngineAddress]) -> dict[str, float]:
        starting.give("http://e1")
        fleet.rollout()
        return fleet.publish(engines)

    fleet.engines.push(4, publish)
    fleet.engines.admit()
    assert fleet.serving()[-1] == ["http://e0"]
    assert [member.name for member in fleet.engines.waiting()] == ["engine 1"]
    fleet.engines.push(5, fleet.publish)
    fleet.engines.admit()
    assert fleet.serving()[-1] == ["http://e0", "http://e1"]


def test_a_start_that_fails_is_tried_again_after_a_pause_until_the_budget_is_spent(
    monkeypatch: pytest.MonkeyPatch,
    clock: list[float],
    told: Callable[[], list[tuple[Any, ...]]],
    killed: list[Actor],
) -> None:
    fleet = Fleet(monkeypatch, restarts=3, beside=False)
    fleet.starts = [lambda: failure(EngineError("engine 1 ended with status 1")) for _ in range(3)]
    fleet.actors[1].die()
    for wait, actors in ((0.0, 3), (4.9, 3), (0.2, 4), (9.9, 4), (0.2, 5), (3000.0, 5)):
        clock[0] += wait
        for _ in range(3):
            fleet.rollout()
        assert len(fleet.actors) == actors
    assert [action for _, _, action in told()] == [
        "it is started again",
        "it is started again in 5 s",
        "it is started again in 10 s",
        "it is given up, after 3 starts within an hour (--engine-restart-limit)",
    ]
    assert killed == fleet.actors[1:]
    assert fleet.engines.metrics()["rollout/engines_alive"] == 1
    assert fleet.add() == "engine 2", "on its slot"


def test_the_budget_is_of_the_last_hour_and_each_engine(clock: list[float]) -> None:
    budget = Budget(2)
    assert [budget.take("engine 0") for _ in range(3)] == [True, True, False]
    assert budget.take("engine 1")
    clock[0] += 3599.0
    assert not budget.take("engine 0")
    clock[0] += 2.0
    assert [budget.take("engine 0") for _ in range(3)] == [True, True, False]
    assert [pause_before(attempt) for attempt in range(6)] == [0, 5, 10, 20, 40, 60]


def test_a_run_waits_for_engines_that_come_back_when_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, starting = Fleet(monkeypatch), Ref()
    fleet.starts = [starting, Ref()]
    for actor in fleet.actors[:2]:
        actor.die()
    fleet.rollout()
    assert fleet.serving()[-1] == []
    assert fleet.engines.expects_weights()
    with pytest.raises(NoEngineError, match="push of version 4: all that are to get it are starting again"):
        fleet.engines.push(4, fleet.publish)
    starting.give("http://e1")
    fleet.engines.await_one("push weights of version 4")
    fleet.engines.push(4, fleet.publish)
    fleet.engines.admit()
    assert fleet.serving()[-1] == ["http://e1"]


@pytest.mark.parametrize("least", [1, 2])
def test_a_run_ends_when_too_few_are_left_for_good(monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    fleet = Fleet(monkeypatch, restarts=0, min_engines=least)
    fleet.actors[1].die()
    if least == 1:
        fleet.rollout()
        fleet.actors[0].die()
    ends = {
        1: r"^rollout 3: no engine is left, engine 1 and engine 0 were lost\nengine 1 was lost at 2",
        2: r"^rollout 3: 1 of the 2 engines of --min-engines are left, engine 1 were lost\nengine 1 was lost at 2",
    }
    with pytest.raises(RunError, match=ends[least]):
        fleet.rollout()


def test_a_frozen_models_engine_starts_again_and_serves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(monkeypatch, rewarders=1, restarts=1)
    fleet.actors[2].die()
    for _ in range(3):
        fleet.rollout()
    assert list(fleet.manager.calls[-1][1].serving("reward")) == ["http://r0"]
    fleet.actors[3].die()
    with pytest.raises(RunError, match=r"rollout 3: reward engine 0 \(start 2\) failed"):
        fleet.rollout()


def test_engines_on_trainers_slots_start_while_trainers_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, starting = Fleet(monkeypatch), Ref()
    fleet.engines.hold_starts()
    fleet.actors[1].die()
    for _ in range(3):
        fleet.rollout()
    assert len(fleet.actors) == 2
    fleet.starts = [starting]
    fleet.engines.allow_starts()
    fleet.rollout()
    assert len(fleet.actors) == 3
    passes = fleet.manager.watching

    def wait(refs: list[Ref], *args: Any, **options: Any) -> Any:
        if passes in refs and not starting.is_done:  # the trainers wait for it
            starting.give("http://e1")
            return [], refs
        return plain(refs, *args, **options)

    plain = ray.wait
    monkeypatch.setattr(ray, "wait", wait)
    fleet.engines.hold_starts()
    assert [member.name for member in fleet.engines.waiting()] == ["engine 1"]


def test_one_that_comes_back_may_be_removed(monkeypatch: pytest.MonkeyPatch, killed: list[Actor]) -> None:
    fleet, starting = Fleet(monkeypatch, beside=False), Ref()
    fleet.starts = [starting]
    fleet.actors[1].die()
    fleet.rollout()
    fleet.rollout()
    fleet.engines.remove("engine 1")
    assert killed == fleet.actors[1:]
    starting.give("http://e1")
    fleet.rollout()
    assert [member.name for member in fleet.engines.membership.engines] == ["engine 0"]
    assert fleet.add() == "engine 2", "on its slot"


@pytest.mark.parametrize(
    ("count", "least", "why"),
    [
        (1, 1, "remove engine 0: no other engine serves the model 'actor'"),
        (2, 2, "remove engine 0: --min-engines 2 would not be left"),
    ],
)
def test_one_that_comes_back_stays_where_too_few_others_are_there(
    monkeypatch: pytest.MonkeyPatch, count: int, least: int, why: str
) -> None:
    fleet = Fleet(monkeypatch, count=count, min_engines=least)
    fleet.starts = [Ref()]
    fleet.actors[0].die()
    fleet.rollout()
    for _ in range(2):
        with pytest.raises(RefusedError, match=why):
            fleet.engines.remove("engine 0")
        fleet.rollout()
    assert {row["name"]: row["state"] for row in fleet.engines.describe()}["engine 0"] == "starts again"
    assert fleet.engines.expects_weights()


@pytest.mark.parametrize("returns", [False, True])
def test_one_that_was_removed_is_lost_no_more(
    monkeypatch: pytest.MonkeyPatch, returns: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = Fleet(monkeypatch, count=3, beside=False)
    fleet.starts = [] if returns else [Ref()]
    fleet.actors[1].die()
    for _ in range(3):
        fleet.rollout()
    assert bool(fleet.engines.waiting()) == returns
    fleet.engines.remove("engine 1")
    capsys.readouterr()
    fleet.actors[2].die()
    fleet.rollout()
    assert "going on with 1 of 2 engines" in capsys.readouterr().err
    fleet.engines.push(4, fleet.publish)
    (line,) = capsys.readouterr().err.splitlines()
    assert "skipped engine 2, which was lost" in line


def test_one_that_is_given_up_after_it_had_started_is_gone_and_its_slots_are_free_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet(monkeypatch, restarts=1, beside=False)
    for actor in (1, 2):
        fleet.actors[actor].die()
        for _ in range(3):
            fleet.rollout()
    assert [row["name"] for row in fleet.engines.describe()] == ["engine 0"]
    with pytest.raises(RefusedError, match=r"remove engine 1: there is no such engine, there are: engine 0$"):
        fleet.engines.remove("engine 1")
    monkeypatch.setattr(placement, "_reserve", lambda count, resource, timeout: [Slot(99, "here", None)] * count)
    for name in ("engine 2", "engine 3"):
        assert fleet.add() == name
    slots = [slot.bundle for member in fleet.engines.membership.engines for slot in member.slots]
    assert sorted(slots) == [0, 1, 99]


def test_one_that_is_lost_is_not_out_of_sight_before_it_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asked for it would take it for gone."""
    fleet, seen = Fleet(monkeypatch), list[str]()

    def take(self: Budget, name: str) -> bool:
        seen.extend(row["state"] for row in fleet.engines.describe() if row["name"] == name)
        return True

    monkeypatch.setattr(Budget, "take", take)
    fleet.actors[1].die()
    fleet.rollout()
    assert seen == ["serves"]


def test_trainers_wait_until_what_was_lost_has_given_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(monkeypatch)
    stopped = fleet.actors[1].answers["stop"] = Ref()
    fleet.actors[1].die()
    fleet.rollout()
    waited: list[str] = []

    def wait_until(condition: Callable[[], object], phase: str, *rest: Any) -> None:
        while not condition():
            waited.append(phase)
            stopped.give(None)
            fleet.rollout()

    monkeypatch.setattr(fleet.supervisor, "wait_until", wait_until)
    fleet.engines.hold_starts()
    assert waited == ["start engines again before trainers wake"]
    assert len(fleet.actors) == 2, "and none starts then"


def test_one_that_cannot_be_given_weights_in_between_is_lost_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, told: Callable[[], list[tuple[Any, ...]]]
) -> None:
    fleet = Fleet(monkeypatch, beside=False)
    fleet.actors[1].die()
    for _ in range(3):
        fleet.rollout()

    def refuse(engines: list[EngineAddress]) -> dict[str, float]:
        assert urls_of(engines) == ["http://e1"], "the others have them, and generate"
        raise RunError("push: no answer within 9 s from http://e1")

    fleet.engines.catch_up(3, refuse)
    assert told()[-1] == ("engine_died", "engine 1", "it is started again")
    for _ in range(3):
        fleet.rollout()
    fleet.engines.catch_up(3, fleet.publish)
    fleet.engines.admit()
    assert fleet.serving()[-1] == ["http://e0", "http://e1"]
    assert fleet.pushed == [(2, ["http://e1"])]


LOST_TRAINER = LostError("push weights of version 3: the process of trainer 0 died", ["trainer 0"], "push weights")


@pytest.mark.parametrize(
    "failure",
    [
        LOST_TRAINER,
        LostError("push weights of version 3: no answer within 960 s from trainer 0", ["trainer 0"], "push weights"),
        RayDownError("push weights of version 3: Ray's raylet ended"),
        RunError("push weights of version 3: trainer 0 failed: --update-weight-disk-dir /w: the disk is full"),
        RunError("push weights of version 3: trainer 0 failed: no word within 30 s from training rank 1"),
        RunError("push weights of version 3: trainer 0 failed: engine http://e12: POST /pause_generation: status 500"),
    ],
    ids=lambda failure: f"{type(failure).__name__} {str(failure)[28:60]}",
)
def test_no_engine_is_lost_for_what_it_has_no_part_in(
    monkeypatch: pytest.MonkeyPatch, told: Callable[[], list[tuple[Any, ...]]], failure: RunError
) -> None:
    fleet = Fleet(monkeypatch, beside=False)
    lose(fleet, 1)
    before = told()

    def fail(engines: list[EngineAddress]) -> dict[str, float]:
        raise failure

    with pytest.raises(type(failure)) as raised:
        fleet.engines.catch_up(3, fail)
    assert raised.value is failure
    assert [member.name for member in fleet.engines.waiting()] == ["engine 1"]
    assert told() == before
    asked = [call[0] for actor in fleet.actors for call in actor.calls]
    assert isinstance(failure, (LostError, RayDownError)) != ("examine" in asked), "only where it may be an engine"
