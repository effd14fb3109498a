"""The trainers of a run as one: made, started, called and ended together, and what they write."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from slime.files import atomic_io
from slime.files.checkpoints import checkpoint_directory, find_checkpoint
from slime.files.exports import exports_after, is_export
from slime.fleet.placement import Placement, Slot
from slime.observability import events
from slime.options.checks.determinism import engines_are_deterministic
from slime.ray.cluster import actor_environment, as_actor, worker_options
from slime.ray.supervision import START_TRAINERS, Deadline, LostError, RunError, Supervisor, limit_of
from slime.ray.train_actor import TrainActor
from slime.utils.environment import as_environment, deterministic_variables, kernels_of_any_shape
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
        self._calls: list[ray.ObjectRef] = []
        """The latest."""
        self._begun: list[ray.ObjectRef] = []
        """Since then."""

    def create(self, placement: Placement, newest: Checkpoint | None = None) -> None:
        """Make the actors, each on its slot, to go on from ``newest`` where that is given, not from ``--load``."""
        # torch and megatron-core warn of their own deprecations, many lines a rank; no code of users runs there.
        variables = {"PYTHONWARNINGS": "ignore", **placement.interface()}
        if getattr(self._args, "sglang_enable_symm_mem", False):
            variables["NCCL_CUMEM_ENABLE"] = "1"  # as in those engines, whatever the host says
        if self._args.true_on_policy_mode:
            variables |= kernels_of_any_shape()
        if self._args.deterministic_mode:
            variables |= deterministic_variables()
        # Ray shows that environment to everyone who may ask it: what is named for a secret is set by the rank itself.
        wanted = as_environment(self._args.train_env_vars)
        variables |= {name: value for name, value in wanted.items() if not is_secret(name, value)}
        self._on_one_host = len({slot.host for slot in placement.train}) == 1
        begins = {} if newest is None else {"load": newest.save, "critic_load": newest.critic_save}
        its_args = worker_options(argparse.Namespace(**vars(self._args) | begins))
        environment = actor_environment(variables)
        for rank, slot in enumerate(placement.train):
            options = {"runtime_env": environment, **placement.options(slot, trains=True)}
            given = its_args, rank, len(placement.train), slot.gpu, self._sharing(placement, slot)
            actor = as_actor(TrainActor).options(**options).remote(*given)
            self.actors.append(actor)
            self._supervisor.watch(f"trainer {rank}", actor)

    def _sharing(self, placement: Placement, slot: Slot) -> int | None:
        """How many slots share the cores of a trainer's host; None where it does not choose its threads by them: with a
        GPU, where they are told, and in runs whose bits do not depend on the host."""
        told = "OMP_NUM_THREADS" in os.environ | as_environment(self._args.train_env_vars)
        exact = engines_are_deterministic(self._args)
        return None if slot.gpu is not None or told or exact else placement.slots_beside(slot)

    def start(self, num_rollout: int) -> int:
        """Build the models and load their weights; the first to train on of the run's ``num_rollout`` rollouts."""
        limit = limit_of(self._args, "checkpoint_timeout")
        served = {"trainer 0": self.actors[0].serve_rendezvous.remote(self._on_one_host)}
        (master,) = self._supervisor.wait(served, START_TRAINERS, limit)
        answers = self.call(START_TRAINERS, "start", limit, master, num_rollout)
        self._first, self.dp_size, self._state = answers[0]
        self._dp_ranks = self.call(START_TRAINERS, "dp_rank", _CONTROL)
        return self._first

    def take_state(self) -> dict[str, Any] | None:
        """Once, the data side's state of the checkpoint that they have loaded; None where there is none."""
        state, self._state = self._state, None
        self.optimizer_steps = state["optimizer_steps"] if state is not None else 0
        return state

    def kill(self) -> None:
        """End all, whatever they are doing, so that others can be made in their place."""
        for name in self.names:
            self._supervisor.forget(name)
        calls = [actor.stop.remote() for actor in self.actors]
        if calls:
            # Those that still answer have engines leave the group that they push in.
            ray.wait(calls, num_returns=len(calls), timeout=_LEAVE_S)
        ends = [actor.watch.remote() for actor in self.actors]
        for actor in self.actors:
            ray.kill(actor)
        if ends:  # and their memory is free
            ray.wait(ends, num_returns=len(ends), timeout=_LEAVE_S)
        for call in (*calls, *ends, *self._calls, *self._begun):  # Ray would print their errors when it forgets them
            with contextlib.suppress(RayError):
                ray.get(call, timeout=0)
        self.actors, self._calls, self._begun = [], [], []

    @property
    def version(self) -> str:
        """Of the engines' weights, as messages have it."""
        return self._supervisor.version

    @property
    def names(self) -> list[str]:
        """As messages call them, by rank."""
        return [f"trainer {rank}" for rank in range(len(self.actors))]

    def call(self, phase: str, method: str, limit: Deadline, *values: Any) -> list[Any]:
        """Call a method of every rank; the answers, by rank."""
        return self.call_each(phase, method, limit, [values] * len(self.actors))

    def call_each(self, phase: str, method: str, limit: Deadline, values: Iterable[tuple[Any, ...]]) -> list[Any]:
        """The same with values of its own for each rank."""
        calls = {
            f"trainer {rank}": getattr(actor, method).remote(*its_values)
            for rank, (actor, its_values) in enumerate(zip(self.actors, values, strict=False))
        }
        self._calls, self._begun = list(calls.values()), []
        return self._supervisor.wait(calls, phase, limit)

    def begin(self, method: str, *values: Any) -> dict[str, ray.ObjectRef]:
        """Call a method of every rank, by name, before whatever they are called for next; nothing is waited for."""
        calls = {
            name: getattr(actor, method).remote(*values) for name, actor in zip(self.names, self.actors, strict=True)
        }
        self._begun += calls.values()
        return calls

    def train(self, rollout_id: int, batches: list[ray.ObjectRef], limit: Deadline) -> list[dict[str, float]]:
        """Train on a rollout, of which each data-parallel rank has a batch; rank 0's metrics, one dict a step."""
        values = ((rollout_id, batches[rank]) for rank in self._dp_ranks)
        answers = self.call_each(f"train on rollout {rollout_id}", "train", limit, values)
        return answers[0] if answers else []


@dataclass(frozen=True)
class Checkpoint:
    """One that a run has written, or a snapshot."""

    save: str
    """The directory that it is in, under the name of its rollout."""
    critic_save: str | None
    rollout_id: int


class Saver:
    """Has trainers write checkpoints, Hugging Face directories and adapters, and knows what they have not finished."""

    def __init__(self, args: argparse.Namespace, trainers: TrainGroup) -> None:
        self._args, self._trainers = args, trainers
        self._unfinished: list[Path] = []
        self._begun: set[int] = set()
        """Rollouts after which a checkpoint was begun; earlier runs may have left others there."""
        self._snapshot: Checkpoint | None = None

    @property
    def limit(self) -> Deadline:
        """Of whatever is saved."""
        return limit_of(self._args, "checkpoint_timeout")

    def save(self, rollout_id: int, state: dict[str, Any]) -> None:
        """Write what is asked for after a rollout; ``state`` is what a resumed run needs besides the trainers' own."""
        args, phase = self._args, f"save after rollout {rollout_id}"
        if args.save:
            self._begun.add(rollout_id)
            critic_save = args.critic_save if args.use_critic else None
            self._write(Checkpoint(args.save, critic_save, rollout_id), state, phase)
        self.export(rollout_id, exports_after(args, rollout_id), phase)

    def snapshot(self, rollout_id: int, state: dict[str, Any], directory: str) -> None:
        """Write the same into a directory in memory, in the place of the one before, when it is whole."""
        critic_save = str(Path(directory, "critic")) if self._args.use_critic else None
        before, taken = self._snapshot, Checkpoint(directory, critic_save, rollout_id)
        self._write(taken, state, f"snapshot after rollout {rollout_id}")
        self._snapshot = taken
        if before is not None and before.rollout_id != rollout_id:
            for each in filter(None, (before.save, before.critic_save)):
                shutil.rmtree(checkpoint_directory(each, before.rollout_id), ignore_errors=True)

    def _write(self, place: Checkpoint, state: dict[str, Any], phase: str) -> None:
        saves = [each for each in (place.save, place.critic_save) if each]
        values = [(place.rollout_id, None if rank else state, *saves) for rank in range(len(self._trainers.actors))]
        with self._staging([checkpoint_directory(each, place.rollout_id) for each in saves], phase):
            self._trainers.call_each(phase, "save", self.limit, values)

    def newest(self) -> Checkpoint | None:
        """The newest of this run's checkpoints and snapshots that is whole."""
        found = [self._snapshot] if self._snapshot is not None else []
        if self._begun and (latest := find_checkpoint(self._args.save)) and latest[1] in self._begun:
            found.append(Checkpoint(self._args.save, self._args.critic_save, latest[1]))
        return max(found, key=lambda each: each.rollout_id, default=None)

    def has_written(self, rollout_id: int) -> bool:
        """Whether there is all that `save` is to write after a rollout."""
        args = self._args
        saved = not args.save or (rollout_id in self._begun and checkpoint_directory(args.save, rollout_id).is_dir())
        return saved and all(is_export(place, args, rollout_id) for place in exports_after(args, rollout_id).values())

    def export(self, rollout_id: int, places: dict[str, str], phase: str) -> None:
        """Write the directories of ``places``, by the option that asks for each."""
        for option, directory in places.items():
            with self._staging([Path(directory)], phase):
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
    def _staging(self, finals: list[Path], phase: str) -> Iterator[None]:
        """Within, trainers write what becomes ``finals``; what is unfinished when that fails is left to `clean_up`."""
        self._unfinished = finals
        try:
            yield
        except LostError:  # told of by whoever brings them back
            raise
        except RunError as error:
            action = f"the run ends; {finals[0].name} is as it was before"
            version = self._trainers.version
            events.add("save_failed", "the trainers", phase=phase, version=version, cause=str(error), action=action)
            raise
        self._unfinished = []
