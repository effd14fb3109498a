"""Which weights go to which engines, and when: to all after training, and in between to those that came back."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from typing import TypeVar

from slime.driver.memory_scheduler import MemoryScheduler
from slime.driver.probe import Probe
from slime.fleet.engines import Engines, NoEngineError, Publish
from slime.fleet.train_group import TrainGroup
from slime.observability import events
from slime.ray.supervision import Deadline, LostError, RunError
from slime.weights import EngineAddress

_T = TypeVar("_T")


class Pushes:
    """Those of a run, by the number of rollouts that the trainers' weights were trained on, which is their version."""

    def __init__(
        self,
        trainers: TrainGroup,
        engines: Engines,
        memory: MemoryScheduler,
        limit: Deadline,
        probe: Probe | None = None,
    ) -> None:
        """``limit`` is of each push; each is tried by the ``probe``."""
        self._trainers, self._engines, self._memory, self._limit = trainers, engines, memory, limit
        self._probe = probe
        self.trained = 0
        """The trainers' version; whoever trains sets it."""
        self._version: int | None = None
        """The engines', after the first push."""
        self._early: int | None = None
        """One that engines which took the place of all had before its time."""
        self._under_way: int | None = None
        self._again = 0
        """How often a version that engines have was, or is to be, brought to some of them anew."""
        self._failed: str | None = None
        """What the latest try of the present push failed of."""
        self._groups: list[str] = []
        """What trainers may have called the collective group that they push in, since they were made; the latest last.
        They are named here, so that engines can leave it when those that were in it are dead."""
        self._met: list[EngineAddress] = []
        """The engines of the latest one, after a push in it that did not fail."""

    def push(self, version: int) -> dict[str, float]:
        """Give every engine the trainers' weights; figures of it, none where they have these already."""
        self.trained, self._failed = version, None
        if version == self._early:
            return {}
        while True:
            if not self._engines.membership.trained:
                self._memory.make_room()
                self._engines.await_one(f"push weights of version {version}")
            try:
                figures = self._give(version, self._engines.push)
                break
            except NoEngineError:
                continue
        self._version = version
        return figures

    def go_back(self) -> None:
        """Trainers are made anew, with older weights: no engine has those of the run before the next push. Engines
        leave the collective group of those before, which may be dead; one in which a broadcast of the dead hangs does
        not answer, and is lost for that."""
        groups, self._groups, self._met = self._groups, [], []
        if groups:
            self._engines.leave_groups(groups, self._limit)
        self._version = self._early = None
        self._again += 1
        if self._probe is not None:
            self._probe.forget()

    def confirmed(self) -> tuple[int, int] | None:
        """The version that engines have, and a number that grows when it is made anew: a transport's files of it are
        final, and the same for as long as this is. None before the first push and in the midst of another of the
        version. Other threads ask."""
        again, version = self._again, self._version
        return None if version is None or version == self._under_way else (version, again)

    def may_catch_up(self) -> bool:
        """Whether an engine that came back can be given weights while a rollout is under way, and trainers are idle.

        Others that generate by an older version, or that share the trainers' GPUs, which have no room, keep it from
        that: it then waits for the next push.
        """
        if self._version is None or not self._trainers.actors:
            return False
        waiting = self._engines.waiting()
        alone = bool(waiting) and not self._engines.serves()
        shares = any(member.spec.beside_trainers for member in self._engines.membership.trained)
        return alone or (bool(waiting) and not shares and not self.is_ahead)

    @property
    def is_ahead(self) -> bool:
        """Whether the trainers have newer weights than the engines."""
        return self.trained != self._version

    def catch_up(self) -> int:
        """Give the trainers' weights to those that wait for them; which version that is."""
        version, self._failed = self.trained, None
        self._give(version, self._engines.catch_up)
        if self.is_ahead and self._engines.serves():
            self._early = self._version = version
        return version

    def probed(self) -> dict[str, float]:
        """How far trainers and engines are apart after the pushes since it was last asked, where anybody was probed."""
        difference = self._probe.finish() if self._probe is not None else None
        return {} if difference is None else {"rollout/push_probe_abs_diff": difference}

    def _give(self, version: int, push: Callable[[int, Publish], _T]) -> _T:
        """Have engines take the weights by one of their pushes, probe both sides, and admit those that joined."""
        with self._memory.pushing():
            with self._making(version):
                figures = push(version, lambda engines: self._publish(version, engines))
            reached = self._engines.reached()
            if self._probe is not None and reached:
                self._probe.ask_trainers(version)
        if self._probe is not None and reached:
            self._probe.ask_engines(self._engines.reached())
        self._engines.admit()
        return figures

    @contextlib.contextmanager
    def _making(self, version: int) -> Iterator[None]:
        """Within, the files of a version are not final; an error that ends the run is told of."""
        self._again += version == self._version
        self._under_way = version
        try:
            yield
        except RunError as error:
            # Trainers that were lost are made anew, and engines that start again are waited for.
            if not isinstance(error, (LostError, NoEngineError)):
                self._tell(version, str(error), "the run ends")
            raise
        finally:
            self._under_way = None

    def _publish(self, version: int, engines: list[EngineAddress]) -> dict[str, float]:
        phase = f"push weights of version {version}"
        if self._failed is not None:
            self._tell(version, self._failed, f"begun again, for {', '.join(engine.name for engine in engines)}")
        group = self._group_of(engines)
        try:
            figures: dict[str, float] = self._trainers.call(phase, "publish", self._limit, version, engines, group)[0]
        except RunError as error:
            self._failed = str(error)
            raise
        self._failed, self._met = None, engines
        return figures

    def _group_of(self, engines: list[EngineAddress]) -> str:
        """What a group with these is called: another than the last, if that had others, or its push failed."""
        if engines != self._met:
            self._groups.append(f"slime-weights-{secrets.token_hex(8)}")
            self._met = []
        return self._groups[-1]

    def _tell(self, version: int, cause: str, action: str) -> None:
        phase = f"push of version {version}"
        events.add("push_failed", "engines", phase=phase, version=str(version), cause=cause, action=action)
