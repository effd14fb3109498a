"""Whose turn it is in the memory of GPUs, and what is noted of it."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from typing import Any

from slime.driver.memory_scheduler import MemoryScheduler
from slime.ray.supervision import Deadline, LostError
from slime.utils.device import Memory

NUM_GPUS = 0


LIMIT = Deadline(9.0, "--weight-update-timeout")


class Sides:
    """Notes what both sides are told; trainers answer with what was in use while they slept."""

    def __init__(self, *asleep: Memory) -> None:
        self.asleep, self.calls = list(asleep), list[tuple[Any, ...]]()

    def trainers(self, phase: str, method: str, limit: Deadline, *values: Any) -> list[Any]:
        assert limit == LIMIT
        self.calls.append(("trainers", method, *values))
        return self.asleep if method == "wake" else [None] * len(self.asleep)

    def engines(self, phase: str, method: str, limit: Deadline, *values: Any) -> list[Any]:
        assert limit == LIMIT
        self.calls.append(("engines", method, *values))
        return [None]

    def scheduler(self, *, offload_train: bool = True, offload_rollout: bool = True) -> MemoryScheduler:
        trainers: Any = Namespace(call=self.trainers)
        turns = {name: lambda name=name: self.calls.append((name,)) for name in ("hold_starts", "allow_starts")}
        engines: Any = Namespace(call=self.engines, **turns)
        return MemoryScheduler(trainers, engines, LIMIT, offload_train=offload_train, offload_rollout=offload_rollout)


def test_never_more_than_both_sides_weights_are_there_together() -> None:
    sides = Sides(Memory())
    scheduler = sides.scheduler()
    scheduler.make_room()
    for _ in range(2):
        scheduler.to_trainers()
        with scheduler.pushing():
            sides.calls.append(("push",))
    step = [
        ("hold_starts",),  # of engines that were lost: what they find free is not theirs
        ("engines", "release_memory"),
        ("trainers", "wake", False),
        ("hold_starts",),
        ("trainers", "sleep", True),
        ("engines", "resume_memory", ["weights"]),
        ("push",),
        ("trainers", "sleep", False),
        ("engines", "resume_memory", ["kv_cache", "cuda_graph"]),
        ("allow_starts",),
    ]
    assert sides.calls == [("trainers", "sleep", False), ("allow_starts",), *step, *step]


def test_engines_that_took_the_place_of_all_get_weights_as_the_first_ones_did() -> None:
    sides = Sides(Memory())
    scheduler = sides.scheduler()
    scheduler.make_room()
    with scheduler.pushing():
        sides.calls.append(("push",))
    assert sides.calls[2:] == [
        ("hold_starts",),
        ("engines", "release_memory"),
        ("trainers", "wake", True),
        ("engines", "resume_memory", ["weights"]),
        ("push",),
        ("trainers", "sleep", False),
        ("engines", "resume_memory", ["kv_cache", "cuda_graph"]),
        ("allow_starts",),
    ]


def test_the_fullest_gpu_is_noted_while_both_sleep() -> None:
    gib = 2**30
    sides = Sides(Memory(used=4 * gib, reserved=gib), Memory(used=11 * gib, reserved=7 * gib), Memory(used=3 * gib))
    scheduler = sides.scheduler()
    scheduler.make_room()
    scheduler.to_trainers()
    figures = scheduler.figures()
    assert (figures["perf/asleep_gib"], figures["perf/asleep_trainer_gib"]) == (11.0, 7.0)
    assert scheduler.figures() == {}


def test_nothing_is_noted_without_gpus_or_where_engines_stay() -> None:
    for sides, stays in ((Sides(Memory()), False), (Sides(), False), (Sides(Memory(used=1)), True)):
        scheduler = sides.scheduler(offload_rollout=not stays)
        scheduler.make_room()
        scheduler.to_trainers()
        assert not any("asleep" in name for name in scheduler.figures())


def test_engines_give_way_to_new_trainers_whatever_they_hold() -> None:
    log: list[Any] = []
    engines: Any = Namespace(
        call=lambda phase, method, limit, *values: log.append((method, *values)),
        hold_starts=lambda: None,
        allow_starts=lambda: None,
    )
    trainers: Any = Namespace(call=lambda phase, method, limit, *values: log.append((method, *values)) or [])
    scheduler = MemoryScheduler(trainers, engines, Deadline(5.0), offload_train=True, offload_rollout=True)
    scheduler.make_room()
    scheduler.to_new_trainers()
    assert log[-1] == ("release_memory",), "they were awake"
    log.clear()
    scheduler.to_new_trainers()
    assert not log, "they were asleep"
    with contextlib.suppress(LostError), scheduler.pushing():
        log.clear()
        raise LostError("push weights of version 2: the process of engine 1 died", ["engine 1"], "push")
    scheduler.to_new_trainers()
    assert log == [("resume_memory", ["kv_cache", "cuda_graph"]), ("release_memory",)], "they had their weights only"
    log.clear()
    with scheduler.pushing():
        pass
    assert log[:2] == [("sleep", True), ("resume_memory", ["weights"])], "as after a training step"
