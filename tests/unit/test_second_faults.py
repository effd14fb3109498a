"""What dies while the rollout manager is made anew, or while engines that came back are given weights."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from slime.driver import data_side
from slime.driver.data_side import MANAGER, DataSide
from slime.driver.restarts import Restarts
from slime.ray.supervision import Deadline, LostError
from tests.unit.test_engines import Actor, Ref, killed
from tests.unit.test_restarts import Fleet, told

NUM_GPUS = 0
__all__ = ["killed", "told"]
_LIMIT = Deadline(5.0)


class Manager(Actor):
    """A rollout manager; one that is dead answers nothing."""

    def __getattr__(self, name: str) -> Any:
        call = super().__getattr__(name)

        def remote(*values: Any) -> Ref:
            return Ref().give(RayActorError()) if self.watching.is_done else call.remote(*values)

        def options(*, num_returns: int) -> Any:
            return Namespace(remote=lambda *values: [remote(*values) for _ in range(num_returns)])

        return Namespace(remote=call.remote if name == "watch" else remote, options=options)

    def told(self) -> list[list[str]]:
        """The engines of the actor and of the reward model, as it was told of them, call by call."""
        served = [call[1] for call in self.calls if call[0] == "serve"]
        return [[*membership.serving("actor"), *membership.serving("reward")] for membership in served]


class Side:
    """A data side with its engines and a trainer; managers answer what ``answers`` has for their number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: dict[int, dict[str, Any]], **options: Any) -> None:
        self.fleet = Fleet(monkeypatch, serving=False, **options)
        self.fleet.supervisor.forget(MANAGER)
        self.managers: list[Manager] = []
        given = {"load_data": 7, "hand_over": ({}, True)}

        def create(*_: Any) -> Manager:
            number = len(self.managers)
            self.managers.append(Manager(100 + number, **given | answers.get(number, {})))
            return self.managers[-1]

        monkeypatch.setattr(data_side, "create_manager", create)
        monkeypatch.setattr(ray, "put", lambda state: state)
        timeouts = ("data_load_timeout", "checkpoint_timeout", "rollout_timeout", "weight_update_timeout")
        recovery = {"use_fault_tolerance": True, "trainer_restart_limit": 3, "asynchronous": False}
        args = Namespace(**dict.fromkeys(timeouts, 5.0), **recovery)
        self.side = DataSide(args, self.fleet.supervisor, self.fleet.engines, Restarts(args))
        self.side.start(None, ["a model"])  # type: ignore[list-item]
        self.side.serve(self.side.open_routers())

    def lose_manager(self) -> None:
        """The one of now dies while it is asked."""
        self.managers[-1].answers["state"] = Ref()
        self.managers[-1].watching.give(RayActorError())


def test_engines_that_die_while_the_manager_is_made_anew_are_told_of_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One before its routers are there, and one while they open and it waits for that engine to be registered."""

    def load() -> int:
        side.fleet.actors[1].die()
        return 7

    def serve() -> None:
        side.managers[1].answers["serve"] = None
        side.fleet.actors[2].die()

    side = Side(monkeypatch, {1: {"load_data": load, "serve": serve, "open_routers": "opened"}}, count=3)
    side.lose_manager()
    assert side.side.ask("save the data source", _LIMIT, "state", 0) is None
    first, second = side.managers
    assert first.told() == [["http://e0", "http://e1", "http://e2"]]
    assert second.told() == [["http://e0", "http://e2"], ["http://e0"]]
    opened = [call[2].given for call in second.calls if call[0] == "serve"]
    assert opened == ["opened"] * 2, "not before its routers are there"
    side.fleet.actors[0].die()
    side.fleet.rollout()
    assert second.told()[2:] == [[]], "as ever from now on"


def test_an_engine_of_a_frozen_model_that_is_back_while_the_manager_is_made_anew_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = Side(monkeypatch, {1: {"load_data": lambda: (starting.give("http://r0"), 7)[1]}}, rewarders=1)
    starting = Ref()
    side.fleet.starts = [starting]
    side.fleet.actors[2].die()
    side.fleet.rollout()
    side.fleet.rollout()
    side.lose_manager()
    side.side.ask("save the data source", _LIMIT, "state", 0)
    first, second = side.managers
    assert first.told()[-1] == ["http://e0", "http://e1"]
    assert second.told() == [["http://e0", "http://e1", "http://r0"]]


@pytest.mark.parametrize("during", ["load_data", "serve", "cancel"])
def test_a_trainer_that_dies_while_the_manager_is_made_anew_leaves_it_to_be_finished(
    monkeypatch: pytest.MonkeyPatch, killed: list[Actor], told: Callable[[], list[tuple[Any, ...]]], during: str
) -> None:
    side = Side(monkeypatch, {1: {during: lambda: side.fleet.trainer.die(RayActorError()) or 7}})
    side.side.begin_rollout(0, dp_size=1)
    side.lose_manager()
    with pytest.raises(LostError) as raised:
        side.side.ask("save the data source", _LIMIT, "state", 0)
    assert raised.value.names == ("trainer 0",)
    side.fleet.supervisor.forget("trainer 0")
    side.side.cancel()  # by whoever brings trainers back
    assert killed == side.managers[:2], "what was half made is no other's to find"
    asked = [call[0] for call in side.managers[2].calls]
    assert asked == ["load_data", "note_version", "open_routers", "serve", "cancel", "cancel"]
    assert side.managers[2].told() == [["http://e0", "http://e1"]]
    assert [kind for kind, *_ in told()] == ["manager_died"]
    side.side.begin_rollout(0, dp_size=1)
    side.side.wait_for_rollout(0, _LIMIT)
    assert len(side.managers) == 3
