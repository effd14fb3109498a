"""Pushes that are begun again, wait for engines that come back, or end the run; and their probe."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.driver.pushes import Pushes
from slime.observability import events
from slime.ray.supervision import Deadline, LostError, RunError
from tests.unit.test_engines import killed, urls_of
from tests.unit.test_restarts import LOST_TRAINER, Fleet, lose, told

NUM_GPUS = 0
__all__ = ["killed", "told"]


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / events.FILE).read_text().splitlines()]


class Trainers:
    """Answers a push; the engines that each was for."""

    def __init__(self) -> None:
        self.actors = [None]
        self.groups: list[str] = []
        """What each push called its group."""
        self.failures: list[RunError | None] = []
        """What the next ones fail of."""
        self.pushed: list[tuple[int, list[str]]] = []

    def call(self, phase: str, method: str, limit: Any, *values: Any) -> list[dict[str, float]]:
        version, engines, group = values
        self.pushed.append((version, urls_of(engines)))
        self.groups.append(group)
        if self.failures and (failure := self.failures.pop(0)):
            raise failure
        return [{"seconds": 1.0}]


class Memory:
    """Who gets requests while the memory of engines is not all there."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.rooms = 0
        self.meanwhile: list[list[str]] = []

    def make_room(self) -> None:
        self.rooms += 1

    @contextlib.contextmanager
    def pushing(self) -> Iterator[None]:
        yield
        self.meanwhile.append(self.fleet.serving()[-1])


@pytest.fixture
def pushes(monkeypatch: pytest.MonkeyPatch) -> tuple[Fleet, Trainers, Pushes]:
    fleet, trainers = Fleet(monkeypatch, beside=False), Trainers()
    made = Pushes(trainers, fleet.engines, Memory(fleet), Deadline(5.0))  # type: ignore[arg-type]
    made.push(0)
    return fleet, trainers, made


class Probe:
    """Notes who is asked, and what there is then."""

    def __init__(self, fleet: Fleet, memory: Memory) -> None:
        self._fleet, self._memory = fleet, memory
        self.notes: list[tuple[Any, ...]] = []

    def ask_trainers(self, version: int) -> None:
        self.notes.append(("trainers", version, len(self._memory.meanwhile)))

    def ask_engines(self, members: list[Any]) -> None:
        names = [member.name for member in members]
        self.notes.append(("engines", names, len(self._memory.meanwhile), self._fleet.serving()[-1]))

    def forget(self) -> None:
        self.notes.append(("forget",))

    def finish(self) -> float:
        return 0.25


def test_both_sides_are_probed_after_a_push_trainers_before_they_sleep_and_engines_before_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet, trainers = Fleet(monkeypatch, beside=False), Trainers()
    memory = Memory(fleet)
    probe = Probe(fleet, memory)
    made = Pushes(trainers, fleet.engines, memory, Deadline(5.0), probe)  # type: ignore[arg-type]
    made.push(0)
    both = ["http://e0", "http://e1"]
    assert probe.notes == [("trainers", 0, 0), ("engines", ["engine 0", "engine 1"], 1, both)]
    lose(fleet, 1)
    made.catch_up()
    assert probe.notes[2:] == [("trainers", 0, 1), ("engines", ["engine 1"], 2, both[:1])]
    assert fleet.serving()[-1] == both
    made.go_back()
    assert probe.notes[4:] == [("forget",)]
    assert made.probed() == {"rollout/push_probe_abs_diff": 0.25}


def refused(url: str) -> RunError:
    return RunError(f"push weights of version 1: trainer 0 failed: pause: engine {url}: status 500\nits log")


def test_a_push_that_is_begun_again_is_told_of(
    pushes: tuple[Fleet, Trainers, Pushes], told: Callable[[], list[tuple[Any, ...]]], tmp_path: Path
) -> None:
    fleet, trainers, made = pushes
    trainers.failures = [refused("http://e1")]
    call = trainers.call

    def dies(*asked: Any) -> list[dict[str, float]]:
        if trainers.failures:
            fleet.actors[1].die()
        return call(*asked)

    trainers.call = dies  # type: ignore[method-assign]
    fleet.actors[0].answers["examine"] = None
    assert made.push(1) == {"seconds": 1.0}
    assert [entry[:2] for entry in told()] == [("engine_died", "engine 1"), ("push_failed", "engines")]
    assert told()[-1][2] == "begun again, for engine 0"
    (line,) = [line for line in lines_of(tmp_path) if line["kind"] == "push_failed"]
    assert (line["phase"], line["version"]) == ("push of version 1", "1")
    assert line["cause"] == str(refused("http://e1")).splitlines()[0]
    made.push(2)
    assert len(told()) == 2, "once"


def test_a_push_that_is_begun_again_when_an_engine_is_back_is_told_of(
    pushes: tuple[Fleet, Trainers, Pushes], told: Callable[[], list[tuple[Any, ...]]]
) -> None:
    fleet, trainers, made = pushes
    trainers.failures, call = [refused("http://e0")], trainers.call

    def die(*asked: Any) -> list[dict[str, float]]:
        if trainers.failures:
            for actor in fleet.actors[:2]:
                actor.die()
        return call(*asked)

    trainers.call = die  # type: ignore[method-assign]
    made.push(1)
    again = [action for kind, _, action in told() if kind == "push_failed"]
    assert again == ["begun again, for engine 1, engine 0"]


@pytest.mark.parametrize("catches_up", [False, True])
def test_a_push_that_fails_by_itself_ends_the_run_and_is_told_of(
    pushes: tuple[Fleet, Trainers, Pushes], told: Callable[[], list[tuple[Any, ...]]], catches_up: bool
) -> None:
    fleet, trainers, made = pushes
    if catches_up:
        lose(fleet, 1)
    trainers.failures = [RunError("push weights: trainer 0 failed: the disk is full")]
    with pytest.raises(RunError, match="the disk is full"):
        made.catch_up() if catches_up else made.push(1)
    assert told()[-1] == ("push_failed", "engines", "the run ends")
    trainers.failures = [LOST_TRAINER]
    with pytest.raises(LostError):
        made.catch_up() if catches_up else made.push(1)
    assert [kind for kind, *_ in told()].count("push_failed") == 1, "trainers are made anew"


def test_engines_leave_the_groups_of_trainers_that_died(pushes: tuple[Fleet, Trainers, Pushes]) -> None:
    fleet, trainers, made = pushes
    made.push(1)
    assert trainers.groups[0] == trainers.groups[1], "it is one with the same engines"
    trainers.failures = [LOST_TRAINER]
    with pytest.raises(LostError):
        made.push(2)
    assert trainers.groups[2] == trainers.groups[0]
    made.go_back()
    asked = [[call for call in actor.calls if call[0] == "leave_groups"] for actor in fleet.actors]
    assert asked == [[("leave_groups", trainers.groups[:1])]] * 2
    made.push(2)
    lose(fleet, 1)
    made.catch_up()
    made.push(3)
    assert len(set(trainers.groups)) == 4, "another with other engines"
    made.go_back()
    made.go_back()
    assert [call[0] for call in fleet.actors[0].calls].count("leave_groups") == 2, "once of each"


def test_one_that_comes_back_gets_the_version_of_the_others_in_between(
    pushes: tuple[Fleet, Trainers, Pushes],
) -> None:
    fleet, trainers, made = pushes
    assert not made.may_catch_up()
    lose(fleet, 1)
    assert made.may_catch_up()
    assert made.catch_up() == 0
    assert trainers.pushed[1:] == [(0, ["http://e1"])]
    assert fleet.serving()[-1] == ["http://e0", "http://e1"]
    made.trained = 1
    lose(fleet, 2)
    assert not made.may_catch_up(), "the trainers have none of version 0 any more"
    made.push(1)
    assert trainers.pushed[-1] == (1, ["http://e0", "http://e1"])


def test_a_version_is_confirmed_between_pushes_of_it(pushes: tuple[Fleet, Trainers, Pushes]) -> None:
    """What a transport has written of it is final then, and the same under the same number."""
    fleet, trainers, made = pushes
    within: list[tuple[int, int] | None] = []
    call = trainers.call
    trainers.call = lambda *values: within.append(made.confirmed()) or call(*values)  # type: ignore[method-assign]
    told = [made.confirmed()]
    lose(fleet, 1)
    made.catch_up()
    told.append(made.confirmed())
    made.push(1)
    told.append(made.confirmed())
    made.go_back()
    assert made.confirmed() is None
    made.push(1)
    told.append(made.confirmed())
    assert within == [None, told[1], None]
    assert [version for version, _ in filter(None, told)] == [0, 0, 1, 1]
    assert len(set(told)) == 4


def test_a_version_that_could_not_be_pushed_is_not_confirmed(
    pushes: tuple[Fleet, Trainers, Pushes], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, trainers, made = pushes
    before = made.confirmed()

    def fails(*_: Any) -> None:
        raise RunError("not proved")

    monkeypatch.setattr(trainers, "call", fails)
    with pytest.raises(RunError, match="not proved"):
        made.push(1)
    assert made.confirmed() == before


def test_when_none_serves_the_trainers_weights_are_pushed_before_their_time_and_once(
    pushes: tuple[Fleet, Trainers, Pushes],
) -> None:
    fleet, trainers, made = pushes
    made.trained = 1
    lose(fleet, 0, 1)
    assert made.may_catch_up()
    assert made.is_ahead
    assert made.catch_up() == 1
    assert trainers.pushed[1:] == [(1, ["http://e1", "http://e0"])]
    assert fleet.supervisor.version == "1"
    assert made.push(1) == {}
    assert made.push(2) == {"seconds": 1.0}
    assert [version for version, _ in trainers.pushed] == [0, 1, 2]


def test_engines_beside_trainers_wait_for_the_next_push_unless_none_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, trainers = Fleet(monkeypatch), Trainers()
    memory = Memory(fleet)
    made = Pushes(trainers, fleet.engines, memory, None)  # type: ignore[arg-type]
    made.push(0)
    lose(fleet, 1)
    assert not made.may_catch_up(), "the other one generates, and its GPU has no room for trainers' weights"
    lose(fleet, 0)
    assert made.may_catch_up()
    made.catch_up()
    assert memory.meanwhile[-1] == [], "requests wait for them: one without its cache dies of the first"
    assert fleet.serving()[-1] == ["http://e1", "http://e0"]
