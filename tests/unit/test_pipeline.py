"""Rollouts begun ahead of training: which may begin, and what the failure of one ends."""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest

from slime.driver.pipeline import Pipeline
from slime.ray import supervision
from slime.ray.supervision import Deadline, RunError, Supervisor

NUM_GPUS = 0


class RecordingRun:
    """Stands in for a run: notes what the pipeline asks it to do."""

    def __init__(self, **options: Any) -> None:
        self.args = Namespace(**options)
        self.begun: list[int] = []
        self.taken: list[int] = []
        self.held = self.evaluates = False
        self.go_back: Callable[[int], None]

    def when_going_back(self, go_back: Callable[[int], None]) -> None:
        self.go_back = go_back

    def push_weights(self, version: int) -> None:
        assert self.held
        assert not self.evaluates, "its scores would be of two versions"

    def finish_evaluation(self) -> None:
        assert not self.held, "it would wait for requests that are held"
        self.evaluates = False

    def pause_generation(self) -> None:
        self.held = True

    def resume_generation(self, version: int) -> None:
        self.held = False

    def begin_rollout(self, rollout_id: int) -> None:
        assert not self.held
        self.begun.append(rollout_id)

    def take_rollout(self, rollout_id: int) -> list[Any]:
        assert rollout_id in self.begun, "it would be waited for without end"
        self.taken.append(rollout_id)
        return []


@pytest.mark.parametrize("_", range(20))
def test_rollouts_begin_in_order_and_neither_too_early_nor_without_need_late(_: int) -> None:
    interval, start, count = random.randint(1, 4), random.randint(0, 5), random.randint(1, 12)
    staleness_limit, buffer_size = interval - 1 + random.randint(0, 3), random.randint(0, 3)
    run = RecordingRun(
        start_rollout_id=start,
        num_rollout=start + count,
        async_buffer_size=buffer_size,
        max_weight_staleness=staleness_limit,
    )
    pipeline = Pipeline(run)  # type: ignore[arg-type]
    version = start

    def check(front: int) -> None:
        newest = run.begun[-1]
        assert run.begun == list(range(start, newest + 1))
        assert newest - version <= staleness_limit
        assert newest - front <= buffer_size + 1
        reasons = (newest + 1 - version > staleness_limit, newest - front == buffer_size + 1)
        assert newest == start + count - 1 or any(reasons), "another one could have begun"

    pipeline.push_weights(start)
    check(start)
    for rollout_id in range(start, start + count):
        pipeline.next(rollout_id)
        check(rollout_id)
        if (rollout_id + 1) % interval == 0:
            version = rollout_id + 1
            pipeline.push_weights(version)
            check(rollout_id)
            run.evaluates = True
    assert run.taken == run.begun == list(range(start, start + count))


def test_what_was_begun_is_begun_again_from_the_rollout_that_trainers_come_back_to() -> None:
    run = RecordingRun(start_rollout_id=0, num_rollout=9, async_buffer_size=1, max_weight_staleness=1)
    pipeline = Pipeline(run)  # type: ignore[arg-type]
    pipeline.push_weights(0)
    for rollout_id in range(4):
        pipeline.next(rollout_id)
        pipeline.push_weights(rollout_id + 1)
    assert run.begun == [0, 1, 2, 3, 4, 5]
    run.begun.clear()
    run.go_back(3)
    assert not run.begun, "its prompts are drawn when it is asked for"
    pipeline.next(3)
    assert run.begun == [3, 4]


def test_a_failure_in_the_background_ends_another_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failure(supervision.RayError):
        pass

    answers = {"batches": None, "training": 7}

    def get(ref: str, timeout: float) -> Any:
        if ref == "rollout":
            raise Failure("no judge")
        return answers[ref]

    def wait(refs: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        done = next(ref for ref in refs if ref != "training" or len(refs) == 1)
        return [done], [ref for ref in refs if ref != done]

    monkeypatch.setattr(supervision.ray, "get", get)
    monkeypatch.setattr(supervision.ray, "wait", wait)
    supervisor = Supervisor()
    supervisor.expect("the manager", "batches", "rollout 3")  # type: ignore[arg-type]
    assert supervisor.wait({"trainer": "training"}, "train", Deadline(5.0)) == [7]  # type: ignore[dict-item]
    supervisor.expect("the manager", "rollout", "rollout 4")  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"rollout 4: Ray could not run the manager .*no judge"):
        supervisor.wait({"trainer": "training"}, "train", Deadline(5.0))  # type: ignore[dict-item]
