"""What a wait makes of answers, failures and deaths that are there at the same time, with a stand-in for Ray."""

from __future__ import annotations

import traceback
from argparse import Namespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError, RayTaskError

from slime.backends.sglang.client import EngineError
from slime.data.rows.messages import RowError
from slime.ray import supervision
from slime.ray.supervision import CallError, Deadline, InputError, LostError, RunError, Supervisor
from slime.utils.errors import HookError

NUM_GPUS = 0
LIMIT = Deadline(60.0)


class Ref:
    """A reference to an answer, or an error, that is ready from a certain call of `ray.wait` on."""

    def __init__(self, answer: Any = None, ready_at: int = 1) -> None:
        self.answer, self.ready_at = answer, ready_at


def failure(error: Exception) -> Exception:
    """What Ray raises in the driver when an actor's method raised ``error``."""
    try:
        raise error
    except Exception as caught:
        return RayTaskError("f", traceback.format_exc(), caught, "title", 1, "10.0.0.1").as_instanceof_cause()


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ray's calls on `Ref`; of each `ray.wait`, how many references it was given."""
    waits: list[int] = []

    def wait(refs: list[Ref], num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
        assert len({id(ref) for ref in refs}) == len(refs) >= num_returns
        waits.append(len(refs))
        done = [ref for ref in refs if ref.ready_at <= len(waits)][:num_returns]
        return done, [ref for ref in refs if ref not in done]

    def get(ref: Ref, timeout: float) -> Any:
        if isinstance(ref.answer, Exception):
            raise ref.answer
        return ref.answer

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(supervision, "_RAY_GRACE_S", 0.0)
    return waits


class Survivors:
    """A supervisor of engines that a run may lose, and of a trainer that it may not."""

    def __init__(self, **ends: Ref) -> None:
        self.supervisor = Supervisor()
        self.failures: list[RunError] = []
        for name, end in ends.items():
            actor = Namespace(watch=Namespace(remote=lambda end=end: end))
            self.supervisor.watch(name, actor, self._note if name.startswith("engine") else None)

    @property
    def lost(self) -> list[str]:
        return [str(failure) for failure in self.failures]

    def _note(self, phase: str, failure: RunError) -> None:
        self.failures.append(failure)

    def wait(self, **calls: Ref) -> list[Any]:
        return self.supervisor.wait(calls, "sleep", LIMIT)  # type: ignore[arg-type]


NEVER = 10**9


def test_answers_that_are_all_there_cost_one_pass(waits: list[int]) -> None:
    run = Survivors(trainer=Ref(ready_at=NEVER))
    calls = {f"rank {number}": Ref(number) for number in range(2000)}
    assert run.wait(**calls) == list(range(2000))
    assert waits == [2001, 2001]


def test_answers_that_come_one_by_one_are_waited_for(waits: list[int]) -> None:
    """In the order of the calls, whichever comes first."""
    run = Survivors(trainer=Ref(ready_at=NEVER))
    assert run.wait(a=Ref("a", 5), b=Ref("b", 1), c=Ref("c", 3)) == ["a", "b", "c"]
    assert waits == [4, 4, 3, 3, 2, 2]


def test_one_answer_alone_costs_one_question(waits: list[int]) -> None:
    assert Survivors().wait(a=Ref("a")) == ["a"]
    assert waits == [1]


@pytest.mark.parametrize("late", [1, 3], ids=["with the failure", "soon after"])
def test_a_death_is_the_root_cause_of_the_call_that_failed_with_it(late: int) -> None:
    """The failed call comes first in a pass, and says less than the death of another process."""
    run = Survivors(trainer=Ref(RayActorError(), late), engine=Ref(ready_at=NEVER))
    with pytest.raises(RunError, match=r"^sleep: the process of trainer died: "):
        run.wait(manager=Ref("fine"), engine=Ref(failure(ConnectionError("connection reset"))))


def test_bad_input_is_told_of_at_once() -> None:
    """No death explains a bad row, as it may what failed of anything else."""
    graces = [supervision._grace_of(failure(kind("why"))) for kind in (RowError, HookError, EngineError)]
    assert graces == [0.0, 5.0, 20.0]
    with pytest.raises(InputError, match=r"^start trainers: trainer 3: no such directory$"):
        Survivors().supervisor.wait(
            {"trainer 3": Ref(failure(RowError("no such directory")))},  # type: ignore[dict-item]
            supervision.START_TRAINERS,
            LIMIT,
        )
    with pytest.raises(InputError, match=r"^load data: row 3$"):  # whoever has read it
        Survivors().supervisor.wait({"manager": Ref(failure(RowError("row 3")))}, supervision.LOAD_DATA, LIMIT)  # type: ignore[dict-item]


def test_an_engine_whose_call_failed_with_its_death_is_lost_once() -> None:
    """Its end, and its other answer, are in the same pass as the failure."""
    run = Survivors(engine_0=Ref(ready_at=NEVER), engine_1=Ref(RayActorError()))
    run.supervisor.expect("engine_1", Ref(failure(OSError("gone"))), "start")  # type: ignore[arg-type]
    answers = run.wait(engine_1=Ref(failure(ConnectionError("connection reset"))), engine_0=Ref(7), manager=Ref(8, 9))
    assert answers == [7, 8]
    assert len(run.lost) == 1
    assert run.lost[0].startswith("sleep: the process of engine_1 died: ")
    assert run.wait(engine_1=Ref("too late", NEVER), manager=Ref(9)) == [9]
    assert run.wait(engine_1=Ref("too late", NEVER)) == []


def test_a_call_that_fails_beside_the_death_of_an_engine_is_a_failure() -> None:
    run = Survivors(engine_0=Ref(ready_at=NEVER), engine_1=Ref(RayActorError()))
    with pytest.raises(RunError, match=r"(?s)^sleep: engine_0 failed .*refused"):
        run.wait(engine_1=Ref(failure(OSError("refused"))), engine_0=Ref(failure(OSError("refused"))))
    assert len(run.lost) == 1


def test_whoever_watches_can_tell_a_death_from_a_failure_of_one_that_lives() -> None:
    run = Survivors(engine_0=Ref(failure(EngineError("its router hangs"))), engine_1=Ref(RayActorError()))
    run.wait(engine_0=Ref(7, NEVER), engine_1=Ref(8, NEVER))
    assert [type(failure) for failure in run.failures] == [CallError, LostError]


def test_a_death_beside_the_last_answer_is_the_next_waits() -> None:
    run = Survivors(trainer=Ref(RayActorError()))
    assert run.wait(manager=Ref(1), engine=Ref(2)) == [1, 2]
    with pytest.raises(RunError, match=r"^sleep: the process of trainer died: "):
        run.wait(manager=Ref(3, ready_at=NEVER))


def test_a_failure_in_the_background_ends_a_wait_after_the_answers_there_are() -> None:
    run = Survivors(trainer=Ref(ready_at=NEVER))
    run.supervisor.expect("manager", Ref(failure(OSError("no judge"))), "rollout 4")  # type: ignore[arg-type]
    assert run.wait(trainer=Ref(1)) == [1]
    with pytest.raises(RunError, match=r"^rollout 4: manager failed"):
        run.wait(trainer=Ref(2, ready_at=NEVER), engine=Ref(3))


def test_a_deadline_names_those_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 25))
    monkeypatch.setattr(supervision.time, "monotonic", lambda: float(next(clock)))
    with pytest.raises(RunError, match=r"^sleep: no answer within 60 s from b, c \(weight version none yet\)$"):
        Survivors().wait(a=Ref(1), b=Ref(2, NEVER), c=Ref(3, NEVER))


def test_a_wait_ends_when_its_condition_holds_and_chores_are_done_meanwhile() -> None:
    run, phases = Survivors(trainer=Ref(ready_at=NEVER)), list[str]()
    run.supervisor.attend(phases.append)
    late = Ref("late", ready_at=4)
    calls: Any = {"the rollout manager": late}
    assert run.supervisor.wait(calls, "rollout 3", LIMIT, until=lambda: len(phases) == 2) == []
    assert phases == ["rollout 3"] * 2
    assert run.supervisor.wait(calls, "rollout 3", LIMIT, until=lambda: False) == ["late"]
    run.supervisor.wait_until(lambda: len(phases) > 9, "start", LIMIT, "engines")
    assert phases[-1] == "start"
    with pytest.raises(RunError, match=r"start: no answer within 0 s from engines \(weight version none yet\)"):
        run.supervisor.wait_until(lambda: False, "start", Deadline(0.0), "engines")


def test_a_chore_that_waits_is_not_begun_again_within_itself() -> None:
    run, begun = Survivors(trainer=Ref(ready_at=NEVER)), list[str]()

    def chore(phase: str) -> None:
        begun.append(phase)
        assert run.wait(engine=Ref("answer")) == ["answer"]

    run.supervisor.attend(chore)
    assert run.wait(trainer=Ref(1)) == [1]
    assert begun == ["sleep"]


def test_the_death_of_one_ends_a_wait_for_what_it_brings_about() -> None:
    run = Survivors(engine=Ref(failure(EngineError("ended with status 137"))), trainer=Ref(ready_at=NEVER))
    run.supervisor.wait_until(lambda: run.lost, "start", LIMIT, "engines")
    assert "ended with status 137" in run.lost[0]
