"""The trainers of a run as one: made, started, called and ended together, and what they write."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ray

from slime.files import atomic_io
from slime.files.checkpoints import checkpoint_directory
from slime.files.exports import exports_after
from slime.fleet.placement import Placement
from slime.ray.cluster import actor_environment, as_actor, worker_options
from slime.ray.supervision import RESTORE_DATA, START_TRAINERS, Deadline, Supervisor, limit_of
from slime.ray.train_actor import TrainActor
from slime.utils.environment import as_environment
from slime.utils.redaction import is_secret

_CONTROL = Deadline(60.0)
_LEAVE_S = 20.0


class TrainGroup:
    """One actor a training rank; a run that does not train has none, and every call gives nothing."""

    def __init__(self, args: argparse.Namespace, supervisor: Supervisor) -> None:
        self._args, self._supervisor = args, supervisor
        self.actors: list[Any] = []
        self._dp_ranks = [0]
        self.dp_size = 1
        self.optimizer_steps = 0
        """Those that were taken so far, before a resume too."""
        self._first = 0
        self._state: dict[str, Any] | None = None

    def create(self, placement: Placement) -> None:
        """Make the actors, each on its slot."""
        # torch and megatron-core warn of their own deprecations, many lines a rank; no code of users runs there.
        variables = {"PYTHONWARNINGS": "ignore", **placement.interface()}
        if getattr(self._args, "sglang_enable_symm_mem", False):
            variables["NCCL_CUMEM_ENABLE"] = "1"  # as in those engines, whatever the host says
        # Ray shows that environment to everyone who may ask it: what is named for a secret is set by the rank itself.
        wanted = as_environment(self._args.train_env_vars)
        variables |= {name: value for name, value in wanted.items() if not is_secret(name, value)}
        self._on_one_host = len({slot.host for slot in placement.train}) == 1
        environment, its_args = actor_environment(variables), worker_options(self._args)
        for rank, slot in enumerate(placement.train):
            options = {"runtime_env": environment, **placement.options(slot, trains=True)}
            actor = as_actor(TrainActor).options(**options).remote(its_args, rank, len(placement.train), slot.gpu)
            self.actors.append(actor)
            self._supervisor.watch(f"trainer {rank}", actor)

    def start(self, num_rollout: int) -> int:
        """Build the models and load their weights; the first to train on of the run's ``num_rollout`` rollouts."""
        limit = limit_of(self._args, "checkpoint_timeout")
        served = {"trainer 0": self.actors[0].serve_rendezvous.remote(self._on_one_host)}
        (master,) = self._supervisor.wait(served, START_TRAINERS, limit)
        answers = self.call(START_TRAINERS, "start", limit, master, num_rollout)
        self._first, self.dp_size, self._state = answers[0]
        self._dp_ranks = self.call(START_TRAINERS, "dp_rank", _CONTROL)
        return self._first

    def restore(self, manager: Any) -> bool:
        """Have the rollout manager go on from the checkpoint that the trainers have loaded; whether there is one."""
        if self._state is None:
            return False
        state, self._state = self._state, None
        restored = {"the rollout manager": manager.restore.remote(self._first - 1, state)}
        self._supervisor.wait(restored, RESTORE_DATA, limit_of(self._args, "checkpoint_timeout"))
        self.optimizer_steps = state["optimizer_steps"]
        return True

    def kill(self) -> None:
        """End all, whatever they are doing, so that others can be made in their place."""
        for rank in range(len(self.actors)):
            self._supervisor.forget(f"trainer {rank}")
        if calls := [actor.stop.remote() for actor in self.actors]:
            # Those that still answer have engines leave the group that they push in.
            ray.wait(calls, num_returns=len(calls), timeout=_LEAVE_S)
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []

    def call(self, phase: str, method: str, limit: Deadline, *values: Any) -> list[Any]:
        """Call a method of every rank; the answers, by rank."""
        return self.call_each(phase, method, limit, [values] * len(self.actors))

    def call_each(self, phase: str, method: str, limit: Deadline, values: Iterable[tuple[Any, ...]]) -> list[Any]:
        """The same with values of its own for each rank."""
        calls = {
            f"trainer {rank}": getattr(actor, method).remote(*its_values)
            for rank, (actor, its_values) in enumerate(zip(self.actors, values, strict=False))
        }
        return self._supervisor.wait(calls, phase, limit)

    def train(self, rollout_id: int, batches: list[ray.ObjectRef], limit: Deadline) -> list[dict[str, float]]:
        """Train on a rollout, of which each data-parallel rank has a batch; rank 0's metrics, one dict a step."""
        values = ((rollout_id, batches[rank]) for rank in self._dp_ranks)
        answers = self.call_each(f"train on rollout {rollout_id}", "train", limit, values)
        return answers[0] if answers else []


class Saver:
    """Has trainers write checkpoints, Hugging Face directories and adapters, and knows what they have not finished."""

    def __init__(self, args: argparse.Namespace, trainers: TrainGroup) -> None:
        self._args, self._trainers = args, trainers
        self._unfinished: list[Path] = []

    @property
    def limit(self) -> Deadline:
        """Of whatever is saved."""
        return limit_of(self._args, "checkpoint_timeout")

    def save(self, rollout_id: int, state: dict[str, Any]) -> None:
        """Write what is asked for after a rollout; ``state`` is what a resumed run needs besides the trainers' own."""
        args, phase = self._args, f"save after rollout {rollout_id}"
        if args.save:
            saves = (args.save, args.critic_save if args.use_critic else None)
            values = [(rollout_id, None if rank else state) for rank in range(len(self._trainers.actors))]
            with self._staging([checkpoint_directory(each, rollout_id) for each in saves if each]):
                self._trainers.call_each(phase, "save", self.limit, values)
        self.export(rollout_id, exports_after(args, rollout_id), phase)

    def export(self, rollout_id: int, places: dict[str, str], phase: str) -> None:
        """Write the directories of ``places``, by the option that asks for each."""
        for option, directory in places.items():
            with self._staging([Path(directory)]):
                self._trainers.call(phase, "export", self.limit, option, directory, rollout_id)

    def clean_up(self) -> list[str]:
        """Remove what is unfinished, now that no trainer writes there: it would keep a full disk full. What could not
        be put back, for a warning: the disk that a save failed on may fail here too."""
        lost = []
        for final in self._unfinished:
            try:
                atomic_io.put_back(final)
            except OSError as error:
                why = error.strerror or str(error)
                lost.append(f"{final}: {why}; what was there before may be at {atomic_io.replaced(final)}")
            atomic_io.discard_directory(final)
        return lost

    @contextlib.contextmanager
    def _staging(self, finals: list[Path]) -> Iterator[None]:
        """Within, trainers write what becomes ``finals``; what is unfinished when that fails is left to `clean_up`."""
        self._unfinished = finals
        yield
        self._unfinished = []
