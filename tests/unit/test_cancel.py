"""Rollouts and evaluations that are cancelled: they end at once, no prompt is lost, and others may be generated."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.data import Group, Sample
from slime.data.source.users_class import make_data_source
from slime.driver import rollout_manager
from slime.driver.rollout_manager import RolloutManager
from slime.observability import events, logs, trace
from slime.rollout.engine import state as state_module
from slime.rollout.runtime import RolloutRuntime
from slime.utils.errors import CancelledRolloutError
from tests.unit.test_async_rollout import reply

NUM_GPUS = 0
_WITH_BUFFER = "slime.rollout.data_source.RolloutDataSourceWithBuffer"
_FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
_WAIT_S = 30.0


class Client:
    """Answers no request until it is told to."""

    def __init__(self) -> None:
        self.answers = False
        self.asked, self.left = threading.Event(), 0

    async def generate(self, *_: Any, **__: Any) -> dict[str, Any]:
        self.asked.set()
        try:
            if not self.answers:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.left += 1
            raise
        return reply([1, 2])


class Own:
    """A data source of a user's own."""

    def __init__(self, args: Namespace) -> None:
        self.waiting: list[Group] = []
        self.next = 0

    def get_samples(self, num_samples: int) -> list[Group]:
        taken, self.waiting = self.waiting[:num_samples], self.waiting[num_samples:]
        while len(taken) < num_samples:
            taken.append([Sample(prompt="p", group_index=self.next, index=2 * self.next + i) for i in range(2)])
            self.next += 1
        return taken

    def add_samples(self, samples: list[Group]) -> None:
        self.waiting += samples


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    made = Client()
    monkeypatch.setattr(state_module, "make_client", lambda *_: made)
    return made


@pytest.fixture
def aborted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the engines were told to end."""
    told: list[object] = []

    async def abort(runtime: RolloutRuntime, rids: object) -> bool:
        told.append(rids)
        return True

    monkeypatch.setattr(RolloutRuntime, "abort_requests", abort)
    return told


@pytest.fixture
def make_manager(
    rollout_args: Callable[..., Namespace],
    write_jsonl: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., RolloutManager]:
    def make(**changes: Any) -> RolloutManager:
        args = rollout_args(
            prompt_data=write_jsonl([{"prompt": f"p{i}", "label": str(i)} for i in range(7)]), **changes
        )
        args.launch_dir, args.num_rollout = str(tmp_path / "none"), 9
        # What becomes of the samples is others' business.
        monkeypatch.setattr(rollout_manager, "to_train_batches", lambda args, samples, dp_size: ([samples], {}))
        monkeypatch.setattr(rollout_manager, "operations", lambda args, batches: {})
        monkeypatch.setattr(rollout_manager.RewardLog, "check", lambda *_: None)
        monkeypatch.setattr(logs, "begin", lambda *_: None)
        monkeypatch.setattr(trace, "begin", lambda *_: None)
        monkeypatch.setattr(events, "begin", lambda *_: None)
        made = RolloutManager(args, None)
        made._data_source = make_data_source(args)
        return made

    return make


@pytest.fixture
def threads() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """In which calls of the manager run, as Ray's concurrency groups do."""
    with concurrent.futures.ThreadPoolExecutor() as made:
        yield made


def groups_of(manager: RolloutManager, rollout_id: int) -> list[Any]:
    """The groups of a rollout that is generated now."""
    _, samples = manager.generate(rollout_id, 1, manager.draw(rollout_id))
    return [sample.group_index for sample in samples[::2]]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"data_source_path": _WITH_BUFFER, "over_sampling_batch_size": 6},
        {"data_source_path": f"{__name__}.Own"},
        {"data_source_path": _WITH_BUFFER, "rollout_function_path": _FULLY_ASYNC, "asynchronous": True},
    ],
    ids=["plain", "over-sampling", "own source", "without end"],
)
def test_a_cancelled_rollout_is_generated_again_with_the_same_prompts(
    changes: dict[str, Any],
    make_manager: Callable[..., RolloutManager],
    client: Client,
    aborted: list[object],
    threads: concurrent.futures.ThreadPoolExecutor,
) -> None:
    manager = make_manager(**{"max_weight_staleness": 1} | changes)
    under_way = threads.submit(manager.generate, 0, 1, manager.draw(0))
    assert client.asked.wait(_WAIT_S)
    waiting = manager.draw(1)  # a rollout whose call has not begun
    manager.cancel()
    with pytest.raises(CancelledRolloutError):
        under_way.result(_WAIT_S)
    assert client.left >= 8
    assert None in aborted
    with pytest.raises(CancelledRolloutError, match="rollout 1 was cancelled"):
        manager.generate(1, 1, waiting)
    client.answers = True
    assert groups_of(manager, 0) == [0, 1, 2, 3]
    (figures, _), _ = manager.hand_over(0)
    if figures:
        parts = {part: figures[f"rollout/prompts_{part}"] for part in ("trained", "dropped", "buffered", "in_flight")}
        assert figures["rollout/prompts_read"] == sum(parts.values())
        assert (parts["trained"], parts["dropped"]) == (4, 0)
    others = groups_of(manager, 1)
    assert others == [4, 5, 6, 7] or ("data_source_path" in changes and not set(others) & {0, 1, 2, 3})


def test_what_no_trainer_has_taken_is_generated_again(
    make_manager: Callable[..., RolloutManager], client: Client, aborted: list[object]
) -> None:
    manager = make_manager()
    client.answers = True
    assert groups_of(manager, 0) == [0, 1, 2, 3]
    manager.hand_over(0)
    assert groups_of(manager, 1) == [4, 5, 6, 7]
    manager.cancel()
    assert groups_of(manager, 1) == [4, 5, 6, 7]
    (figures, _), _ = manager.hand_over(1)
    assert figures["rollout/prompts_trained"] == 8


def test_an_evaluation_ends_too(
    make_manager: Callable[..., RolloutManager],
    client: Client,
    aborted: list[object],
    threads: concurrent.futures.ThreadPoolExecutor,
    write_jsonl: Callable[..., str],
) -> None:
    from slime.options.eval_datasets import EvalDataset

    manager = make_manager(eval_interval=1)
    manager._args.eval_datasets = [EvalDataset(name="sums", path=manager._args.prompt_data, input_key="prompt")]
    under_way = threads.submit(manager.evaluate, 3, manager.num_cancels())
    assert client.asked.wait(_WAIT_S)
    manager.cancel()
    with pytest.raises(CancelledRolloutError, match="the evaluation of weight version 3"):
        under_way.result(_WAIT_S)


def test_an_evaluation_that_waits_for_its_turn_is_cancelled_too(
    make_manager: Callable[..., RolloutManager], aborted: list[object]
) -> None:
    manager, evaluated = make_manager(eval_interval=1), list[int]()
    manager._evaluate = lambda args, rollout_id, source, evaluation: evaluated.append(rollout_id)
    asked_for = manager.num_cancels()
    manager.cancel()
    with pytest.raises(CancelledRolloutError, match="the evaluation of weight version 3 was cancelled"):
        manager.evaluate(3, asked_for)
    assert not evaluated
