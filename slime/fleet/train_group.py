"""The trainers of a run as one: made, started, called and ended together."""

from __future__ import annotations

import argparse
from typing import Any

import ray

from slime.fleet.placement import Placement
from slime.ray.cluster import actor_environment, as_actor, worker_options
from slime.ray.supervision import RESTORE_DATA, START_TRAINERS, Deadline, Supervisor, limit_of
from slime.ray.train_actor import TrainActor
from slime.utils.environment import as_environment
from slime.utils.redaction import is_secret

_CONTROL = Deadline(60.0)


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
        self.actors = create_trainers(self._args, placement)
        for name, actor in self._named().items():
            self._supervisor.watch(name, actor)

    def start(self, num_rollout: int, *, on_one_host: bool) -> int:
        """Build the models and load their weights; the first rollout to train on.

        Args:
            num_rollout: of the whole run.
            on_one_host: whether no other host needs to reach where the ranks meet.
        """
        limit = limit_of(self._args, "checkpoint_timeout")
        served = {"trainer 0": self.actors[0].serve_rendezvous.remote(on_one_host)}
        (master,) = self._supervisor.wait(served, START_TRAINERS, limit)
        answers = self.call("start", START_TRAINERS, limit, master, num_rollout)
        self._first, self.dp_size, self._state = answers[0]
        self._dp_ranks = self.call("dp_rank", START_TRAINERS, _CONTROL)
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
        for name, actor in self._named().items():
            self._supervisor.forget(name)
            ray.kill(actor)
        self.actors = []

    def call(self, method: str, phase: str, limit: Deadline, *values: Any) -> list[Any]:
        """Call a method of every rank; the answers, by rank."""
        calls = {name: getattr(actor, method).remote(*values) for name, actor in self._named().items()}
        return self._supervisor.wait(calls, phase, limit)

    def train(self, rollout_id: int, batches: list[ray.ObjectRef], limit: Deadline) -> list[dict[str, float]]:
        """Train on a rollout, of which each data-parallel rank has a batch; rank 0's metrics, one dict a step."""
        calls = {
            name: actor.train.remote(rollout_id, batches[dp_rank])
            for (name, actor), dp_rank in zip(self._named().items(), self._dp_ranks, strict=False)
        }
        answers = self._supervisor.wait(calls, f"train on rollout {rollout_id}", limit)
        return answers[0] if answers else []

    def _named(self) -> dict[str, Any]:
        return {f"trainer {rank}": actor for rank, actor in enumerate(self.actors)}


def create_trainers(args: argparse.Namespace, placement: Placement) -> list[Any]:
    """One actor a training rank."""
    # torch and megatron-core warn of their own deprecations, many lines a rank; no code of users runs there.
    variables = {"PYTHONWARNINGS": "ignore", **placement.interface()}
    if getattr(args, "sglang_enable_symm_mem", False):
        variables["NCCL_CUMEM_ENABLE"] = "1"  # as in those engines, whatever the host says
    # Ray shows that environment to everyone who may ask it: what is named for a secret is set by the rank itself.
    wanted = as_environment(args.train_env_vars)
    variables |= {name: value for name, value in wanted.items() if not is_secret(name, value)}
    environment = actor_environment(variables)
    its_args, actors = worker_options(args), []
    for rank, slot in enumerate(placement.train):
        options = {"runtime_env": environment, **placement.options(slot, trains=True)}
        actors.append(as_actor(TrainActor).options(**options).remote(its_args, rank, len(placement.train), slot.gpu))
    return actors
