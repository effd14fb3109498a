"""The engines of a run: who of them lives, calling those, and going on without one that has died."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from slime.options.schema import flag_named
from slime.ray.supervision import Deadline, RunError, Supervisor
from slime.weights import EngineAddress

_TIME = "%Y-%m-%d %H:%M:%S"
_HEAD_LINES, _LOG_LINES = 2, 15
"""Of each engine's end, in the error of a run that has lost all of them."""


_EXAMINATION_MARGIN_S = 60.0


@dataclass(frozen=True)
class _Death:
    """When an engine died, or was found to hang, and of what: phase, engine, status or question, and the last lines of
    its log, as far as known."""

    when: str
    cause: str


class Engines:
    """The engines of a run, by rank. Until `survive` the death of any of them ends the run, from then on that of the
    last one. One that hangs is ended, and is then dead.

    The slots of an engine that died stay empty. Its requests are tried again by whoever sent them.
    """

    def __init__(self, args: argparse.Namespace, supervisor: Supervisor) -> None:
        self._args = args
        self._supervisor = supervisor
        self._actors: dict[int, Any] = {}
        self._addresses: dict[int, EngineAddress] = {}
        self._manager: Any = None
        self._deaths: dict[int, _Death] = {}
        self._told: set[int] = set()

    def watch(self, actors: list[Any]) -> None:
        """Take these for the run's engines, by rank."""
        self._actors = dict(enumerate(actors))
        for rank, actor in self._actors.items():
            self._supervisor.watch(_name(rank), actor, self._survivor(rank))

    def begin(self, method: str, *values: Any) -> dict[str, ray.ObjectRef]:
        """Call a method of all that live, by name."""
        return {
            _name(rank): getattr(actor, method).remote(*values)
            for rank, actor in self._actors.items()
            if rank not in self._deaths
        }

    def survive(self, addresses: list[EngineAddress], manager: Any) -> None:
        """From now on go on without an engine that dies, as long as there is another.

        Args:
            addresses: of all engines, by rank.
            manager: the rollout manager, whose router then sends no more requests there.
        """
        self._addresses, self._manager = dict(enumerate(addresses)), manager

    @property
    def living(self) -> list[Any]:
        """The actors of those that live."""
        return [actor for rank, actor in self._actors.items() if rank not in self._deaths]

    def metrics(self) -> dict[str, float]:
        """How many live, in a run that has engines."""
        return {"rollout/engines_alive": float(len(self.living))} if self._actors else {}

    def call(self, phase: str, method: str, limit: Deadline, *values: Any) -> list[Any]:
        """The answers of all that live when the call is over."""
        return self._supervisor.wait(self.begin(method, *values), phase, limit)

    def push(self, version: int, publish: Callable[[list[EngineAddress]], dict[str, float]]) -> dict[str, float]:
        """Push weights to those that live, and say once of each other that it was skipped.

        A push during which an engine dies leaves the others paused, with weights of two versions: it is made again as a
        whole, without that engine.

        Args:
            publish: pushes to these engines.

        Raises:
            RunError: the push failed although no engine died, or none is left.
        """
        while True:
            alive = len(self.living)
            for rank, death in self._deaths.items():
                if rank not in self._told:
                    _warn(f"push of version {version}: skipped {_name(rank)}, which was lost at {death.when}")
            self._told |= self._deaths.keys()
            try:
                return publish([each for rank, each in self._addresses.items() if rank not in self._deaths])
            except RunError as error:
                if len(self.living) == alive:
                    self._examine(f"push of version {version}: {error}".splitlines()[0])
                if len(self.living) in (0, alive):
                    raise

    def _examine(self, because: str) -> None:
        """Find out whether one hangs, which is then dead: who waits for its answer knows only that there is none."""
        name = "rollout_health_check_timeout"
        limit = Deadline(2 * getattr(self._args, name) + _EXAMINATION_MARGIN_S, flag_named(name))
        calls = {
            _name(rank): actor.examine.remote(because, paused=True)
            for rank, actor in self._actors.items()
            if rank not in self._deaths
        }
        self._supervisor.wait(calls, "examine the engines", limit)

    def _survivor(self, rank: int) -> Callable[[str, str], None]:
        return lambda phase, cause: self._go_on_without(rank, phase, cause)

    def _go_on_without(self, rank: int, phase: str, cause: str) -> None:
        if self._manager is None or len(self._actors) == 1:
            raise RunError(cause)
        lines = cause.splitlines()
        kept = [*lines[:_HEAD_LINES], *lines[_HEAD_LINES:][-_LOG_LINES:]]
        self._deaths[rank] = _Death(time.strftime(_TIME), "\n".join(kept))
        if not self.living:
            names = " and ".join(map(_name, self._deaths))
            causes = [f"{_name(r)} was lost at {death.when}: {death.cause}" for r, death in self._deaths.items()]
            raise RunError("\n".join([f"{phase}: no engine is left, {names} were lost", *causes]))
        # It owns the server's supervisor, which ends what is left of the tree when its owner goes, and the actors of
        # the engine's other nodes, which Ray ends likewise.
        ray.kill(self._actors[rank])
        removed = self._manager.remove_engine.remote(self._addresses[rank].url)
        self._supervisor.expect("the rollout manager", removed, f"deregister {_name(rank)}")
        _warn(
            f"{lines[0]}; going on with {len(self.living)} of {len(self._actors)} engines, which get its "
            f"requests (log: {self._args.run_dir}/logs/engine_{rank}.log)"
        )


def _name(rank: int) -> str:
    return f"engine {rank}"


def _warn(text: str) -> None:
    print(f"{sys.argv[0].rsplit('/', 1)[-1]}: warning: {text}", file=sys.stderr, flush=True)
