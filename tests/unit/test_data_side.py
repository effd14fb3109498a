"""What a run does when its rollout manager dies, with stand-ins for Ray and for the manager."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import ray

from slime.driver import data_side
from slime.driver.data_side import DataSide
from slime.driver.restarts import Restarts
from slime.ray.supervision import CallError, Deadline, LostError, RunError

NUM_GPUS = 0


class Actor:
    """A manager: what it was asked, and the references to its answers."""

    def __init__(self, number: int, log: list[tuple[Any, ...]]) -> None:
        self._number, self._log = number, log

    def __getattr__(self, name: str) -> Any:
        def remote(*values: Any) -> Any:
            self._log.append((self._number, name, *values))
            ref = (self._number, name)
            return [ref] * self._returns if self._returns > 1 else ref

        def options(*, num_returns: int) -> Any:
            self._returns = num_returns
            return Namespace(remote=remote)

        self._returns = 1
        return Namespace(remote=remote, options=options)


class Death:
    """A supervisor of managers that answer until they die, at the call of a method."""

    def __init__(self, *dies_at: tuple[int, str], answers: dict[str, Any]) -> None:
        self.version, self._dies_at, self._answers = "3", list(dies_at), answers
        self.dead, self.expected = False, list[Any]()
        self.failure: RunError = LostError("save: the process of the rollout manager died", ["the manager"], "save")

    def watch(self, name: str, actor: Any, on_death: Any) -> None:
        self._on_death = on_death

    def forget(self, name: str) -> None:
        self.dead, self.expected = False, []

    def expect(self, who: str, call: Any, phase: str) -> None:
        self.expected.append(call)

    def dismiss(self, call: Any) -> None:
        self.expected.remove(call)

    def wait(self, calls: dict[str, Any], phase: str, limit: Deadline, until: Any = None) -> list[Any]:
        (call,) = calls.values()
        if call in self._dies_at and not self.dead:
            self._dies_at.remove(call)
            self._on_death(phase, self.failure)
            self.dead = True
        return [] if self.dead else [self._answers.get(call[1], 7)]


def make_data_side(
    monkeypatch: pytest.MonkeyPatch, *dies_at: tuple[int, str], keeps_state: bool = True, **changes: Any
) -> tuple[DataSide, list[tuple[Any, ...]], Death]:
    log: list[tuple[Any, ...]] = []
    made: list[Actor] = []

    def create(*_: Any) -> Actor:
        made.append(Actor(len(made), log))
        return made[-1]

    monkeypatch.setattr(data_side, "create_manager", create)
    monkeypatch.setattr(ray, "put", lambda state: ("put", state))
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    timeouts = ("data_load_timeout", "checkpoint_timeout", "rollout_timeout", "weight_update_timeout")
    values = dict.fromkeys(timeouts, 5.0) | {"use_fault_tolerance": True, "trainer_restart_limit": 3}
    args = Namespace(**values | {"asynchronous": False} | changes)
    supervisor = Death(*dies_at, answers={"hand_over": ({"rollout/prompts_read": 4.0}, keeps_state)})
    engines: Any = Namespace(
        serve=lambda actor, opened: log.append(("serve", opened)), manager_is_away=lambda: log.append(("away",))
    )
    side = DataSide(args, supervisor, engines, Restarts(args))  # type: ignore[arg-type]
    assert side.start(None, ["a model"]) == 7  # type: ignore[list-item]
    side.serve(side.open_routers())
    log.clear()
    return side, log, supervisor


_ANEW = [("away",), (1, "load_data"), (1, "note_version", "3"), (1, "open_routers")]
_SERVED = [("serve", (1, "open_routers")), (1, "cancel")]


def test_a_manager_that_dies_while_it_generates_does_it_again(monkeypatch: pytest.MonkeyPatch, told: Any) -> None:
    side, log, _ = make_data_side(monkeypatch, (0, "generate"))
    side.begin_rollout(0, dp_size=2)
    batches, figures, _ = side.wait_for_rollout(0, Deadline(5.0))
    assert log[2:] == [*_ANEW, *_SERVED, (1, "draw", 0), (1, "generate", 0, 2, (1, "draw"))]
    assert (batches, figures) == ([(1, "generate")] * 2, 7)
    (event,) = told()
    assert (event["kind"], event["phase"]) == ("manager_died", "rollout 0")
    assert event["action"] == "made anew with its state as the run began; rollouts under way: [0]"


def test_a_manager_goes_on_from_its_state_after_the_last_rollout_that_was_handed_over(
    monkeypatch: pytest.MonkeyPatch, told: Any
) -> None:
    side, log, supervisor = make_data_side(monkeypatch, (0, "state"), asynchronous=True)
    side.begin_rollout(0, dp_size=1)
    side.begin_rollout(1, dp_size=1)
    side.wait_for_rollout(0, Deadline(5.0))
    assert side.hand_over(0, Deadline(5.0)) == {"rollout/prompts_read": 4.0}
    side.begin_evaluation(1)
    log.clear()
    assert side.ask("save the data source", Deadline(5.0), "state", 0) == 7
    state = (0, "hand_over")
    restored = [*_ANEW, (1, "restore", 0, state), *_SERVED, (1, "resume_generation", 3)]
    under_way = [(1, "draw", 1), (1, "generate", 1, 1, (1, "draw")), (1, "num_cancels")]
    assert log == [(0, "state", 0), *restored, *under_way, (1, "evaluate", 1, (1, "num_cancels")), (1, "state", 0)]
    assert supervisor.expected == [(1, "note_version"), (1, "open_routers"), (1, "generate"), (1, "evaluate")]
    assert side.finish_evaluation(Deadline(5.0)) == 7
    assert told()[0]["action"] == "made anew with its state after rollout 0; rollouts under way: [1]"


def test_a_rollout_whose_manager_dies_when_it_is_handed_over_is_generated_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side, log, _ = make_data_side(monkeypatch, (0, "hand_over"))
    side.begin_rollout(0, dp_size=1)
    side.wait_for_rollout(0, Deadline(5.0))
    assert side.hand_over(0, Deadline(5.0)) is None
    assert log[-2:] == [(1, "draw", 0), (1, "generate", 0, 1, (1, "draw"))]
    assert side.wait_for_rollout(0, Deadline(5.0))[0] == [(1, "generate")]
    assert side.hand_over(0, Deadline(5.0)) == {"rollout/prompts_read": 4.0}


def test_one_that_dies_while_it_is_made_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    side, log, _ = make_data_side(monkeypatch, (0, "generate"), (1, "cancel"))
    side.begin_rollout(0, dp_size=1)
    assert side.wait_for_rollout(0, Deadline(5.0))[0] == [(2, "generate")]
    assert [call for call in log if call[1:2] == ("draw",)] == [(0, "draw", 0), (2, "draw", 0)]


def test_a_manager_whose_state_is_not_whole_or_that_may_not_come_back_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side, _, _ = make_data_side(monkeypatch, (0, "state"), keeps_state=False)
    side.begin_rollout(0, dp_size=1)
    side.hand_over(0, Deadline(5.0))
    with pytest.raises(RunError, match="its data source keeps its state by itself"):
        side.ask("save the data source", Deadline(5.0), "state", 0)
    side, _, _ = make_data_side(monkeypatch, (0, "state"), use_fault_tolerance=False)
    with pytest.raises(RunError, match=r"^save: the process of the rollout manager died$"):
        side.ask("save the data source", Deadline(5.0), "state", 0)
    side, _, supervisor = make_data_side(monkeypatch, (0, "state"))
    supervisor.failure = CallError("router at http://a hangs")
    with pytest.raises(RunError, match="router at http://a hangs"):
        side.ask("save the data source", Deadline(5.0), "state", 0)


def test_what_is_under_way_is_given_up_when_trainers_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    side, log, supervisor = make_data_side(monkeypatch)
    side.begin_rollout(3, dp_size=1)
    side.begin_evaluation(3)
    side.cancel()
    assert supervisor.expected == [(0, "open_routers")]
    side.rewind(1, {"cursor": 2})
    assert log[-2:] == [(0, "cancel"), (0, "rewind", 1, {"cursor": 2})]
    assert side.evaluates is None
    assert side._state == (1, ("put", {"cursor": 2}))  # type: ignore[comparison-overlap]
