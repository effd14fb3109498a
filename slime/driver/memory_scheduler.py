"""Trainers and engines that share GPUs take turns in their memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from slime.fleet.engines import Engines
from slime.fleet.train_group import TrainGroup
from slime.observability.trace import span
from slime.ray.supervision import Deadline
from slime.utils.device import Memory

_ALL = ("weights", "kv_cache", "cuda_graph")
"""The parts of an engine's memory."""


class MemoryScheduler:
    """Whose turn it is. Without offloading everybody keeps their memory, and nothing here does anything.

    The order is such that never more than the trainers' weights and the engines' weights are there together, during a
    push; the trainers' weights go when the engines have them, and only then the engines' cache comes back.
    """

    def __init__(
        self, trainers: TrainGroup, engines: Engines, limit: Deadline, *, offload_train: bool, offload_rollout: bool
    ) -> None:
        """``limit`` is of each call, ``offload_*`` whether that side gives its memory back."""
        self._trainers, self._engines, self._limit = trainers, engines, limit
        self._offload_train, self._offload_rollout = offload_train, offload_rollout
        self._awake: Literal["trainers", "engines"] = "trainers"
        self._held: set[str] = set(_ALL)
        """What engines have of their memory, or will when they have done what they were told."""
        self._figures: dict[str, float] = {}

    def figures(self) -> dict[str, float]:
        """What was noted since the last call: of each part the seconds, and of the fullest GPU while both sides sleep
        ``perf/asleep_gib``, in use by everybody, ``perf/asleep_trainer_gib`` what torch holds of it for trainers."""
        figures, self._figures = self._figures, {}
        return figures

    def make_room(self) -> None:
        """Put the trainers to sleep for engines that are about to start, and find what the trainers leave: the first
        ones, or others when all are lost."""
        self._sleep_trainers(keep_weights=False)
        self._awake = "engines"
        self._engines.allow_starts()

    def to_trainers(self) -> None:
        """The engines, which are idle, give way to the trainers."""
        if self._awake == "trainers":
            return
        self._engines.hold_starts()
        self._release_engines()
        if self._offload_train:
            with self._timed("wake_trainers"):
                asleep = self._trainers.call("wake the trainers", "wake", self._limit, False)
            fullest = max(asleep, key=lambda memory: memory.used, default=Memory())
            if self._offload_rollout and fullest.used:
                self._figures["perf/asleep_gib"] = fullest.used / 2**30
                self._figures["perf/asleep_trainer_gib"] = fullest.reserved / 2**30
        self._awake = "trainers"

    def to_new_trainers(self) -> None:
        """The engines, which are idle, give way to trainers that are made in the place of others, whenever these died;
        then it is the trainers' turn."""
        self._engines.hold_starts()
        if self._offload_rollout:
            # They can only give all of it.
            if missing := [tag for tag in _ALL if self._held and tag not in self._held]:
                self._resume_engines(missing)
            if self._held:
                self._release_engines()
        self._awake = "trainers"

    @contextmanager
    def pushing(self) -> Iterator[None]:
        """Within: the weights of both sides are there; afterwards it is the engines' turn."""
        self._engines.hold_starts()
        if self._awake == "engines":
            # The first push: nobody has trained yet. Or one to engines that took the place of all.
            self._release_engines()
            if self._offload_train:
                self._trainers.call("wake the trainers' weights", "wake", self._limit, True)
        else:
            self._sleep_trainers(keep_weights=True)
        self._resume_engines(["weights"])
        yield
        self._sleep_trainers(keep_weights=False)
        self._resume_engines(["kv_cache", "cuda_graph"])
        self._awake = "engines"
        self._engines.allow_starts()

    def _sleep_trainers(self, *, keep_weights: bool) -> None:
        if self._offload_train:
            with self._timed("sleep_trainers"):
                self._trainers.call("put the trainers to sleep", "sleep", self._limit, keep_weights)

    def _release_engines(self) -> None:
        if self._offload_rollout:
            self._held.clear()
            with self._timed("release_engines"):
                self._engines.call("put the engines to sleep", "release_memory", self._limit)

    def _resume_engines(self, tags: list[str]) -> None:
        if self._offload_rollout:
            self._held.update(tags)
            with self._timed("resume_engines"):
                self._engines.call(f"wake the engines' {' and '.join(tags)}", "resume_memory", self._limit, tags)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        with span(f"driver/{name}") as timed:
            yield
        key = f"perf/{name}_time"
        self._figures[key] = self._figures.get(key, 0.0) + timed.seconds
