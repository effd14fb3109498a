"""What a run does when its trainers die, with stand-ins for Ray and for all that it starts."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from slime.driver.data_side import MANAGER
from slime.driver.meanwhile import Meanwhile
from slime.driver.recovery import Recovery
from slime.driver.restarts import Restarts
from slime.driver.run import Run
from slime.fleet.placement import Placement, Slot
from slime.fleet.train_group import Checkpoint
from slime.observability.verdict import NO_VERDICT
from slime.ray.supervision import LostError, RunError

NUM_GPUS = 0


class Part:
    """Notes what it is asked, with the others, in one list."""

    def __init__(self, name: str, log: list[tuple[Any, ...]], **answers: Any) -> None:
        self._name, self._log, self._answers = name, log, answers

    def __getattr__(self, method: str) -> Any:
        def call(*values: Any, **named: Any) -> Any:
            self._log.append((f"{self._name}.{method}", *values, *named.items()))
            answer = self._answers.get(method)
            if isinstance(answer, list):
                answer = answer.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


PLACEMENT = Placement([], [Slot(0, "here", None), Slot(1, "here", None)], [])


def make_recovery(log: list[tuple[Any, ...]], **changes: Any) -> Recovery:
    """Of a run of 9 rollouts whose trainers come back after rollout 3; ``changes`` are options, or parts' answers."""
    options: dict[str, Any] = {
        "use_fault_tolerance": True,
        "trainer_restart_limit": 4,
        "num_rollout": 9,
        "start_rollout_id": 0,
        "save_interval": 2,
        "eval_interval": 2,
        "skip_eval_before_train": False,
        "asynchronous": False,
        "checkpoint_timeout": 5.0,
        "use_critic": False,
        "on_bad_step": "stop",
    }
    answers: dict[str, Any] = {
        "start": 4,
        "take_state": {"cursor": 1},
        "newest": Checkpoint("kept", None, 3),
        "has_written": True,
        "clean_up": (),
        "scored": {0, 2, 4},
    }
    args = Namespace(**{name: changes.pop(name, value) for name, value in options.items()})
    answers |= changes
    verbs = Part("run", log)
    verbs.scored = answers["scored"]
    return Recovery(
        args,
        verbs,  # type: ignore[arg-type]
        Namespace(version="5"),  # type: ignore[arg-type]
        Part("trainers", log, **answers),  # type: ignore[arg-type]
        PLACEMENT,
        Part("data", log),  # type: ignore[arg-type]
        Part("memory", log),  # type: ignore[arg-type]
        Part("pushes", log),  # type: ignore[arg-type]
        Part("saver", log, **answers),  # type: ignore[arg-type]
        Restarts(args),
    )


LOST = LostError("train on rollout 5: the process of trainer 1 died", ["trainer 1"], "train on rollout 5")


def test_trainers_come_back_where_the_newest_checkpoint_is(told: Any) -> None:
    log: list[tuple[Any, ...]] = []
    assert make_recovery(log).bring_back(LOST) == 4
    assert log == [
        ("trainers.kill",),
        ("saver.clean_up",),
        ("data.cancel",),
        ("pushes.go_back",),
        ("memory.to_new_trainers",),
        ("saver.newest",),
        ("trainers.create", PLACEMENT, Checkpoint("kept", None, 3)),
        ("trainers.start", 9),
        ("trainers.take_state",),
        ("data.rewind", 3, {"cursor": 1}),
        ("saver.has_written", 3),
        ("run.push_weights", 4),
        ("data.resume_generation", 4),
    ]
    (event,) = told()
    assert (event["kind"], event["subject"], event["version"]) == ("trainer_died", "trainer 1", "5")
    assert event["action"] == "made anew from kept after rollout 3; going on with rollout 4"


def test_what_the_step_had_left_to_do_is_done() -> None:
    log: list[tuple[Any, ...]] = []
    make_recovery(log, has_written=False, scored=set()).bring_back(LOST)
    assert log[-5:] == [
        ("run.save", 3),
        ("run.push_weights", 4),
        ("data.resume_generation", 4),
        ("run.begin_evaluation", 4),
        ("run.finish_evaluation",),
    ]
    log.clear()
    make_recovery(log, scored=set(), asynchronous=True).bring_back(LOST)
    assert log[-3:] == [("run.push_weights", 4), ("data.resume_generation", 4), ("run.begin_evaluation", 4)]


def test_without_a_checkpoint_they_begin_as_the_run_began() -> None:
    log: list[tuple[Any, ...]] = []
    assert make_recovery(log, newest=None, start=0, take_state=None, scored=set()).bring_back(LOST) == 0
    assert ("trainers.create", PLACEMENT, None) in log
    assert ("data.rewind", -1, None) in log
    assert not [call for call in log if call[0] == "run.save"]
    assert log[-2:] == [("run.begin_evaluation", 0), ("run.finish_evaluation",)]


def test_those_that_fail_in_their_turn_are_made_again_and_each_is_told_of(told: Any) -> None:
    log: list[tuple[Any, ...]] = []
    again = LostError("start trainers: no answer", ["trainer 0", "trainer 1"], "start trainers")
    assert make_recovery(log, start=[again, 4]).bring_back(LOST) == 4
    assert [call[0] for call in log].count("trainers.kill") == 2
    assert [event["subject"] for event in told()] == ["trainer 1", "trainer 0, trainer 1"]
    with pytest.raises(RunError, match="failed in the same way when made anew"):
        make_recovery(log, start=[again, again, 4]).bring_back(LOST)


@pytest.mark.parametrize(
    ("lost", "changes"),
    [
        (LostError("rollout 5: no answer", [MANAGER], "rollout 5"), {}),
        (LostError("engine 0 does not answer", ["engine 0"], "put the engines to sleep"), {}),
        (LOST, {"use_fault_tolerance": False}),
    ],
)
def test_others_end_the_run(lost: LostError, changes: dict[str, Any]) -> None:
    log: list[tuple[Any, ...]] = []
    with pytest.raises(LostError) as raised:
        make_recovery(log, **changes).bring_back(lost)
    assert raised.value is lost
    assert not log


def test_the_loop_goes_on_with_the_rollout_that_trainers_come_back_to() -> None:
    run = Run(Namespace(start_rollout_id=2, num_rollout=6))
    run._recovery = Namespace(bring_back=lambda lost: comes_back.pop())  # type: ignore[assignment]
    run._end_step = lambda rollout_id: trained.append(rollout_id)  # type: ignore[method-assign]
    comes_back, trained, gone_back = [6, 3, 2], list[int](), list[int]()
    run.when_going_back(gone_back.append)
    ends = [LOST]
    run.finish_evaluation = lambda: None  # type: ignore[method-assign]
    with run.first_push():
        raise LOST
    dies_at = [4, 5]
    for rollout_id in run.rollouts():
        with run.step(rollout_id):
            if dies_at[:1] == [rollout_id]:
                dies_at.pop(0)
                raise LOST
    assert (trained, gone_back) == ([2, 3, 3, 4], [2, 3, 6])
    assert ends


def test_trainers_that_die_while_the_last_scores_are_waited_for_come_back_too() -> None:
    run, waits = Run(Namespace(start_rollout_id=0, num_rollout=2)), [True, False]
    run._recovery = Namespace(bring_back=lambda lost: 1)  # type: ignore[assignment]
    run._end_step = lambda rollout_id: None  # type: ignore[method-assign]

    def finish() -> None:
        if waits.pop(0):
            raise LOST

    run.finish_evaluation = finish  # type: ignore[method-assign]
    assert list(run.rollouts()) == [0, 1, 1]


def test_a_step_in_which_engines_and_trainers_were_lost_has_what_both_took(capsys: pytest.CaptureFixture[str]) -> None:
    run, lines = Run(Namespace(start_rollout_id=0, num_rollout=9, asynchronous=False, rollout_timeout=5.0)), []
    run._session._metrics = Namespace(log=lambda *line: lines.append(line), verdict=NO_VERDICT)  # type: ignore[assignment]
    run._data = Namespace(  # type: ignore[assignment]
        wait_for_rollout=lambda rollout_id, limit: (["batch"], {"rollout/reward": 1.0}, 0.0),
        hand_over=lambda rollout_id, limit: {"rollout/prompts_read": 4.0},
    )
    took = [{"rollout/engines_alive": 2.0, "perf/recovery_time": 30.0}, {"rollout/engines_alive": 2.0}]
    run.engines.metrics = lambda: took.pop(0)  # type: ignore[method-assign]
    for seconds in (12.0, 0.0):
        with run.step(3):
            run.take_rollout(3)
            run._restarts.seconds += seconds
    recovered = [values["perf/recovery_time"] for values, *_ in lines if "perf/recovery_time" in values]
    assert recovered == [42.0], "in one line, once"
    assert [values.get("rollout/engines_alive") for values, *_ in lines] == [2.0, None] * 2


def test_the_manager_hears_the_version_of_every_push(monkeypatch: pytest.MonkeyPatch) -> None:
    """It tells of faults as well."""
    run, heard = Run(Namespace(weight_update_timeout=5.0)), list[str]()
    run._session._metrics = Namespace(log=lambda *line: None, verdict=NO_VERDICT)  # type: ignore[assignment]
    monkeypatch.setattr(run._data, "note_version", lambda: heard.append(run._supervisor.version))
    monkeypatch.setattr(run._data, "ask", lambda *asked: None)
    run._memory = Namespace(figures=dict)  # type: ignore[assignment]

    def push(version: int) -> dict[str, float]:
        run._supervisor.version = str(version)
        return {}

    def catch_up() -> int:
        push(5)
        return 5

    run._pushes = Namespace(  # type: ignore[assignment]
        push=push, catch_up=catch_up, may_catch_up=lambda: True, trained=5, is_ahead=True
    )
    monkeypatch.setattr(run.engines, "expects_weights", lambda: True)
    run._trainers.actors = [None]
    run.push_weights(4)
    requests = Namespace(serve=lambda: None, pending=False)
    Meanwhile(run._pushes, requests, run._data).do()  # type: ignore[arg-type]
    assert heard == ["4", "5"]
